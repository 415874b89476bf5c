"""What a worker polls many times a second: the control file, the events of its ranks, the growth of their logs."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from trainmaster.protocol.documents import parse_lines, read_document
from trainmaster.protocol.request import Control
from trainmaster.protocol.run_directory import CONTROL, Gap, RunDirectory
from trainmaster.worker.records import append
from trainmaster.worker.verdict import Failure


class ControlWatch:
    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / CONTROL
        self._name = os.fspath(self._path)
        self._signature: tuple[int, int, int] | None = None
        self._seq = -1

    def poll(self, *, closely: bool = False) -> Control | None:
        """A control that is newer than all before, or None. `closely` distrusts the file's times, which are coarse."""
        try:
            status = os.stat(self._name)
        except OSError:
            return None
        signature = (status.st_mtime_ns, status.st_ino, status.st_size)
        if signature == self._signature and not closely:
            return None
        # One that this version does not understand is ignored; the next one may be understood.
        with contextlib.suppress(ValueError, TypeError):
            document = read_document(self._path)
            control = Control.from_json(document) if document is not None else None
            if control is not None and control.seq > self._seq:
                self._signature, self._seq = signature, control.seq
                return control
        self._signature = signature
        return None


class RankWatch:
    def __init__(self, directory: RunDirectory, *, log_cap_bytes: int = 0) -> None:
        self._directory = directory
        self._log_cap_bytes = log_cap_bytes
        self._logs: list[LogClock] = []
        self._caps: list[LogCap] = []
        self._events: dict[int, EventWatch] = {}
        self.can_save = False
        """Whether one of them reported that it saves when asked to stop."""
        self.has_finished = False
        """Whether one of them reported that its work is complete."""
        self.dump_stacks: set[int] = set()
        self.failures: dict[int, Failure] = {}

    def follow(self, logs: Sequence[str], events: Mapping[int, str]) -> None:
        """Follow these logs from now on, and these event files, too."""
        self._logs = [LogClock(os.fspath(self._directory.path / log)) for log in logs]
        if self._log_cap_bytes:
            self._caps = [LogCap(self._directory, log, self._log_cap_bytes) for log in logs]
        for rank, path in events.items():
            self._events.setdefault(rank, EventWatch(path))

    @property
    def next_due(self) -> float | None:
        """The latest time to look, if a fast-growing log needs it sooner than usual."""
        return min((cap.due for cap in self._caps if cap.due is not None), default=None)

    def poll(self, *, last: bool = False) -> bool:
        """Read what is new; returns whether there was an event. `last` dates the logs to their very end."""
        for log in self._logs:
            log.poll(last=last)
        for cap in self._caps:
            cap.poll()
        news = False
        for rank, watch in self._events.items():
            for event in watch.poll():
                self._take(rank, event)
            news |= watch.grew
        return news

    def _take(self, rank: int, event: dict[str, Any]) -> None:
        match event.get("type"):
            case "capable":
                self.can_save |= bool(event.get("save"))
                if event.get("stacks"):
                    self.dump_stacks.add(rank)
            case "finished":
                self.has_finished = True
            case "failed":
                if (failure := Failure.from_json(event)) is not None:
                    self.failures[rank] = failure


_CHUNK_BYTES = 1 << 20
_MOST_CHUNKS = 16
"""A rank that reports without end must not block its worker."""
_LINES_PER_CHUNK = 1000
_OF_INTEREST = re.compile(rb'"(?:capable|finished|failed)"')
"""Lines that a worker parses; all others are for the server."""


class EventWatch:
    def __init__(self, path: str) -> None:
        self._path = path
        self._read = 0
        self.grew = False
        """Whether the last look found anything, of interest or not."""

    def poll(self) -> list[dict[str, Any]]:
        before, found = self._read, []
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_size > before:
                with open(self._path, "rb") as file:
                    found = self._take(file)
        self.grew = self._read > before
        return found

    def _take(self, file: BinaryIO) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        file.seek(self._read)
        for _ in range(_MOST_CHUNKS):
            chunk = file.read(_CHUNK_BYTES)
            taken = chunk.rfind(b"\n") + 1
            if _OF_INTEREST.search(chunk, 0, taken):
                lines = [line for line in chunk[:taken].split(b"\n") if _OF_INTEREST.search(line)]
                found += parse_lines(lines[-_LINES_PER_CHUNK:])
            if not taken and len(chunk) < _CHUNK_BYTES:
                break
            # A line that is longer than any report is skipped.
            self._read += taken or len(chunk)
            file.seek(self._read)
        return found


class LogClock:
    """Dates a log's bytes by lines `T N`: N bytes at time T. A line is as old as the first entry beyond its start."""

    EVERY_S = 0.2
    """Resolution. A log that grows constantly would otherwise get an index of its own size."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._size = 0
        self._due = 0.0

    def poll(self, *, last: bool = False) -> None:
        """A full disk costs the entry, not the log."""
        now = time.monotonic()
        if now < self._due and not last:
            return
        try:
            size = os.stat(self._path).st_size
        except OSError:
            return
        if size <= self._size:
            return
        self._due = now + self.EVERY_S
        with contextlib.suppress(OSError):
            append(f"{self._path}.times", f"{time.time():.3f} {size}\n".encode())
            self._size = size


SHORTEST_WAIT_S = 0.005
"""Between two looks at a log that grows as fast as the disk allows."""
LONGEST_WAIT_S = 0.1
_LINE_BYTES = 1 << 16
"""How far a cut may move to fall between two lines."""


class LogCap:
    """Keeps one log below its cap: the middle is cut afterwards, as ranks write straight to it; fast ones often."""

    def __init__(self, directory: RunDirectory, log: str, cap_bytes: int) -> None:
        self._directory = directory
        self._log = log
        self._path = os.fspath(directory.path / log)
        self._cap = cap_bytes
        self._gap = directory.gap(log)
        self._size = 0
        self._seen_at = time.monotonic()
        self.due: float | None = None
        """When to look again, if sooner than usual."""

    def poll(self) -> None:
        try:
            size = os.stat(self._path).st_size
        except OSError:
            return
        now = time.monotonic()
        rate = (size - self._size) / max(now - self._seen_at, 1e-6)
        self._size, self._seen_at, self.due = size, now, None
        held = size - (self._gap.end - self._gap.start if self._gap else 0)
        if held > self._cap:
            with contextlib.suppress(OSError):
                # Half of the cap stays as head, three eighths as tail, so that the next cut is not near.
                start = self._gap.start if self._gap else self._line_end_before(self._cap // 2)
                middle = Gap(start=start, end=self._line_end_after(size - self._cap * 3 // 8), cap_bytes=self._cap)
                self._gap = self._directory.remove(self._log, middle, being_written=True)
            held = self._cap * 7 // 8
        if rate > 0:
            wait_s = (self._cap - held) / rate / 2
            if wait_s < LONGEST_WAIT_S:
                self.due = now + max(wait_s, SHORTEST_WAIT_S)

    def _line_end_before(self, offset: int) -> int:
        length = min(offset, _LINE_BYTES, self._cap // 8)
        found = self._directory.read(self._log, offset - length, length).rfind(b"\n")
        return offset - length + found + 1 if found >= 0 else offset

    def _line_end_after(self, offset: int) -> int:
        found = self._directory.read(self._log, offset, min(_LINE_BYTES, self._cap // 8)).find(b"\n")
        return offset + found + 1

"""Reading a job's log: which files, from where, merged by time, a page at a time.

A cursor says how far each file of one attempt was read; the next page begins where the last one ended, so that no line
is missed or shown twice, even after a restart of the server.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.core.job import Job
from trainmaster.server.core.states import TERMINAL, JobStatus
from trainmaster.server.http import log_files
from trainmaster.server.http.errors import wrong
from trainmaster.server.http.log_files import LogFile, Run
from trainmaster.server.storage import RUNS, Roots, Streams, streams_of
from trainmaster.server.store.page_tokens import decode_position, encode_position

MAX_PAGE_BYTES = 16 << 20
"""A page ends after so much text, whatever its limit of lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFilter:
    """Which lines are wanted. None does not filter."""

    attempt: int | None = None
    """This attempt alone; otherwise the log continues with the next attempt."""
    node: int | None = None
    rank: int | None = None
    stream: str | None = None
    step: str | None = None

    def admits(self, file: LogFile) -> bool:
        return (
            self.node in (None, file.node)
            and self.rank in (None, file.rank)
            and self.stream in (None, file.stream)
            and self.step in (None, file.step)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A position in a log: an attempt, and the next offset of each of its files."""

    attempt: int
    offsets: Mapping[str, int] = field(default_factory=dict)

    def encode(self) -> str:
        return encode_position([self.attempt, self.offsets])

    @staticmethod
    def decode(text: str) -> Cursor:
        try:
            attempt, offsets = decode_position(text)
            sane = all(
                log_files.is_log_file(name) and type(offset) is int and 0 <= offset < 1 << 62
                for name, offset in offsets.items()
            )
            if type(attempt) is int and 0 < attempt < 1 << 31 and sane:
                return Cursor(attempt=attempt, offsets=offsets)
        except (ValueError, TypeError, AttributeError):
            pass
        raise wrong("cursor", "is not a cursor of this log; leave it out to begin anew")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSnapshot:
    """What can be read of a job's log at one time."""

    attempt: int
    """The latest; 1 before the first."""
    ended: bool
    """The latest attempt will write no more."""
    status: JobStatus
    files: tuple[LogFile, ...]
    """Of the latest attempt."""
    notice: str | None = None
    """Why a log that had lines has none now."""


class LogEntry(NamedTuple):
    attempt: int
    file: LogFile
    run: Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    entries: list[LogEntry]
    cursor: Cursor
    complete: bool
    """There are no more lines, and there will be none."""
    at_end: bool
    """There are no more lines now."""
    open_lines: tuple[LogEntry, ...] = ()
    """The newest state of lines being overwritten, such as progress bars, after the cursor. Read only `at_end`."""


class LogReader:
    def __init__(self, roots: Roots, job_id: str, chosen: LogFilter) -> None:
        self._roots = roots
        self.job_id = job_id
        self._filter = chosen

    def take_snapshot(self, job: Job) -> LogSnapshot:
        """What can be read now. `job` was read before this look, so that the files of ended attempts are complete."""
        attempt, ended = max(1, job.attempt_count), has_ended(job)
        return LogSnapshot(
            attempt=attempt,
            ended=ended,
            status=job.status,
            files=tuple(self._files(attempt, ended=ended)),
            notice=removal_notice(self._roots, job),
        )

    def look_again(self, snapshot: LogSnapshot) -> LogSnapshot:
        """What can be read now of an unchanged job whose files may have grown."""
        return (
            snapshot if snapshot.ended else replace(snapshot, files=tuple(self._files(snapshot.attempt, ended=False)))
        )

    def start(self, snapshot: LogSnapshot, *, tail: int | None, since: float | None, whole: bool) -> Cursor:
        """The cursor of the last `tail` lines, of those `since` a time, or of the latest or (`whole`) first attempt."""
        first = self._filter.attempt or (1 if whole else snapshot.attempt)
        if first > snapshot.attempt:
            raise NotFoundError(f"there is no attempt {first}; the latest is {snapshot.attempt}")
        if since is not None:
            return self._start_since(snapshot, first, since)
        return self._start_of_last(snapshot, first, tail) if tail is not None else Cursor(attempt=first)

    def read(self, snapshot: LogSnapshot, cursor: Cursor, limit: int | None, max_bytes: int = MAX_PAGE_BYTES) -> Page:
        """The lines after a cursor, at most `limit` of them."""
        entries: list[LogEntry] = []
        size, room = 0, math.inf if limit is None else limit
        while True:
            offsets = dict(cursor.offsets)
            for file, run in self._merged(snapshot, cursor):
                if room <= 0 or size >= max_bytes:
                    here = Cursor(attempt=cursor.attempt, offsets=offsets)
                    return Page(entries=entries, cursor=here, complete=False, at_end=False)
                if run.line_count > room:
                    run = run.first(int(room))
                entries.append(LogEntry(cursor.attempt, file, run))
                size, room = size + len(run.data), room - run.line_count
                offsets[file.name] = run.end
            cursor = Cursor(attempt=cursor.attempt, offsets=offsets)
            if not _ended(snapshot, cursor.attempt) or self._filter.attempt or cursor.attempt >= snapshot.attempt:
                return Page(
                    entries=entries,
                    cursor=cursor,
                    complete=self._complete(snapshot, cursor),
                    at_end=True,
                    open_lines=tuple(self._open_lines(snapshot, cursor)),
                )
            cursor = Cursor(attempt=cursor.attempt + 1)

    def _open_lines(self, snapshot: LogSnapshot, cursor: Cursor) -> Iterator[LogEntry]:
        """The newest state of each line that is being overwritten."""
        if _ended(snapshot, cursor.attempt):
            return
        directory = self._streams(cursor.attempt, ended=False)
        for file in self._seen(snapshot, cursor.attempt):
            start = cursor.offsets.get(file.name, 0)
            if start >= file.size:
                continue
            written = directory.read(file.name, start, min(file.size - start, log_files.MAX_LINE_BYTES))
            if b"\r" in written and (state := log_files.newest_state(written)):
                status = directory.status(file.name)
                yield LogEntry(cursor.attempt, file, Run(status.st_mtime if status else 0.0, start, start, state))

    def _complete(self, snapshot: LogSnapshot, cursor: Cursor) -> bool:
        if self._filter.attempt:
            return _ended(snapshot, cursor.attempt)
        return snapshot.status in TERMINAL and snapshot.ended and cursor.attempt >= snapshot.attempt

    def _start_since(self, snapshot: LogSnapshot, first: int, since: float) -> Cursor:
        for attempt in range(first, snapshot.attempt + 1):
            ended = _ended(snapshot, attempt)
            directory = self._streams(attempt, ended=ended)
            files = list(self._seen(snapshot, attempt))
            offsets = {file.name: log_files.start_since(directory, file, since, ended=ended) for file in files}
            if self._filter.attempt or any(offsets[file.name] < file.size for file in files):
                break
        return Cursor(attempt=attempt, offsets=offsets)

    def _start_of_last(self, snapshot: LogSnapshot, first: int, count: int) -> Cursor:
        last = self._filter.attempt or snapshot.attempt
        for attempt in range(last, first - 1, -1):
            starts, found = self._last_lines(snapshot, attempt, count)
            count -= found
            if count <= 0 or attempt == first:
                break
        return Cursor(attempt=attempt, offsets=starts)

    def _last_lines(self, snapshot: LogSnapshot, attempt: int, count: int) -> tuple[dict[str, int], int]:
        """Where the last lines of one attempt begin in each file, and how many there are."""
        ended = _ended(snapshot, attempt)
        directory = self._streams(attempt, ended=ended)
        files = list(self._seen(snapshot, attempt))
        starts = {file.name: log_files.start_of_last(directory, file, count, ended=ended) for file in files}
        kept: deque[tuple[LogFile, Run]] = deque()
        found = 0
        for file, run in self._merged(snapshot, Cursor(attempt=attempt, offsets=starts)):
            kept.append((file, run))
            found += run.line_count
            while kept and found - kept[0][1].line_count >= count:
                found -= kept.popleft()[1].line_count
        if found > count:
            file, run = kept.popleft()
            kept.appendleft((file, run.without_first(found - count)))
            found = count
        offsets = {file.name: log_files.start_of_last(directory, file, 0, ended=ended) for file in files}
        for file, run in reversed(kept):
            offsets[file.name] = run.start
        return offsets, found

    def _merged(self, snapshot: LogSnapshot, cursor: Cursor) -> Iterator[tuple[LogFile, Run]]:
        """The lines of an attempt after a cursor, by time; within a file they stay in order."""
        ended = _ended(snapshot, cursor.attempt)
        directory = self._streams(cursor.attempt, ended=ended)
        files = list(self._seen(snapshot, cursor.attempt))
        sources = [
            map(partial(_tagged, place), log_files.runs(directory, file, cursor.offsets.get(file.name, 0), ended=ended))
            for place, file in enumerate(files)
            if cursor.offsets.get(file.name, 0) < file.size
        ]
        for _, place, run in heapq.merge(*sources) if len(sources) > 1 else (sources[0] if sources else ()):
            yield files[place], run

    def _seen(self, snapshot: LogSnapshot, attempt: int) -> Iterator[LogFile]:
        if attempt == snapshot.attempt:
            yield from snapshot.files
        else:
            # Ended long ago: nothing changes there any more.
            yield from self._files(attempt, ended=True)

    def _files(self, attempt: int, *, ended: bool) -> Iterator[LogFile]:
        return filter(self._filter.admits, log_files.log_files(self._streams(attempt, ended=ended)))

    def _streams(self, attempt: int, *, ended: bool) -> Streams:
        return streams_of(self._roots, self.job_id, attempt, ended=ended)


def has_ended(job: Job) -> bool:
    return job.attempt is None and (job.attempt_count > 0 or job.status in TERMINAL)


def removal_notice(roots: Roots, job: Job) -> str | None:
    if not has_ended(job) or not job.attempt_count or roots.path(RUNS, job.job_id).exists():
        return None
    if roots.archive is not None:
        if roots.archive.unit(f"{RUNS}/{job.job_id}/{job.attempt_count}") is not None:
            return None
        return (
            "the logs and metrics of this job are not here: the server that ran it has not moved them to the object "
            "store yet, or they were removed, as they are kept for a limited time after a job's end"
        )
    return "the logs and metrics of this job were removed: the server keeps them for a limited time after a job's end"


def _tagged(place: int, run: Run) -> tuple[float, int, Run]:
    return run.at, place, run


def _ended(snapshot: LogSnapshot, attempt: int) -> bool:
    return attempt < snapshot.attempt or snapshot.ended

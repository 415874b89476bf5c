"""Reading the streams of an attempt on from where the last read stopped, within limits: ranks may write without end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainmaster.protocol.documents import parse_lines
from trainmaster.protocol.run_directory import RunDirectory
from trainmaster.server.core.job import Attempt

LONGEST_LINE = 1 << 20
"""A longer line is skipped: no report needs it, and it must not block the lines after it."""
READ_LINES = 512
"""Lines that one read takes from all event streams of an attempt together: other jobs wait meanwhile."""
LEAST_LINES = 16
"""Lines that each stream gets in one read, however many streams share it."""
MOST_LINES = 2048
"""After this many lines a read starts no further stream; a later read goes on there."""
LOOK_S = 0.2
"""After this time, neither, once the read took a line."""
MOST_LINES = 50_000
"""Lines that are ever taken from one event stream of an attempt: each may become a row of the database."""
MOST_BYTES = 64 * LONGEST_LINE
"""Bytes that are ever read from one event stream of an attempt."""
MOST_OF_RANKS = 4
"""Of all ranks of an attempt together, this many times the limits of one stream: a job may have thousands of ranks."""
NEWEST_BYTES = 64 << 10
"""The last part of an event stream that is read where the rest is skipped."""
METRICS_BYTES = 1 << 20
METRICS_LINES = 1000
"""The newest part of the metrics that one read parses: a job shows last values only; the series is read from the
file."""
_RANKS_LINES, _RANKS_BYTES = "#lines", "#bytes"
"""The keys, beside the offsets of streams, for what was taken from the streams of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fresh:
    """What one read takes from one event stream."""

    records: Sequence[dict[str, Any]] = ()
    notes: Sequence[dict[str, Any]] = ()
    behind: bool = False


_NOTHING = Fresh()


class Streams:
    """Reads streams from where the last read stopped, within the limits of one read."""

    def __init__(self, directory: RunDirectory, attempt: Attempt, *, count: int) -> None:
        self._directory = directory
        self._lines_each = max(READ_LINES // count, LEAST_LINES)
        self._deadline = time.monotonic() + LOOK_S
        self.offsets = dict(attempt.offsets)
        self._taken = 0
        self._newest_lines = max(1, min(LEAST_LINES, MOST_LINES // count))
        self.behind = False
        """Some stream has more than this read took, which later reads are to take."""
        self.skipped_bytes = 0

    def fresh(self, stream: str, *, of_rank: bool) -> Fresh:
        """The next lines of an event stream, and a note on each line that was skipped."""
        start, taken = self.offsets.get(stream, 0), self.offsets.get(_lines_of(stream), 0)
        room = MOST_LINES - taken
        if of_rank:
            room = min(room, MOST_OF_RANKS * MOST_LINES - self.offsets.get(_RANKS_LINES, 0))
        all_bytes = self.offsets.get(_RANKS_BYTES, 0)
        if start >= MOST_BYTES or not room or (of_rank and all_bytes >= MOST_OF_RANKS * MOST_BYTES):
            return _NOTHING
        # Until something was taken there is no deadline: a slow disk would end every read before the ranks' reports.
        late = self._taken and time.monotonic() > self._deadline
        if late or self._taken >= MOST_LINES:
            status = self._directory.status(stream)
            return Fresh(behind=status is not None and status.st_size > start)
        # One byte back: unless it ends a line, this is the middle of one that is being skipped.
        back = 1 if start else 0
        data = self._directory.read(stream, start - back, back + LONGEST_LINE)
        unread = data[back:]
        lines: list[bytes] = []
        notes: list[dict[str, Any]] = []
        if back and data[:1] != b"\n":
            length = unread.find(b"\n") + 1 or len(unread)
        else:
            *lines, rest = unread.split(b"\n", min(self._lines_each, room))
            length = len(unread) - len(rest)
            if not lines and len(unread) == LONGEST_LINE:
                length = LONGEST_LINE
                notes.append(note(f"a report of more than {LONGEST_LINE} bytes was skipped, in {stream}"))
        if not length:
            return _NOTHING
        start, taken = start + length, taken + len(lines)
        self._taken += len(lines)
        if of_rank:
            all_bytes += length
            self.offsets[_RANKS_LINES] = self.offsets.get(_RANKS_LINES, 0) + len(lines)
            self.offsets[_RANKS_BYTES] = all_bytes
        if start >= MOST_BYTES or len(lines) >= room or all_bytes >= MOST_OF_RANKS * MOST_BYTES:
            start = max(start, MOST_BYTES)
            notes.append(
                {
                    "type": "reports_cut",
                    "message": f"{stream} has more than {MOST_LINES} lines or {MOST_BYTES >> 20} MiB, or all ranks "
                    f"together have {MOST_OF_RANKS} times as much; the rest of it is ignored, and with it the "
                    "checkpoints and phases that it reports",
                }
            )
        self.offsets[stream], self.offsets[_lines_of(stream)] = start, taken
        behind = start < MOST_BYTES and (len(unread) == LONGEST_LINE or b"\n" in unread[length:])
        return Fresh(records=parse_lines(lines), notes=notes, behind=behind)

    def reads_on_after_end(self, node: int, *, reads: int) -> bool:
        """Whether another read may follow at a node that has ended; each call counts as one."""
        key = f"#after_end/{node}"
        self.offsets[key] = self.offsets.get(key, 0) + 1
        return self.offsets[key] <= reads

    def skip_to_newest(self, stream: str, said: Fresh) -> Fresh:
        """What this read took of a stream, and its last lines; those in between are skipped for good."""
        status = self._directory.status(stream)
        start = self.offsets.get(stream, 0)
        if status is None or status.st_size <= start:
            return replace(said, behind=False)
        lines = self._newest(stream, most_bytes=NEWEST_BYTES, most_lines=self._newest_lines)
        # What follows the last whole line is no report.
        end = self.offsets[stream] if lines else status.st_size
        self.skipped_bytes += end - start - sum(len(line) + 1 for line in lines)
        self.offsets[stream] = status.st_size
        return replace(said, records=[*said.records, *parse_lines(lines)], behind=False)

    def newest(self, stream: str) -> list[dict[str, Any]]:
        """The last lines of a stream beyond what was read before; earlier ones are skipped."""
        return parse_lines(self._newest(stream, most_bytes=METRICS_BYTES, most_lines=METRICS_LINES))

    def _newest(self, stream: str, *, most_bytes: int, most_lines: int) -> list[bytes]:
        status = self._directory.status(stream)
        start = self.offsets.get(stream, 0)
        if status is None or status.st_size <= start:
            return []
        start = max(start, status.st_size - most_bytes)
        back = 1 if start else 0
        data = self._directory.read(stream, start - back, back + most_bytes)
        first = 0 if not back else data.find(b"\n") + 1  # what precedes it is the end of a line that was cut
        end = data.rfind(b"\n") + 1
        if end <= first:
            return []
        self.offsets[stream] = start - back + end
        return data[first : end - 1].rsplit(b"\n", most_lines)[-most_lines:]


def _lines_of(stream: str) -> str:
    """The key, beside a stream's offset, for the number of lines that were taken from it."""
    return f"{stream}#lines"


def note(message: str, at: object = None) -> dict[str, Any]:
    return {"type": "note", "t": at, "message": message}

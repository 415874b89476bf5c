"""Keeps a log below its cap: its head and its tail stay, and of the middle as much goes as has to.

Ranks write straight to their files, so a log can only be cut after it was written. A log that grows fast is looked at
often: what it may hold too much for a moment is what its rank writes between two looks.
"""

from __future__ import annotations

import contextlib
import os
import time

from trainmaster.protocol.log_gaps import Gap
from trainmaster.protocol.run_directory import RunDirectory

SHORTEST_WAIT_S = 0.005
"""Between two looks at a log that grows as fast as the disk lets it."""
LONGEST_WAIT_S = 0.1
_LINE_BYTES = 1 << 16
"""How far a cut is moved to fall between two lines."""


class LogCap:
    """Cuts one log."""

    def __init__(self, directory: RunDirectory, log: str, cap_bytes: int) -> None:
        self._directory = directory
        self._log = log
        self._path = os.fspath(directory.path / log)
        self._cap = cap_bytes
        self._gap = directory.gap(log)
        self._size = 0
        self._seen_at = time.monotonic()
        self.due: float | None = None
        """When to look again, where that is sooner than usual."""

    def look(self) -> None:
        """Cut the log if it holds too much. What a full disk prevents is tried again."""
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
                self._gap = self._directory.remove(self._log, self._middle(size), being_written=True)
            held = self._cap * 7 // 8
        if rate > 0:
            wait_s = (self._cap - held) / rate / 2
            if wait_s < LONGEST_WAIT_S:
                self.due = now + max(wait_s, SHORTEST_WAIT_S)

    def _middle(self, size: int) -> Gap:
        """What goes: after it, half of the cap is head and three eighths are tail, so that the next cut is not near."""
        start = self._gap.start if self._gap else self._line_end_before(self._cap // 2)
        return Gap(start=start, end=self._line_end_after(size - self._cap * 3 // 8), cap_bytes=self._cap)

    def _line_end_before(self, offset: int) -> int:
        length = min(offset, _LINE_BYTES, self._cap // 8)
        found = self._directory.read(self._log, offset - length, length).rfind(b"\n")
        return offset - length + found + 1 if found >= 0 else offset

    def _line_end_after(self, offset: int) -> int:
        found = self._directory.read(self._log, offset, min(_LINE_BYTES, self._cap // 8)).find(b"\n")
        return offset + found + 1

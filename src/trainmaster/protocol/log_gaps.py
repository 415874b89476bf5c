"""Gaps: what was removed from the middle of a log that had reached its cap.

Beside a log `L`, `L.gap.json` says which bytes are gone. It is written before they go. Offsets on both sides stay what
they were: where the file system can do that, the middle becomes a hole in the file. Where it cannot, the log is cut
off after its head and made as long as it was: then its tail is what was written after the last cut.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainmaster.protocol.account_files import open_below

_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01
_NOT_POSSIBLE = (errno.EOPNOTSUPP, errno.ENOSYS)

_UNSEEN_BYTES = 64 << 20
"""More than a process writes between a look at a log's size and the cut; it costs no room."""
_MAX_OFFSET = 1 << 62
_MOST_BYTES = 1 << 10
"""More than a gap takes to be written down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The bytes from `start` up to `end` are gone."""

    start: int
    end: int
    cap_bytes: int
    """Why: the log was to hold no more than this."""

    def to_json(self) -> dict[str, int]:
        """The plain form, as in `<log>.gap.json`."""
        return asdict(self)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Gap:
        """The gap of a plain form.

        Raises:
            ValueError: it is none.
        """
        values = [document.get(name) for name in ("start", "end", "cap_bytes")]
        start, end, cap_bytes = (value if type(value) is int else -1 for value in values)
        if not 0 <= start <= end < _MAX_OFFSET or cap_bytes < 0:
            raise ValueError("a gap has a start, an end and the cap that it is there for")
        return Gap(start=start, end=end, cap_bytes=cap_bytes)


def gap_path(log: str) -> str:
    """Where the gap of a log is written down."""
    return f"{log}.gap.json"


def gap_of(directory: str, log: str) -> Gap | None:
    """The gap of a log, by its name in a run directory; None while it is whole.

    Whoever reads the log must ask after the reading: what lies in a gap is not what was written there.
    """
    try:
        with open(open_below(directory, gap_path(log)), "rb") as file:
            return Gap.from_json(json.loads(file.read(_MOST_BYTES)))
    except (FileNotFoundError, NotADirectoryError, ValueError, AttributeError, RecursionError):
        return None


def remove(directory: str, log: str, wanted: Gap, *, record: Callable[[Gap], None], being_written: bool) -> Gap:
    """Remove bytes of a log, together with those that were removed before; what is gone now.

    A log that is shorter than the gap's end becomes that long. Repeating it is harmless.

    Args:
        directory: the run directory.
        log: its name there.
        wanted: what is to go.
        record: writes the gap down.
        being_written: others append to the log without a lock.
    """
    descriptor = open_below(directory, log, os.O_WRONLY | os.O_CREAT)
    try:
        if not being_written:
            # As `RunDirectory.append` does. Ranks take no lock, and one that holds it must not hold up its worker.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        before = gap_of(directory, log) or wanted
        start, end = min(wanted.start, before.start, size), max(wanted.end, before.end)
        gap = Gap(start=start, end=end, cap_bytes=wanted.cap_bytes)
        record(gap)
        try:
            _punch(descriptor, start, end - start)
        except OSError as error:
            if error.errno not in _NOT_POSSIBLE:
                raise
            # What is written between the look at the size and the cut is lost, too, and must lie in the gap.
            gap = replace(gap, end=max(end, size + _UNSEEN_BYTES if being_written else size))
            record(gap)
            os.ftruncate(descriptor, start)
        if os.fstat(descriptor).st_size < gap.end:
            os.ftruncate(descriptor, gap.end)
        return gap
    finally:
        os.close(descriptor)


def _punch(descriptor: int, start: int, length: int) -> None:
    if length and _fallocate(descriptor, _PUNCH_HOLE_KEEP_SIZE, start, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

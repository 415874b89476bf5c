"""Holds a node to the memory that is booked for it, where no cgroup does: looks at it now and then.

The kernel would kill at the first byte too many; here a process has a moment. What counts is what cannot be written
back to a file: pages of the heap, and shared memory, which each process counts for its share.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable

EVERY_S = 0.5
_RESIDENT = re.compile(rb"^(?:VmRSS|VmSwap):\s+(\d+) kB$", re.MULTILINE)
_SHARES = re.compile(rb"^(?:Pss_Anon|Pss_Shmem|SwapPss):\s+(\d+) kB$", re.MULTILINE)


class MemoryWatch:
    """Looks at the processes of a node."""

    def __init__(self, limit_mb: int) -> None:
        self._limit_mb = limit_mb
        self._due = 0.0

    def excess(self, now: float, processes: Callable[[], Iterable[int]]) -> str | None:
        """What is wrong, once the processes hold more than they may."""
        if not self._limit_mb or now < self._due:
            return None
        self._due = now + EVERY_S
        pids = list(processes())
        # What is shared counts several times in the first sum, which costs little; in the second it does not.
        if sum(_sum_mb(f"/proc/{pid}/status", _RESIDENT) for pid in pids) <= self._limit_mb:
            return None
        held_mb = sum(_sum_mb(f"/proc/{pid}/smaps_rollup", _SHARES) for pid in pids)
        if held_mb <= self._limit_mb:
            return None
        return f"its processes hold {held_mb:.0f} MB of memory, and {self._limit_mb} MB are booked for them"


def _sum_mb(path: str, amounts: re.Pattern[bytes]) -> float:
    """What a file tells of a process; nothing where that has ended, or is not for us to see."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return sum(map(int, amounts.findall(file.read()))) / 1024
    return 0.0

"""Where the ranks are: their own stack dumps if they offer them, else what the kernel knows of their processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Set
from pathlib import Path

from trainmaster.worker.processes import descendants, signal_all

COLLECT_AFTER_S = 0.5
"""A rank has this long to print its stacks."""
_MAX_BYTES = 64 << 10


class StackDump:
    """One dump of all ranks of a node: begun at once, collected a moment later."""

    def __init__(self, ranks: Mapping[int, int], capable: Set[int], error_logs: Mapping[int, str], now: float) -> None:
        self.due = now + COLLECT_AFTER_S
        self._ranks = dict(ranks)
        self._printing: dict[int, tuple[str, int]] = {}
        for rank, pid in ranks.items():
            # Whoever does not catch the signal would die of it: a shell around the program, for instance.
            catching = [found for found in (pid, *descendants(pid)) if _catches(found, signal.SIGUSR1)]
            if rank in capable and catching:
                log = error_logs[rank]
                self._printing[rank] = (log, _size(log))
                signal_all(catching, signal.SIGUSR1)

    def collect(self) -> dict[int, str]:
        """The text of each rank."""
        texts = {}
        for rank, pid in self._ranks.items():
            printed = _read_from(*self._printing[rank]) if rank in self._printing else ""
            texts[rank] = printed or _kernel_view(pid)
        return texts


def _kernel_view(pid: int) -> str:
    return "\n".join(text for process in (pid, *descendants(pid)) if (text := _process_view(process)))


def _process_view(pid: int) -> str:
    command = _proc(pid, "cmdline").replace("\0", " ").strip()
    if not command:
        return ""
    status = dict(line.partition(":")[::2] for line in _proc(pid, "status").splitlines())
    facts = [
        f"process {pid}: {command[:300]}",
        f"  state: {status.get('State', '?').strip()}, threads: {status.get('Threads', '?').strip()}",
        f"  waits in: {_proc(pid, 'wchan').strip('0') or '-'}, system call: {_proc(pid, 'syscall').strip() or '-'}",
    ]
    facts += (f"  {line}" for line in _proc(pid, "stack").splitlines())
    return "\n".join(facts)


def _catches(pid: int, number: signal.Signals) -> bool:
    for line in _proc(pid, "status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _proc(pid: int, name: str) -> str:
    """A file of /proc; empty when it is not there or not for us."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _read_from(path: str, offset: int) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""

"""Signals to processes that a test knows by their pid: each goes to a pidfd, opened before the process is checked.

Pids are reused, on many kernels after 32,768 processes. A child that the test itself has not reaped keeps its pid:
`Popen.kill` and `os.kill` before `os.waitpid` are safe without this.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainmaster.protocol.processes import ProcessIdentity, send_signal, signal_if
from trainmaster.worker.processes import start_time_of


def kill_claimant(claimant: Mapping[str, Any] | None, number: signal.Signals = signal.SIGKILL) -> None:
    """Signal the worker that claimed a node, by the identity that it wrote into the claim; it must still run."""
    assert claimant is not None, "nobody has claimed the node"
    send_signal(ProcessIdentity.from_json(claimant), number)


def kill_rank(rank: Mapping[str, Any], number: signal.Signals = signal.SIGKILL) -> None:
    """Signal a rank, by its entry in a worker's record `started`; it must still run."""
    signal_if(rank["pid"], lambda: start_time_of(rank["pid"]) == rank["start_time"], number)


def kill_marked(pid: int, mark: str, number: signal.Signals = signal.SIGKILL) -> None:
    """Signal a process if its environment has a variable `NAME=value`, or its command line an argument.

    Raises:
        ProcessLookupError: it has ended, or is another process.
    """
    signal_if(pid, lambda: mark.encode() in _words_of(pid), number)


def kill_all_marked(mark: str) -> None:
    """Kill every process with this variable or argument that there is now."""
    for pid in pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill_marked(pid, mark)


def pids() -> Iterable[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _words_of(pid: int) -> list[bytes]:
    """The variables and the arguments of a process; empty for a zombie, and for one that we may not see."""
    words: list[bytes] = []
    for name in ("environ", "cmdline"):
        with contextlib.suppress(OSError):
            words += Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0")
    return words

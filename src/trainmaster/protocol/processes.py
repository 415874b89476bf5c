"""Process identity, which tells a reused pid apart (Linux, /proc), and the marker files of a server."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

KILL_LED = signal.SIGALRM
"""Makes a program that leads into a container kill the container; the program's own death would not."""
_MAX_PID = 1 << 22
"""The kernel's limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """A process of one boot of one machine: pids are reused."""

    pid: int
    start_time: int
    """Clock ticks after boot."""
    boot_id: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> ProcessIdentity:
        """Raises ValueError if the document is no identity."""
        pid, start_time, boot = (document.get(name) for name in ("pid", "start_time", "boot_id"))
        if type(pid) is not int or not 0 < pid <= _MAX_PID or type(start_time) is not int or not isinstance(boot, str):
            raise ValueError("a process has a pid, a start time and a boot")
        return ProcessIdentity(pid=pid, start_time=start_time, boot_id=boot)


def identity_of(pid: int) -> ProcessIdentity | None:
    """The identity of a running process; None if there is none, or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name may contain spaces and parentheses: count fields from its end.
    fields = stat[stat.rindex(")") + 2 :].split()
    if fields[0] in "ZX":
        return None
    return ProcessIdentity(pid=pid, start_time=int(fields[19]), boot_id=boot_id())


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether this very process still runs; a zombie does not."""
    return identity_of(identity.pid) == identity


def send_signal(identity: ProcessIdentity, number: int) -> None:
    """Send a signal to this very process; raises as `signal_if` does."""
    signal_if(identity.pid, lambda: is_alive(identity), number)


def signal_if(pid: int, is_meant: Callable[[], bool], number: int) -> None:
    """Send a signal to the process that has this pid now, if `is_meant` says so; else raise ProcessLookupError.

    A pidfd is opened before the check: the signal cannot reach a process that gets the pid later.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (OSError, AttributeError):  # a kernel before 5.3, a sandbox without this call, or a Python built without it
        descriptor = None
    try:
        if not is_meant():
            raise ProcessLookupError(f"process {pid} has ended")
        if descriptor is None:
            os.kill(pid, number)
        else:
            signal.pidfd_send_signal(descriptor, number)
    finally:
        if descriptor is not None:
            os.close(descriptor)


@functools.cache
def boot_id() -> str:
    """Changes with every boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# Files in a server's data directory that its clients read, too.
KEPT = "kept"
"""The server was last started explicitly, and not by a command that needed one."""
AT_REST = "at-rest"
"""The last server stopped with no unfinished job in its database. Removed at every start."""

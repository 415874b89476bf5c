"""Finding, signalling and examining processes: those below this one, and those an attempt left behind. Linux.

A worker is a child subreaper: whatever its ranks start becomes its own child, at the latest when the parent in between
ends, even after `setsid` or a double fork. So the processes below it are all there are.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import NamedTuple

from trainmaster.protocol.environment import ATTEMPT_ID, NODE
from trainmaster.protocol.processes import signal_if
from trainmaster.worker.cgroups import members_pattern, remove_groups

# Looked up here, so that a new child has nothing to resolve between fork and exec.
_libc = ctypes.CDLL(None, use_errno=True)
_prctl = _libc.prctl
_PR_SET_PDEATHSIG = 1
_PR_GET_PDEATHSIG = 2
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38

_SWEEP_PAUSE_S = 0.02


def become_subreaper() -> None:
    if _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot become a child subreaper")


def set_undumpable() -> None:
    """Keep other processes of the same user from reading this one's memory; only fully privileged root still can."""
    _prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def set_no_new_privs() -> None:
    """Keep setuid programs from gaining rights, here and in all descendants."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends; `parent` is the process that forked it."""
    _prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        # The parent ended before the kernel was told.
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def keeping_death_signal() -> Iterator[None]:
    """Keep dying with the parent: the kernel forgets the death signal when a process changes its user."""
    number, parent = ctypes.c_int(), os.getppid()
    _prctl(_PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0)
    try:
        yield
    finally:
        if number.value:
            die_with_parent(parent, number.value)


def start_time_of(pid: int) -> int | None:
    """Clock ticks after boot; also for a process that has ended but was not reaped yet."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def wake_on_children(selector: selectors.BaseSelector) -> socket.socket:
    """Wake a selector whenever a child ends, for as long as the returned socket is kept. For the main thread."""
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    selector.register(reader, selectors.EVENT_READ, lambda: reader.recv(4096))
    return writer


class SeenProcess(NamedTuple):
    """A process at the time it was looked at: the kernel reuses pids."""

    pid: int
    start_time: int


def seen(pid: int, *, below: int | None = None) -> SeenProcess | None:
    """The process with this pid, or its zombie; None if it is not, or no child of `below`."""
    if (fields := _stat(pid)) is None or (below is not None and int(fields[1]) != below):
        return None
    return SeenProcess(pid, int(fields[19]))


def descendants(pid: int) -> list[SeenProcess]:
    """Every process below `pid`, parents before their children, zombies included."""
    children_of = _listed_children if _kernel_lists_children() else _children_by_parent().get
    found: list[SeenProcess] = []
    frontier = list(filter(None, [seen(pid)]))
    while frontier:
        parent = frontier.pop()
        children = [child for each in children_of(parent.pid) or () if (child := seen(each, below=parent.pid))]
        if _is_still(parent):  # else these are the children of another
            found += children
            frontier += children
    return found


def signal_all(processes: Iterable[SeenProcess], number: signal.Signals) -> None:
    """Send a signal to those of these processes that still exist, and to no others."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal_if(process.pid, functools.partial(_is_still, process), number)


def _is_still(process: SeenProcess) -> bool:
    return start_time_of(process.pid) == process.start_time


def sweep(attempt_id: str, node: int | None = None, *, patience_s: float = 20.0) -> int:
    """Kill every process of an attempt, or of one of its nodes; returns their number, once none is left.

    They are identified by the variables that all descendants of ranks inherit, and by their cgroup. The worker itself
    and the caller are not among them. Raises TimeoutError if some are still there after `patience_s`.
    """
    killed: set[SeenProcess] = set()
    deadline = time.monotonic() + patience_s
    clean_scans = 0
    # Two, because what a process forked in its last moments may have escaped one scan.
    while clean_scans < 2:
        found = list(_processes_of(attempt_id, node))
        signal_all(found, signal.SIGKILL)
        killed.update(found)
        clean_scans = 0 if found else clean_scans + 1
        if found:
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes of {attempt_id} do not end: {[process.pid for process in found]}")
            time.sleep(_SWEEP_PAUSE_S)
    remove_groups(attempt_id, node)
    return len(killed)


def _processes_of(attempt_id: str, node: int | None) -> Iterator[SeenProcess]:
    marks = {f"{ATTEMPT_ID}={attempt_id}".encode()}
    if node is not None:
        marks.add(f"{NODE}={node}".encode())
    in_cgroup = members_pattern(attempt_id, node)
    own = os.getpid()
    for pid in _pids():
        if pid == own:
            continue
        # The start time is read first: if it is unchanged when the signal is sent, the marks were this process's.
        if (fields := _stat(pid)) is None or fields[0] in ("Z", "X"):
            continue
        with contextlib.suppress(OSError):
            marked = marks.issubset(_environ(pid).split(b"\0"))
            if marked or in_cgroup.search(_read(f"/proc/{pid}/cgroup")):
                yield SeenProcess(pid, int(fields[19]))


def _environ(pid: int) -> bytes:
    path = f"/proc/{pid}/environ"
    try:
        return _read(path)
    except PermissionError:
        if os.geteuid() != 0:
            return b""
    # Root of a container may not read other users' processes, but each user may read its own. The fsuid changes for
    # this thread only.
    owner = os.stat(path)
    try:
        _libc.setfsgid(owner.st_gid)
        _libc.setfsuid(owner.st_uid)
        return _read(path)
    except PermissionError:
        return b""
    finally:
        _libc.setfsuid(0)
        _libc.setfsgid(os.getegid())


@functools.cache
def _kernel_lists_children() -> bool:
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def _listed_children(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        # A child is listed under the thread that forked it.
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                children += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
    return children


def _children_by_parent() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for pid in _pids():
        if fields := _stat(pid):
            children.setdefault(int(fields[1]), []).append(pid)
    return children


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat from the state on; None if there is no such process."""
    try:
        text = _read(f"/proc/{pid}/stat").decode(errors="replace")
    except OSError:
        return None
    # The command name before them may contain spaces and parentheses.
    return text[text.rindex(")") + 2 :].split()


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


COLLECT_AFTER_S = 0.5
"""A rank has this long to print its stacks."""
_MAX_BYTES = 64 << 10


class StackDump:
    """The stacks of all ranks of a node: what they print, else what the kernel shows; collected a moment later."""

    def __init__(self, ranks: Mapping[int, int], capable: Set[int], error_logs: Mapping[int, str], now: float) -> None:
        self.due = now + COLLECT_AFTER_S
        self._ranks = dict(ranks)
        self._printing: dict[int, tuple[str, int]] = {}
        for rank, pid in ranks.items():
            # A process that does not catch the signal would die of it, such as a shell around the program.
            catching = [found for found in _with_descendants(pid) if _catches(found.pid, signal.SIGUSR1)]
            if rank in capable and catching:
                log = error_logs[rank]
                self._printing[rank] = (log, _size(log))
                signal_all(catching, signal.SIGUSR1)

    def collect(self) -> dict[int, str]:
        texts = {}
        for rank, pid in self._ranks.items():
            printed = _read_from(*self._printing[rank]) if rank in self._printing else ""
            views = (_process_view(process.pid) for process in _with_descendants(pid))
            texts[rank] = printed or "\n".join(filter(None, views))
        return texts


def _with_descendants(pid: int) -> list[SeenProcess]:
    return [*filter(None, [seen(pid)]), *descendants(pid)]


def _process_view(pid: int) -> str:
    if not (command := _proc(pid, "cmdline").replace("\0", " ").strip()):
        return ""
    status = _status(pid)
    facts = [
        f"process {pid}: {command[:300]}",
        f"  state: {status.get('State', '?').strip()}, threads: {status.get('Threads', '?').strip()}",
        f"  waits in: {_proc(pid, 'wchan').strip('0') or '-'}, system call: {_proc(pid, 'syscall').strip() or '-'}",
    ]
    facts += (f"  {line}" for line in _proc(pid, "stack").splitlines())
    return "\n".join(facts)


def _catches(pid: int, number: signal.Signals) -> bool:
    return bool(int(_status(pid).get("SigCgt", "0"), 16) >> (number - 1) & 1)


def _status(pid: int) -> dict[str, str]:
    return dict(line.partition(":")[::2] for line in _proc(pid, "status").splitlines())


def _proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _size(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_size
    return 0


def _read_from(path: str, offset: int) -> str:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(offset)
        return file.read(_MAX_BYTES).decode(errors="replace")
    return ""

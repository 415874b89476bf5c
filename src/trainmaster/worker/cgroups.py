"""A cgroup for each node of an attempt, if one can be made; otherwise `MemoryWatch` limits its memory.

The group identifies what a dead worker left behind, counts the kernel's out-of-memory kills, and limits the node to
what is booked for it. It lies below this process's own, so that limits set for us still apply:
`<own group>/trainmaster-<attempt id>.<node>`.

If the host has the memory controller in cgroup version 1, that hierarchy is used, and the cpu hierarchy beside it;
else version 2. There a group has either processes or controllers to delegate. So a service whose group systemd
delegated, and which runs in a subgroup of it, gets the groups of its jobs beside that subgroup.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from trainmaster.protocol.account_files import closing

_PREFIX = "trainmaster-"
_OOM_COUNT = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)
_PERIOD_US = 100_000
"""The kernel's default period for cpu quotas."""
_MEMORY_LIMITS = ("memory.limit_in_bytes", "memory.max")


def members_pattern(attempt_id: str, node: int | None) -> re.Pattern[bytes]:
    """Matches /proc/<pid>/cgroup of every process in a group of this attempt, or of one of its nodes."""
    group = re.escape(_PREFIX + attempt_id).encode()
    return re.compile(rb"/%b\.%b(?:/|$)" % (group, rb"\d+" if node is None else b"%d" % node), re.MULTILINE)


@functools.cache
def own_group() -> Path | None:
    """The directory in which groups can be made, usually this process's own."""
    return next((group for group in _groups("memory") if _is_ours(group)), None)


@functools.cache
def _processor_group() -> Path | None:
    if (own := own_group()) is None or (own / "cgroup.controllers").exists():
        return None
    return next((group for group in _groups("cpu") if _is_ours(group) and group != own), None)


def find_groups() -> None:
    own_group()
    _processor_group()


def _is_ours(group: Path) -> bool:
    return os.access(group, os.W_OK) and os.access(group / "cgroup.procs", os.W_OK)


def _groups(controller: str) -> list[Path]:
    """This process's group in each hierarchy that may have a controller."""
    memberships: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            memberships |= dict.fromkeys(controllers.split(","), path)
    found = []
    for kind, name in (("cgroup", controller), ("cgroup2", "")):
        for mount in _mounts(kind, name) if name in memberships else ():
            group = mount / memberships[name].lstrip("/")
            # In a container, the group has its name outside, and is mounted as if it were the root.
            own = group if group.is_dir() else mount
            found += [own.parent, own] if kind == "cgroup2" and _is_delegated(own.parent) else [own]
    return found


def _is_delegated(group: Path) -> bool:
    """Whether systemd has delegated a group to the service in it."""
    for mark in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(group, mark) == b"1":
                return True
    return False


def remove_groups(attempt_id: str, node: int | None = None) -> None:
    """Remove the groups that dead workers of an attempt, or of one of its nodes, left. Groups with members stay."""
    for own in filter(None, (own_group(), _processor_group())):
        for group in own.glob(f"{_PREFIX}{attempt_id}.{'*' if node is None else node}"):
            with contextlib.suppress(OSError):
                group.rmdir()


def limits(memory_mb: int, cpu_cores: int) -> dict[str, str]:
    """The files of a group and their content, in order of writing; 0 is no limit. Each version has some of the files.

    >>> limits(1, 2)["memory.max"], limits(1, 2)["cpu.max"], limits(0, 0)
    ('1048576', '200000 100000', {})
    """
    memory, quota_us = str(memory_mb << 20), cpu_cores * _PERIOD_US
    found: dict[str, str] = {}
    if memory_mb:
        # "memsw" is memory and swap together.
        found = dict.fromkeys(("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max"), memory)
        found["memory.swap.max"] = "0"
    if cpu_cores:
        found |= {"cpu.cfs_quota_us": str(quota_us), "cpu.max": f"{quota_us} {_PERIOD_US}"}
    return found


class Cgroup:
    """The group of one node of an attempt. Created when the first process is put into it."""

    def __init__(self, attempt_id: str, node: int, *, memory_mb: int = 0, cpu_cores: int = 0) -> None:
        own = own_group()
        places = [own, _processor_group() if cpu_cores else None]
        self._paths = [place / f"{_PREFIX}{attempt_id}.{node}" for place in places if place is not None]
        self._limits = limits(memory_mb, cpu_cores)
        self._memory_mb = memory_mb
        self._counter: Path | None = None
        self._counted_before = 0
        self.memory_limit_mb: int | None = None
        """The limit that the kernel enforces; None: none, or not yet."""
        if own is None:
            # No group can be made: count kills in this process's own.
            self._begin_counting(*_groups("memory"))

    @property
    def has_limits(self) -> bool:
        return bool(self._limits)

    def adopt(self, pids: Iterable[int]) -> None:
        """Move processes into the group; what they start from then on belongs to it, too."""
        pids = list(pids)
        for path in list(self._paths):
            try:
                self._make(path)
                procs = os.open(path / "cgroup.procs", os.O_WRONLY)
            except OSError:
                self._paths.remove(path)
                continue
            with closing(procs):
                for pid in pids:
                    # It may have ended meanwhile.
                    with contextlib.suppress(OSError):
                        os.write(procs, str(pid).encode())

    def count_anew(self) -> None:
        if self._counter is not None:
            self._counted_before = _oom_count(self._counter) or self._counted_before

    def oom_kills(self) -> int | None:
        count = None if self._counter is None else _oom_count(self._counter)
        return None if count is None else count - self._counted_before

    def remove(self) -> None:
        for path in self._paths:
            with contextlib.suppress(OSError):
                path.rmdir()

    def _make(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        if self._limits:
            self._limit(path)
        if self._counter is None:
            # In version 2, a group without a memory controller is counted in its parent.
            self._begin_counting(path, path.parent)

    def _limit(self, path: Path) -> None:
        if (path / "cgroup.controllers").exists():
            for controller in ("memory", "cpu"):
                # It may be delegated already, or not be ours to delegate.
                with contextlib.suppress(OSError):
                    (path.parent / "cgroup.subtree_control").write_text(f"+{controller}")
        for name, value in self._limits.items():
            file = path / name
            # Without the controller, and in the other version, the file is missing.
            with contextlib.suppress(OSError):
                if file.exists():
                    file.write_text(value)
                    if name in _MEMORY_LIMITS:
                        self.memory_limit_mb = self._memory_mb

    def _begin_counting(self, *groups: Path) -> None:
        for counter in (group / name for group in groups for name in ("memory.oom_control", "memory.events")):
            if (count := _oom_count(counter)) is not None:
                self._counter, self._counted_before = counter, count
                return


def _oom_count(path: Path) -> int | None:
    try:
        match = _OOM_COUNT.search(path.read_bytes())
    except OSError:
        return None
    return int(match[1]) if match else None


def _mounts(kind: str, option: str) -> list[Path]:
    """The mount points of a hierarchy; of version 1 only the one with a certain controller."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, target, kind_here, options, *_ = line.split(" ")
            if kind_here == kind and (not option or option in options.split(",")):
                found.append(Path(target))
    return found


MEMORY_LOOK_EVERY_S = 0.5
_RESIDENT = re.compile(rb"^(?:VmRSS|VmSwap):\s+(\d+) kB$", re.MULTILINE)
_SHARES = re.compile(rb"^(?:Pss_Anon|Pss_Shmem|SwapPss):\s+(\d+) kB$", re.MULTILINE)


class MemoryWatch:
    """Limits a node to its booked memory where no cgroup does, by polling what cannot be written back to a file."""

    def __init__(self, limit_mb: int) -> None:
        self._limit_mb = limit_mb
        self._due = 0.0

    def excess(self, now: float, processes: Callable[[], Iterable[int]]) -> str | None:
        """What is wrong, once the processes hold more than the limit."""
        if not self._limit_mb or now < self._due:
            return None
        self._due = now + MEMORY_LOOK_EVERY_S
        pids = list(processes())
        # The first sum is cheap and counts shared memory several times; the second does not.
        if sum(_sum_mb(f"/proc/{pid}/status", _RESIDENT) for pid in pids) <= self._limit_mb:
            return None
        held_mb = sum(_sum_mb(f"/proc/{pid}/smaps_rollup", _SHARES) for pid in pids)
        if held_mb <= self._limit_mb:
            return None
        return f"its processes hold {held_mb:.0f} MB of memory, and their limit is {self._limit_mb} MB"


def _sum_mb(path: str, amounts: re.Pattern[bytes]) -> float:
    """The amounts in a file of /proc; 0 if the process has ended, or is not ours to see."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return sum(map(int, amounts.findall(file.read()))) / 1024
    return 0.0

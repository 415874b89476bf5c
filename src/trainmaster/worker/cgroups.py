"""A cgroup for each node of an attempt, where one can be made; everything works without.

It finds what a dead worker left behind, whatever that did to its environment, and counts what the
kernel killed for want of memory. The group lies below this process's own, so that limits which somebody
set for us go on to hold: `<own group>/trainmaster-<attempt id>.<node>`.

On a host with the memory controller in version 1 that hierarchy is used, else version 2.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterable
from pathlib import Path

_PREFIX = "trainmaster-"
_OOM_COUNT = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)


def members_pattern(attempt_id: str, node: int | None) -> re.Pattern[bytes]:
    """Matches the content of /proc/<pid>/cgroup of every process in a group of this attempt, or of one of its nodes."""
    group = re.escape(_PREFIX + attempt_id).encode()
    return re.compile(rb"/%b\.%b(?:/|$)" % (group, rb"\d+" if node is None else b"%d" % node), re.MULTILINE)


@functools.cache
def own_group() -> Path | None:
    """The directory of this process's group, if groups can be made below it. Found once per process."""
    for group in _groups():
        if os.access(group, os.W_OK) and os.access(group / "cgroup.procs", os.W_OK):
            return group
    return None


def _groups() -> list[Path]:
    """This process's group in each hierarchy that may count memory."""
    memberships = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            memberships[controllers] = path
    candidates = [(mount, "memory") for mount in _mounts("cgroup", "memory")]
    candidates += [(mount, "") for mount in _mounts("cgroup2", None)]
    groups = [(mount, mount / memberships[name].lstrip("/")) for mount, name in candidates if name in memberships]
    # In a container the group is known by its name outside, and mounted as if it were the root.
    return [group if group.is_dir() else mount for mount, group in groups]


def remove_groups(attempt_id: str, node: int | None = None) -> None:
    """Remove the groups that dead workers of this attempt, or of one of its nodes, left; one with members stays."""
    own = own_group()
    if own is not None:
        for group in own.glob(f"{_PREFIX}{attempt_id}.{'*' if node is None else node}"):
            with contextlib.suppress(OSError):
                group.rmdir()


class Cgroup:
    """The group of one node of an attempt. Nothing is made before the first process is put into it."""

    def __init__(self, attempt_id: str, node: int) -> None:
        own = own_group()
        self._path = own / f"{_PREFIX}{attempt_id}.{node}" if own else None
        self._counter: Path | None = None
        self._counted_before = 0
        if own is None:
            # No group can be made: kills are counted in the one that this process lives in.
            self._begin_counting(*_groups())

    def adopt(self, pids: Iterable[int]) -> None:
        """Move these processes into the group; what they start from then on belongs to it too."""
        if self._path is None:
            return
        try:
            self._path.mkdir(exist_ok=True)
            if self._counter is None:
                # In version 2 a group without a memory controller of its own is counted in the one above it.
                self._begin_counting(self._path, self._path.parent)
            procs = os.open(self._path / "cgroup.procs", os.O_WRONLY)
        except OSError:
            self._path = None
            return
        try:
            for pid in pids:
                # It may have ended meanwhile.
                with contextlib.suppress(OSError):
                    os.write(procs, str(pid).encode())
        finally:
            os.close(procs)

    def oom_kills(self) -> int | None:
        """How many processes the kernel killed here for want of memory; None when nobody counts."""
        if self._counter is None:
            return None
        count = _oom_count(self._counter)
        return None if count is None else count - self._counted_before

    def remove(self) -> None:
        """Remove the group; it must be empty."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.rmdir()

    def _begin_counting(self, *groups: Path) -> None:
        for counter in (group / name for group in groups for name in ("memory.oom_control", "memory.events")):
            count = _oom_count(counter)
            if count is not None:
                self._counter, self._counted_before = counter, count
                return


def _oom_count(path: Path) -> int | None:
    try:
        match = _OOM_COUNT.search(path.read_bytes())
    except OSError:
        return None
    return int(match[1]) if match else None


def _mounts(kind: str, option: str | None) -> list[Path]:
    """Where hierarchies of a kind are mounted; of version 1 only the one with a certain controller."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, target, kind_here, options, *_ = line.split(" ")
            if kind_here == kind and (option is None or option in options.split(",")):
                found.append(Path(target))
    return found

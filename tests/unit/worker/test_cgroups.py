"""Groups of version 2 with limits, as directories that look like them."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmaster.worker import cgroups
from trainmaster.worker.cgroups import Cgroup


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The group below which others are made."""
    monkeypatch.setattr(cgroups, "own_group", lambda: tmp_path)
    monkeypatch.setattr(cgroups, "_processor_group", lambda: None)
    (tmp_path / "cgroup.subtree_control").touch()
    (tmp_path / "memory.events").write_text("oom 0\noom_kill 3\n")
    return tmp_path


def made_by_kernel(own: Path, *names: str) -> Path:
    """The group of node 0 of attempt `a.1`, with the files of the controllers that it has."""
    group = own / "trainmaster-a.1.0"
    group.mkdir()
    for name in ("cgroup.controllers", "cgroup.procs", *names):
        (group / name).touch()
    return group


def test_group_is_held_to_what_is_booked(own: Path) -> None:
    group = made_by_kernel(own, "memory.max", "memory.swap.max", "cpu.max")
    (group / "memory.events").write_text("oom 0\noom_kill 0\n")
    cgroup = Cgroup("a.1", 0, memory_mb=100, cpu_cores=2)
    assert cgroup.has_limits
    assert cgroup.memory_limit_mb is None
    cgroup.adopt([4711])
    assert cgroup.memory_limit_mb == 100
    assert {name: (group / name).read_text() for name in ("memory.max", "memory.swap.max", "cpu.max")} == {
        "memory.max": str(100 << 20),
        "memory.swap.max": "0",
        "cpu.max": "200000 100000",
    }
    assert (group / "cgroup.procs").read_text() == "4711"
    assert (own / "cgroup.subtree_control").read_text() == "+cpu"  # the last of two
    (group / "memory.events").write_text("oom 1\noom_kill 1\n")
    assert cgroup.oom_kills() == 1
    cgroup.count_anew()
    assert cgroup.oom_kills() == 0


def test_group_without_controllers_holds_its_processes_to_nothing(own: Path) -> None:
    group = made_by_kernel(own)
    cgroup = Cgroup("a.1", 0, memory_mb=100)
    cgroup.adopt([4711])
    assert cgroup.memory_limit_mb is None
    assert (group / "cgroup.procs").read_text() == "4711"
    assert cgroup.oom_kills() == 0  # of the group above, from now on


def test_job_that_books_nothing_has_no_limits(own: Path) -> None:
    group = made_by_kernel(own, "memory.max", "cpu.max")
    cgroup = Cgroup("a.1", 0)
    cgroup.adopt([4711])
    assert not cgroup.has_limits
    assert [(group / name).read_text() for name in ("memory.max", "cpu.max")] == ["", ""]
    assert (own / "cgroup.subtree_control").read_text() == ""

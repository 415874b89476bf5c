"""Memory and cores that are booked for a node: what holds its processes to them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from worker_attempts import Attempts, ForkServerProcess, is_running, wait_for

from trainmaster.protocol.launch import LaunchStep
from trainmaster.protocol.reasons import Reason
from trainmaster.worker.cgroups import limits, own_group

TAKE = (
    "def take(mb):\n    taken = bytearray(mb << 20)\n    taken[::4096] = b'x' * len(taken[::4096])\n    return taken\n"
)
HIDDEN_CGROUPS = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /sys/fs/cgroup && exec "$@"', "sh")
needs_limits = pytest.mark.skipif(
    own_group() is None or not (Path(str(own_group())) / "memory.limit_in_bytes").exists(),
    reason="needs a memory cgroup of version 1 that we may write to",
)


@pytest.fixture(scope="module")
def unlimited_fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServerProcess]:
    """One that finds no cgroup to write to, as for most users of a laptop."""
    hidden = HIDDEN_CGROUPS if os.geteuid() == 0 else ()
    server = ForkServerProcess(tmp_path_factory.mktemp("unlimited"), within=hidden)
    yield server
    server.stop()


@pytest.fixture
def watched(unlimited_fork_server: ForkServerProcess, tmp_path: Path) -> Iterator[Attempts]:
    made = Attempts(unlimited_fork_server, tmp_path)
    yield made
    for attempt in made.made:
        attempt.clean_up()


@needs_limits
def test_rank_beyond_its_memory_is_killed_and_its_neighbour_is_not(attempts: Attempts) -> None:
    neighbour = attempts.python(f"{TAKE}import time\nkept = take(400)\nprint('up')\ntime.sleep(600)")
    neighbour.start()
    neighbour.says("up")
    greedy = attempts.python(f"{TAKE}take(400)", memory_mb=200)
    ended = greedy.run()
    assert (ended["reason"], ended["signal"], ended["evidence"]["oom_kills"]) == (Reason.OUT_OF_MEMORY, "SIGKILL", 1)
    assert ended["message"] == "rank 0 was killed by the kernel: out of memory (the node's limit is 200 MB)"
    assert is_running(neighbour.rank_pid())
    assert not Path(str(own_group()), f"trainmaster-{greedy.request.attempt_id}.0").exists()


@needs_limits
def test_process_of_a_rank_that_is_killed_for_memory_is_why_the_rank_failed(attempts: Attempts) -> None:
    code = (
        f"{TAKE}import os\nif os.fork() == 0:\n    take(400)\n    os._exit(0)\n"
        "os.wait()\nraise RuntimeError('a loader was killed')"
    )
    ended = attempts.python(code, memory_mb=200).run()
    assert (ended["reason"], ended["exit_code"]) == (Reason.OUT_OF_MEMORY, 1)
    assert "the kernel had killed a process of its job: out of memory (the node's limit is 200 MB" in ended["message"]
    assert ended["message"].endswith("RuntimeError: a loader was killed")


@needs_limits
def test_memory_that_is_enough_and_preparing_steps_are_let_be(attempts: Attempts) -> None:
    steps = (
        LaunchStep(name="fetch", argv=("-c", f"{TAKE}take(100)"), python=True),
        LaunchStep(name="run", argv=("-c", f"{TAKE}take(100)"), python=True),
    )
    assert attempts(steps=steps, memory_mb=200).run()["reason"] == Reason.SUCCEEDED
    greedy = (
        LaunchStep(name="fetch", argv=("-c", f"{TAKE}take(400)"), python=True),
        LaunchStep(name="run", argv=("true",)),
    )
    ended = attempts(steps=greedy, memory_mb=200).run()
    assert (ended["reason"], ended["step"]) == (Reason.OUT_OF_MEMORY, "fetch")


@pytest.mark.skipif(
    own_group() is None or not Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").exists(),
    reason="needs a cgroup of version 1 for the processor that we may write to",
)
def test_cores_that_are_booked_are_all_that_a_node_gets(attempts: Attempts) -> None:
    attempt = attempts("sh", "-c", "echo up; sleep 600", cpu_cores=1, nodes=2)
    for node in range(2):
        attempt.start(node)
    for node in range(2):
        name = f"trainmaster-{attempt.request.attempt_id}.{node}"
        memberships = Path(f"/proc/{attempt.rank_pid(node, node)}/cgroup")
        wait_for(lambda found=memberships, name=name: f"cpu:/{name}" in found.read_text(), "the move into the group")
        group = Path("/sys/fs/cgroup/cpu", name)
        assert (group / "cpu.cfs_quota_us").read_text() == "100000\n"
    attempt.clean_up()
    wait_for(lambda: not group.exists(), "the group to be gone")


def test_without_a_cgroup_a_rank_beyond_its_memory_is_brought_down(watched: Attempts) -> None:
    attempt = watched.python(f"{TAKE}import time\nprint('up')\nkept = take(400)\ntime.sleep(600)", memory_mb=200)
    ended = attempt.run()
    assert ended["reason"] == Reason.OUT_OF_MEMORY
    assert re.fullmatch(r"its processes hold [2-4]\d\d MB of memory, and their limit is 200 MB", ended["message"])
    assert attempt.record("rank_exited")["signal"] in ("SIGTERM", "SIGKILL")


def test_without_a_cgroup_what_processes_share_counts_once(watched: Attempts) -> None:
    code = (
        f"{TAKE}import os, time\nkept = take(120)\n"
        "for _ in range(3):\n    if os.fork() == 0:\n        time.sleep(1.5)\n        os._exit(0)\n"
        "for _ in range(3): os.wait()"
    )
    assert watched.python(code, memory_mb=200).run()["reason"] == Reason.SUCCEEDED


def test_step_that_leads_into_a_container_is_held_to_nothing(attempts: Attempts) -> None:
    led = LaunchStep(name="run", argv=("-c", f"{TAKE}take(200)"), through=(sys.executable,))
    assert attempts(steps=(led,), memory_mb=50).run()["reason"] == Reason.SUCCEEDED


def test_limits_are_told_to_either_version() -> None:
    assert limits(512, 4) == {
        "memory.limit_in_bytes": "536870912",
        "memory.memsw.limit_in_bytes": "536870912",
        "memory.max": "536870912",
        "memory.swap.max": "0",
        "cpu.cfs_quota_us": "400000",
        "cpu.max": "400000 100000",
    }
    assert limits(0, 0) == {}

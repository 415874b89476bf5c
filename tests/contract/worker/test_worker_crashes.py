"""What is left when a worker, the fork server, the disk or the run directory goes away."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from worker_attempts import Attempts, ForkServerProcess, is_running, wait_for

from patience import PATIENCE_S
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.run_directory import exit_document
from trainmaster.worker.cgroups import own_group


def test_worker_that_is_killed_takes_its_ranks_with_it(attempts: Attempts) -> None:
    attempt = attempts("sleep", "600", ranks_per_node=2)
    attempt.start()
    ranks = [attempt.rank_pid(rank) for rank in range(2)]
    attempt.kill_worker()
    wait_for(lambda: not any(map(is_running, ranks)), "the ranks' end")
    assert attempt.directory.document(exit_document(0)) is None


def test_sweep_kills_what_a_dead_worker_left(attempts: Attempts) -> None:
    attempt = attempts("sh", "-c", "setsid sleep 600 & echo $!; wait")
    attempt.start()
    attempt.says("\n")
    attempt.kill_worker()
    assert attempts.fork_server.ask(op="sweep", attempt_id=attempt.request.attempt_id)["killed"] >= 1
    assert not is_running(int(attempt.log()))
    assert attempts.fork_server.ask(op="sweep", attempt_id=attempt.request.attempt_id) == {"killed": 0}


@pytest.mark.skipif(own_group() is None, reason="needs a cgroup that we may write to")
def test_sweep_finds_by_cgroup_what_dropped_its_environment(attempts: Attempts) -> None:
    attempt = attempts("sh", "-c", "setsid env -i sleep 600 & echo $!; wait")
    attempt.start()
    attempt.says("\n")
    stray = int(attempt.log())
    group = f"trainmaster-{attempt.request.attempt_id}.0"
    wait_for(lambda: group in Path(f"/proc/{stray}/cgroup").read_text(), "its move into the cgroup")
    attempt.kill_worker()
    assert attempts.fork_server.ask(op="sweep", attempt_id=attempt.request.attempt_id)["killed"] >= 1
    assert not is_running(stray)
    assert not (own_group() or Path()).joinpath(group).exists()


def test_sweep_of_one_node_spares_the_others(attempts: Attempts) -> None:
    attempt = attempts("sh", "-c", "setsid sleep 600 & echo up; wait", nodes=2)
    for node in range(2):
        attempt.start(node)
    for node in range(2):
        attempt.says("up", rank=node, node=node)
    attempt.kill_worker(0)
    assert attempts.fork_server.ask(op="sweep", attempt_id=attempt.request.attempt_id, node=0)["killed"] >= 1
    assert is_running(attempt.rank_pid(rank=1, node=1))


def test_sweep_spares_other_attempts_of_the_same_job(attempts: Attempts) -> None:
    attempt = attempts("sleep", "600")
    attempt.start()
    rank = attempt.rank_pid()
    assert attempts.fork_server.ask(op="sweep", attempt_id=attempt.request.attempt_id + "0") == {"killed": 0}
    assert is_running(rank)


def test_fork_server_that_is_killed_leaves_its_workers_running(
    mortal_fork_server: ForkServerProcess, tmp_path: Path
) -> None:
    attempts = Attempts(mortal_fork_server, tmp_path)
    attempt = attempts("sh", "-c", "echo up; while [ ! -e go ]; do sleep 0.05; done; echo done")
    attempt.start()
    attempt.says("up")
    mortal_fork_server.process.kill()
    mortal_fork_server.process.wait()
    (attempt.path / "work" / "go").touch()
    assert attempt.ended()["reason"] == Reason.SUCCEEDED
    assert attempt.log() == "up\ndone\n"


def test_fork_server_after_a_killed_one_takes_its_place(mortal_fork_server: ForkServerProcess, tmp_path: Path) -> None:
    attempts = Attempts(mortal_fork_server, tmp_path)
    living = attempts("sleep", "600")
    living.start()
    living.record("started")
    mortal_fork_server.process.kill()
    mortal_fork_server.process.wait()
    successor = ForkServerProcess(mortal_fork_server.directory)
    try:
        assert Attempts(successor, tmp_path)("true").run()["reason"] == Reason.SUCCEEDED
        living.stop()
        assert living.ended()["reason"] == Reason.CANCELLED
    finally:
        successor.stop()


def test_fork_server_that_retires_makes_room_at_once_and_leaves_its_workers(
    mortal_fork_server: ForkServerProcess, tmp_path: Path
) -> None:
    attempts = Attempts(mortal_fork_server, tmp_path)
    attempt = attempts("sleep", "600")
    attempt.start()
    attempt.record("started")
    assert mortal_fork_server.ask(op="retire") == {}
    successor = ForkServerProcess(mortal_fork_server.directory)
    try:
        assert mortal_fork_server.process.wait(PATIENCE_S) == 0
        assert successor.ask(op="hello")["pid"] == successor.process.pid
        attempt.stop()
        assert attempt.ended()["reason"] == Reason.CANCELLED
    finally:
        successor.stop()


def test_fork_server_lives_alone_in_its_directory(fork_server: ForkServerProcess) -> None:
    command = fork_server.process.args
    assert isinstance(command, list)
    second = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert second.returncode == 1
    assert "another fork server" in second.stderr
    assert fork_server.ask(op="hello")["pid"] == fork_server.process.pid


def test_fork_server_survives_a_hangup(fork_server: ForkServerProcess, attempts: Attempts) -> None:
    fork_server.process.send_signal(signal.SIGHUP)
    assert attempts("true").run()["reason"] == Reason.SUCCEEDED


@pytest.mark.parametrize(
    "line",
    [b"{}\n", b"not json\n", b'{"op": "dance"}\n', b'{"op": "start"}\n', b'["op"]\n', b'{"op": "start", "node": 0}\n'],
)
def test_fork_server_answers_nonsense_with_an_error(fork_server: ForkServerProcess, line: bytes) -> None:
    assert "error" in fork_server.ask_raw(line)
    assert fork_server.greets()


def test_fork_server_reaps_its_workers(fork_server: ForkServerProcess, attempts: Attempts) -> None:
    attempt = attempts("true")
    worker = attempt.start()
    attempt.ended()
    wait_for(lambda: not Path(f"/proc/{worker}").exists(), "the worker's burial")


def test_worker_whose_run_directory_is_removed_ends_with_its_ranks(attempts: Attempts) -> None:
    attempt = attempts("sleep", "600")
    worker = attempt.start()
    rank = attempt.rank_pid()
    shutil.rmtree(attempt.path)
    wait_for(lambda: not is_running(rank) and not is_running(worker), "the worker's end")
    assert not attempt.path.exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", os.fspath(path)]
    if os.geteuid() or shutil.which("mount") is None or subprocess.run(mount, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield path
    subprocess.run(["umount", "--lazy", os.fspath(path)], check=True)


def test_worker_on_a_full_disk_still_reports_its_end(attempts: Attempts, small_disk: Path) -> None:
    attempt = attempts("sh", "-c", "cat /dev/zero > filler; echo more", runs=small_disk / "runs")
    attempt.start()
    ended = attempt.ended()
    assert ended["reason"] == Reason.DISK_FULL
    assert os.statvfs(small_disk).f_bfree * os.statvfs(small_disk).f_frsize < 1 << 16


def test_worker_job_that_survives_a_full_disk_succeeds(attempts: Attempts, small_disk: Path) -> None:
    attempt = attempts(
        "sh", "-c", "cat /dev/zero > filler 2> /dev/null; sleep 3; rm filler; echo done", runs=small_disk / "runs"
    )
    assert attempt.run()["reason"] == Reason.SUCCEEDED
    assert attempt.log() == "done\n"
    assert attempt.record("rank_exited")["exit_code"] == 0

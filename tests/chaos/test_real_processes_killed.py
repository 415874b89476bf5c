"""kill -9 of what runs the jobs: workers, the fork server, the user's own process; and of the whole machine."""

from __future__ import annotations

import hashlib
import json
import os
import time

import pytest
from aftermath import check
from ground import Ground

from process_signals import kill_marked
from real_server import wait_for
from trainmaster.protocol.processes import identity_of

NODE_COUNT_2 = {"gpu_count": 0, "node_count": 2}


@pytest.mark.parametrize("transport", [pytest.param("files", marks=pytest.mark.long), "http"])
def test_killed_worker_job_goes_on_from_its_checkpoint(ground: Ground, transport: str) -> None:
    server = ground.server("data", "--transport", transport).start()
    saving = ground.counting(6, save_every=2, gate="go", gate_at=5, stray=True)
    job_id = server.submit(*saving, scheduling_config={"max_retries": 1})
    rank = ground.until_counted(job_id, 5).pid
    server.kill_worker(job_id)
    wait_for(lambda: identity_of(rank) is None, "the rank to die with its worker")
    ground.until_counted(job_id, 5, attempt=2)
    ground.open_gate("go")
    job = server.until(job_id)
    lost, finished = job["attempts"]
    assert (lost["reason"], finished["reason"]) == ("WORKER_LOST", "SUCCEEDED")
    begun = [(entry.attempt, entry.number) for entry in ground.ledger() if entry.what == "start"]
    assert begun == [(1, 0), (2, 4)]
    check(ground, server, {job_id: "COMPLETED"})


@pytest.mark.long  # the gang below ends so, too
def test_killed_worker_job_without_retries_fails(ground: Ground) -> None:
    server = ground.server().start()
    job_id = server.submit(*ground.counting(2, gate="never", stray=True))
    ground.until_counted(job_id, 1)
    server.kill_worker(job_id)
    assert server.until(job_id)["error"]["error_type"] == "WORKER_LOST"
    check(ground, server, {job_id: "FAILED"})


def test_killed_worker_of_a_gang_ends_the_whole_attempt(ground: Ground) -> None:
    server = ground.server().start()
    job_id = server.submit(*ground.counting(2, gate="never"), resource_config=NODE_COUNT_2)
    wait_for(lambda: len([entry for entry in ground.ledger() if entry.what == "count"]) == 2, "both ranks")
    server.kill_worker(job_id, node=1)
    job = server.until(job_id)
    assert job["error"]["error_type"] == "WORKER_LOST"
    assert "node 1" in job["error"]["error_message"]
    check(ground, server, {job_id: "FAILED"})


def test_killed_fork_server_running_jobs_go_on_and_new_ones_start(ground: Ground) -> None:
    server = ground.server().start()
    running = server.submit(*ground.counting(3, gate="go"))
    rank = ground.until_counted(running, 1).pid
    killed = server.fork_server_pid()
    assert killed is not None
    kill_marked(killed, "fork-server")
    new = server.submit(*ground.counting(2))
    assert server.until(new)["attempt"] == 1
    assert server.fork_server_pid() not in (killed, None)
    assert identity_of(rank) is not None
    ground.open_gate("go")
    assert server.until(running)["attempt"] == 1
    check(ground, server, {running: "COMPLETED", new: "COMPLETED"})


def test_killed_user_process_is_told_from_a_lost_worker(ground: Ground) -> None:
    server = ground.server().start()
    job_id = server.submit(*ground.counting(2, gate="never", stray=True))
    kill_marked(ground.until_counted(job_id, 1).pid, f"TRAINMASTER_JOB_ID={job_id}")
    error = server.until(job_id)["error"]
    assert (error["error_type"], error["signal"], error["fault"]) == ("KILLED_BY_SIGNAL", "SIGKILL", "infrastructure")
    check(ground, server, {job_id: "FAILED"})


@pytest.mark.parametrize(("max_retries", "end"), [pytest.param(0, "FAILED", marks=pytest.mark.long), (1, "COMPLETED")])
def test_rebooted_machine_job_is_known_to_be_gone(ground: Ground, max_retries: int, end: str) -> None:
    server = ground.server().start()
    saving = ground.counting(4, save_every=2, gate="go", gate_at=3)
    job_id = server.submit(*saving, scheduling_config={"max_retries": max_retries})
    ground.until_counted(job_id, 3)
    server.kill()
    # What a reboot leaves: no process of before, and a claim of another boot.
    ground.clean_up()
    claim = server.claim_path(job_id)
    claim.write_text(json.dumps({**json.loads(claim.read_text()), "boot_id": "the boot before"}))
    ground.open_gate("go")
    server.start()
    job = server.until(job_id)
    assert job["attempts"][0]["reason"] == "NODE_LOST"
    assert len(job["attempts"]) == 1 + max_retries
    check(ground, server, {job_id: end})


def test_stale_attempt_cannot_commit_a_checkpoint(ground: Ground) -> None:
    server = ground.server().start()
    job_id = server.submit(*ground.counting(4, save_every=2, gate="go", gate_at=3))
    ground.until_counted(job_id, 3)
    owner = server.directory / "runs" / job_id / "owner.json"
    owner.write_text(json.dumps({"attempt": 2, "token": "of a newer attempt"}))
    ground.open_gate("go")
    job = server.until(job_id)
    assert job["error"]["error_type"] == "EXITED_NONZERO"
    assert "NotOwnerError" in job["error"]["frame"]
    assert [checkpoint["step"] for checkpoint in job["checkpoints"]] == [2]
    artifacts = server.directory / "artifacts" / job_id / "checkpoints"
    assert [path.name for path in artifacts.iterdir()] == ["checkpoint-2"]
    check(ground, server, {job_id: "FAILED"})


@pytest.mark.parametrize("transport", [pytest.param("files", marks=pytest.mark.long), "http"])
def test_worker_that_is_killed_right_after_its_claim_ends_its_attempt(ground: Ground, transport: str) -> None:
    server = ground.server("data", "--transport", transport).start()
    content = os.urandom(32 << 20)  # over HTTP, it is fetched between the claim and the start
    digest = hashlib.sha256(content).hexdigest()
    assert server.ask("PUT", f"/v1/blobs/{digest}", content=content).status_code == 201
    files = [{"path": "large", "sha256": digest}]
    job_id = server.submit("true", workload={"kind": "command", "argv": ["sleep", "60"], "files": files})
    claim = server.claim_path(job_id)
    while not claim.exists():
        time.sleep(0.0005)
    server.kill_worker(job_id)
    ended = server.until(job_id)
    assert (ended["status"], ended["error"]["error_type"], ended["attempt"]) == ("FAILED", "WORKER_LOST", 1)
    ground.leave()

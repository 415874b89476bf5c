"""Pause, resume, retry: what was saved is gone on from, and what was not saved is said."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from local_servers import LocalServer

from real_server import wait_for

TRAINS = """
import argparse, json, os, sys, time
from trainmaster.jobs import report, verify

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=100_000)
options.add_argument("--save-every", type=int, default=0)
options.add_argument("--fail-at", type=int)
options.add_argument("--ignore-stops", action="store_true")
given = options.parse_args()

step = 0
if path := report.resume_path():
    step = verify(path).step
    assert json.loads((path / "state.json").read_text()) == {"step": step}
print("begins at", step, flush=True)

def save():
    with report.checkpoint(step=step, metrics={"loss": 1 / step}) as directory:
        (directory / "state.json").write_text(json.dumps({"step": step}))

while step < given.steps:
    step += 1
    report.progress(step, total_steps=given.steps)
    if step == given.fail_at:
        sys.exit("cannot go on")
    stop = report.stop_requested()
    if stop and not given.ignore_stops:
        if stop.save:
            save()
        print("stopped at", step, flush=True)
        report.exit_stopped()
    if given.save_every and step % given.save_every == 0:
        save()
    time.sleep(0.005)
report.finished()
print("done", flush=True)
"""


@pytest.fixture
def train(scripts: Path) -> Path:
    path = scripts / "train.py"
    path.write_text(TRAINS)
    return path


def wait_until_it_can_save(server: LocalServer, job_id: str) -> None:
    wait_for(lambda: server.job(job_id)["can_save"], f"{job_id} to say that it saves")


def checkpoint_of(job: Any) -> Any:
    (latest,) = [checkpoint for checkpoint in job["checkpoints"] if checkpoint["is_latest"]]
    assert latest["checkpoint_id"] == job["latest_checkpoint_id"]
    return latest


def number_after(server: LocalServer, job_id: str, text: str, **query: Any) -> int:
    (line,) = [line for line in server.lines(job_id, **query) if line.startswith(text)]
    return int(line.removeprefix(text))


def test_paused_job_saves_and_resumes_where_it_was(server: LocalServer, train: Path) -> None:
    job_id = server.submit_python(train)
    wait_until_it_can_save(server, job_id)
    answer = server.control(job_id, "pause")
    assert (answer["desired"], answer["checkpoint_id"]) == ("pause", None)
    job = server.until(job_id, "PAUSED")
    saved = checkpoint_of(job)
    assert (job["status_reason"], job["placement"], job["finished_at"]) == ("PAUSED", None, None)
    assert saved["step"] == number_after(server, job_id, "stopped at")
    assert server.ask("POST", f"/v1/jobs/{job_id}/pause").status_code == 409
    (parked,) = [event for event in server.events_of(job_id, "status") if event["to"] == "PAUSED"]
    assert parked["data"] == {"checkpoint_id": saved["checkpoint_id"]}

    answer = server.control(job_id, "resume")
    assert (answer["status"], answer["checkpoint_id"]) == ("QUEUED", saved["checkpoint_id"])
    resumed = server.wait_for_event(job_id, "resumed")
    assert resumed["data"] == {"checkpoint_id": saved["checkpoint_id"]}
    server.wait_for_line(job_id, "begins at")
    assert number_after(server, job_id, "begins at") == saved["step"]
    job = server.until(job_id, "TRAINING")
    assert [attempt["resume_checkpoint_id"] for attempt in job["attempts"]] == [None, saved["checkpoint_id"]]
    assert number_after(server, job_id, "begins at", attempt="1") == 0


def test_job_can_be_resumed_from_an_older_checkpoint(server: LocalServer, train: Path) -> None:
    job_id = server.submit_python(train, "--save-every", 20)
    wait_for(lambda: len(server.job(job_id)["checkpoints"]) >= 2, "two checkpoints")
    server.control(job_id, "pause")
    job = server.until(job_id, "PAUSED")
    older = min(job["checkpoints"], key=lambda checkpoint: checkpoint["step"])
    assert not older["is_latest"]
    answer = server.control(job_id, "resume", checkpoint_id=older["checkpoint_id"])
    assert answer["checkpoint_id"] == older["checkpoint_id"]
    server.wait_for_event(job_id, "resumed")
    server.wait_for_line(job_id, "begins at")
    assert number_after(server, job_id, "begins at") == older["step"]


def test_pause_of_what_cannot_save_is_refused_unless_nothing_shall_be_saved(server: LocalServer) -> None:
    job_id = server.submit("sh", "-c", "echo begins; exec sleep 600")
    server.until(job_id, "TRAINING")
    refusal = server.ask("POST", f"/v1/jobs/{job_id}/pause")
    assert refusal.status_code == 409
    assert "save_checkpoint" in refusal.json()["error"]["message"]
    server.wait_for_line(job_id, "begins")
    server.control(job_id, "pause", save_checkpoint=False)
    job = server.until(job_id, "PAUSED")
    assert (job["status_reason"], job["checkpoints"]) == ("PAUSED", [])
    assert server.control(job_id, "resume")["checkpoint_id"] is None
    assert "step 0" in server.wait_for_event(job_id, "resumed")["message"]
    wait_for(lambda: server.lines(job_id, attempt="all") == ["begins", "begins"], "the second attempt's line")


def test_missed_grace_is_an_event_and_the_last_checkpoint_stays(server: LocalServer, train: Path) -> None:
    job_id = server.submit_python(train, "--save-every", 20, "--ignore-stops", workload={"grace_period_s": 0.5})
    wait_for(lambda: server.job(job_id)["checkpoints"], "a checkpoint")
    server.control(job_id, "pause")
    job = server.until(job_id, "PAUSED")
    assert "did not stop within" in server.events_of(job_id, "grace_missed")[0]["message"]  # 0.5 s, or three saves
    assert checkpoint_of(job)["step"] % 20 == 0


def test_killed_rank_is_tried_again_from_the_latest_checkpoint(server: LocalServer, train: Path) -> None:
    job_id = server.submit_python(train, "--save-every", 20, scheduling_config={"max_retries": 1})
    wait_for(lambda: server.job(job_id)["checkpoints"], "a checkpoint")
    os.kill(server.rank_pids(job_id)[0], signal.SIGKILL)
    job = server.until(job_id, "QUEUED")
    saved = checkpoint_of(job)
    assert (job["status_reason"], job["retries_used"]) == ("KILLED_BY_SIGNAL", 1)
    assert "before its next try" in job["pending_reason"]
    assert job["attempts"][0]["error"]["signal"] == "SIGKILL"
    resumed = server.wait_for_event(job_id, "resumed")
    assert (resumed["attempt"], resumed["data"]) == (2, {"checkpoint_id": saved["checkpoint_id"]})
    server.wait_for_line(job_id, "begins at")
    assert number_after(server, job_id, "begins at", attempt="2") == saved["step"]
    os.kill(server.rank_pids(job_id, attempt=2)[0], signal.SIGKILL)
    job = server.until(job_id, "FAILED")
    assert (job["error_type"], job["attempt"]) == ("KILLED_BY_SIGNAL", 2)


def test_retry_makes_a_child_that_goes_on_from_its_parents_checkpoint(server: LocalServer, train: Path) -> None:
    parent_id = server.submit_python(train, "--save-every", 20, "--fail-at", 50)
    parent = server.until(parent_id, "FAILED")
    saved = checkpoint_of(parent)
    assert (saved["step"], parent["error"]["exit_code"]) == (40, 1)
    resources = {"gpu_count": 0, "cpu_cores": 1}
    child = server.control(parent_id, "retry", modify_resources=True, new_resource_config=resources)
    assert (child["parent_job_id"], child["root_job_id"]) == (parent_id, parent_id)
    assert (child["checkpoint_id"], child["resource_config"]["cpu_cores"]) == (saved["checkpoint_id"], 1)
    child = server.until(child["job_id"], "FAILED")
    assert number_after(server, child["job_id"], "begins at") == 40
    grandchild = server.control(child["job_id"], "retry", checkpoint_id=parent["checkpoints"][0]["checkpoint_id"])
    assert (grandchild["parent_job_id"], grandchild["root_job_id"]) == (child["job_id"], parent_id)
    server.until(grandchild["job_id"], "FAILED")
    assert number_after(server, grandchild["job_id"], "begins at") == 20
    assert server.job(parent_id)["status"] == "FAILED"


def test_completed_work_is_complete_even_if_a_stop_came_late(server: LocalServer, train: Path) -> None:
    job_id = server.submit_python(train, "--steps", 30, "--ignore-stops", workload={"grace_period_s": 60.0})
    wait_until_it_can_save(server, job_id)
    answer = server.ask("POST", f"/v1/jobs/{job_id}/pause")
    assert answer.status_code in (200, 409)
    assert server.until(job_id)["status"] == "COMPLETED"
    assert server.lines(job_id)[-1] == "done"


def test_checkpoints_beyond_the_limit_are_pruned_while_the_job_runs(server: LocalServer, train: Path) -> None:
    config = {"checkpoint": {"save_total_limit": 2, "metric_for_best_model": "loss", "greater_is_better": True}}
    job_id = server.submit_python(train, "--steps", 60, "--save-every", 10, output_config=config)
    job = server.until(job_id)
    assert job["status"] == "COMPLETED"
    # The best is the first one, whose loss is the greatest; it stays beside the two that the limit allows.
    assert [checkpoint["step"] for checkpoint in job["checkpoints"]] == [10, 50, 60]
    assert checkpoint_of(job)["step"] == 60
    pruned = server.events_of(job_id, "checkpoint_deleted")
    assert len(pruned) == 3
    assert all("save_total_limit is 2" in event["message"] for event in pruned)
    assert all(event["actor"] == "coordinator" for event in pruned)


def test_job_goes_on_from_a_checkpoint_of_another_one(server: LocalServer, train: Path) -> None:
    first = server.until(server.submit_python(train, "--steps", 40, "--save-every", 10))
    saved = checkpoint_of(first)["checkpoint_id"]
    training = {"training_type": "SFT", "base_model": {"model_id": "m"}, "resume_from_checkpoint": saved}
    job_id = server.submit_python(train, "--steps", 60, "--save-every", 10, training_config=training)
    job = server.until(job_id)
    assert job["status"] == "COMPLETED"
    assert number_after(server, job_id, "begins at") == 40
    assert job["parent_job_id"] is None


def test_retry_goes_on_from_the_best_where_that_is_wanted(server: LocalServer, train: Path) -> None:
    config = {"metric_for_best_model": "loss", "greater_is_better": True, "resume_from_best": True}
    job_id = server.submit_python(train, "--save-every", 10, "--fail-at", 35, output_config={"checkpoint": config})
    job = server.until(job_id, "FAILED")
    best = next(checkpoint for checkpoint in job["checkpoints"] if checkpoint["is_best"])
    assert best["step"] == 10
    child = server.control(job_id, "retry")
    assert child["checkpoint_id"] == best["checkpoint_id"]
    server.until(child["job_id"], "FAILED")
    assert number_after(server, child["job_id"], "begins at") == 10

"""Pause, resume, retry, preemption: what was saved is gone on from, and what was not saved is said."""

from __future__ import annotations

import pytest
from backends_under_test import BackendUnderTest, long_on

from job_server import JobServer
from real_server import wait_for
from saving_program import TRAINS, latest_checkpoint, number_after, wait_until_it_can_save
from trainmaster.backends.base import PlacementBy

BOTH_GPUS = {"gpu_count": 2}


@long_on("local-files")
def test_paused_job_saves_and_resumes_where_it_was(backend: BackendUnderTest, server: JobServer) -> None:
    job_id = server.submit_source(TRAINS)
    wait_until_it_can_save(server, job_id)
    answer = server.control(job_id, "pause")
    assert (answer["desired"], answer["checkpoint_id"]) == ("pause", None)
    job = server.until(job_id, "PAUSED")
    saved = latest_checkpoint(job)
    assert (job["status_reason"], job["placement"], job["finished_at"]) == ("PAUSED", None, None)
    assert saved["step"] == number_after(server, job_id, "stopped at")
    assert server.ask("POST", f"/v1/jobs/{job_id}/pause").status_code == 409
    (parked,) = [event for event in server.events_of(job_id, "status") if event["to"] == "PAUSED"]
    assert parked["data"] == {"checkpoint_id": saved["checkpoint_id"]}
    backend.wait_until_nothing_is_left(job_id)

    answer = server.control(job_id, "resume")
    assert (answer["status"], answer["checkpoint_id"]) == ("QUEUED", saved["checkpoint_id"])
    assert server.wait_for_event(job_id, "resumed")["data"] == {"checkpoint_id": saved["checkpoint_id"]}
    assert number_after(server, job_id, "begins at", attempt=2) == saved["step"]
    job = server.until(job_id, "TRAINING")
    assert [attempt["resume_checkpoint_id"] for attempt in job["attempts"]] == [None, saved["checkpoint_id"]]
    assert number_after(server, job_id, "begins at", attempt=1) == 0


@long_on("local-http", "container")
def test_pause_of_what_cannot_save_is_refused_unless_nothing_shall_be_saved(server: JobServer) -> None:
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


@long_on("local-http", "container")
def test_missed_grace_is_an_event_and_the_last_checkpoint_stays(server: JobServer) -> None:
    job_id = server.submit_source(TRAINS, "--save-every", 20, "--ignore-stops", workload={"grace_period_s": 0.5})
    wait_for(lambda: server.job(job_id)["checkpoints"], "a checkpoint")
    server.control(job_id, "pause")
    job = server.until(job_id, "PAUSED")
    assert "did not stop within" in server.events_of(job_id, "grace_missed")[0]["message"]  # 0.5 s, or three saves
    assert latest_checkpoint(job)["step"] % 20 == 0


@long_on("local-files", "container")  # that a lost container ends its attempt is seen with gangs
def test_what_crashed_is_tried_again_from_its_checkpoint_as_often_as_is_allowed(
    backend: BackendUnderTest, server: JobServer
) -> None:
    once = {"scheduling_config": {"max_retries": 1}}
    killed = server.submit_source(TRAINS, "--save-every", 20, "--die-at", 50, **once)
    lost = server.submit_source(TRAINS, "--save-every", 20, **once)
    wait_for(lambda: server.job(lost)["checkpoints"], "a checkpoint")
    backend.lose_node(lost)

    job = server.until(killed, "QUEUED")
    saved = latest_checkpoint(job)
    assert (job["status_reason"], job["retries_used"], saved["step"]) == ("KILLED_BY_SIGNAL", 1, 40)
    assert "before its next try" in job["pending_reason"]
    assert job["attempts"][0]["error"]["signal"] == "SIGKILL"
    job = server.until(killed, "FAILED")
    assert (job["error_type"], job["attempt"]) == ("KILLED_BY_SIGNAL", 2)
    assert number_after(server, killed, "begins at", attempt=2) == 40
    (resumed,) = server.events_of(killed, "resumed")
    assert (resumed["attempt"], resumed["data"]) == (2, {"checkpoint_id": saved["checkpoint_id"]})

    server.wait_for_event(lost, "resumed")
    begun = number_after(server, lost, "begins at", attempt=2)
    job = server.job(lost)
    assert (job["attempts"][0]["reason"], job["attempts"][1]["resume_checkpoint_id"] is None) == ("WORKER_LOST", False)
    assert begun >= 20
    assert begun % 20 == 0


@long_on("local-files", "container")
def test_retry_makes_a_child_that_goes_on_from_its_parents_checkpoint(server: JobServer) -> None:
    parent_id = server.submit_source(TRAINS, "--save-every", 20, "--fail-at", 50)
    parent = server.until(parent_id, "FAILED")
    saved = latest_checkpoint(parent)
    assert (saved["step"], parent["error"]["exit_code"]) == (40, 1)
    resources = {"gpu_count": 0, "cpu_cores": 1}
    child = server.control(parent_id, "retry", modify_resources=True, new_resource_config=resources)
    assert (child["parent_job_id"], child["root_job_id"]) == (parent_id, parent_id)
    assert (child["checkpoint_id"], child["resource_config"]["cpu_cores"]) == (saved["checkpoint_id"], 1)
    child = server.until(child["job_id"], "FAILED")
    assert number_after(server, child["job_id"], "begins at") == 40
    assert server.job(parent_id)["status"] == "FAILED"

    # Whose checkpoint it is makes no difference.
    other = server.submit_source(TRAINS, "--steps", 60, workload={"resume_from_checkpoint": saved["checkpoint_id"]})
    job = server.until(other)
    assert (job["status"], job["parent_job_id"]) == ("COMPLETED", None)
    assert server.lines(other) == ["begins at 40", "done"]


@long_on("local-files", "container")
def test_preempted_job_saves_makes_room_and_goes_on_where_it_was(backend: BackendUnderTest, server: JobServer) -> None:
    if backend.capabilities.placement is not PlacementBy.US:
        pytest.skip("the engine places, and preempts")
    again = {"priority": 2, "preemptible": True, "max_retries": 1}
    victim = server.submit_source(TRAINS, resource_config=BOTH_GPUS, scheduling_config=again)
    wait_until_it_can_save(server, victim)
    urgent = server.submit("sleep", "0.5", resource_config=BOTH_GPUS, scheduling_config={"priority": 9})
    assert server.until(urgent)["status"] == "COMPLETED"
    (told,) = server.events_of(urgent, "making_room")
    assert "1 job" in told["message"]
    assert [event["reason"] for event in server.events_of(victim, "preempting")] == ["PREEMPTED"]
    job = server.until(victim, "TRAINING")
    saved = latest_checkpoint(job)
    assert saved["step"] == number_after(server, victim, "stopped at", attempt=1)
    assert number_after(server, victim, "begins at", attempt=2) == saved["step"]
    assert [attempt["reason"] for attempt in job["attempts"]] == ["PREEMPTED", None]
    assert job["retries_used"] == 0  # that budget is for failures

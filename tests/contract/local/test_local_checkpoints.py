"""Which checkpoint is gone on from, and which are kept: the server decides that, whatever runs the job."""

from __future__ import annotations

from local_servers import LocalServer, over
from real_server import wait_for
from saving_program import TRAINS, latest_checkpoint, number_after, wait_until_it_can_save

pytestmark = over("files")


def test_job_can_be_resumed_from_an_older_checkpoint(server: LocalServer) -> None:
    job_id = server.submit_source(TRAINS, "--save-every", 20)
    wait_for(lambda: len(server.job(job_id)["checkpoints"]) >= 2, "two checkpoints")
    server.control(job_id, "pause")
    job = server.until(job_id, "PAUSED")
    older = min(job["checkpoints"], key=lambda checkpoint: checkpoint["step"])
    assert not older["is_latest"]
    answer = server.control(job_id, "resume", checkpoint_id=older["checkpoint_id"])
    assert answer["checkpoint_id"] == older["checkpoint_id"]
    server.wait_for_event(job_id, "resumed")
    assert number_after(server, job_id, "begins at") == older["step"]


def test_completed_work_is_complete_even_if_a_stop_came_late(server: LocalServer) -> None:
    job_id = server.submit_source(TRAINS, "--steps", 30, "--ignore-stops", workload={"grace_period_s": 60.0})
    wait_until_it_can_save(server, job_id)
    answer = server.ask("POST", f"/v1/jobs/{job_id}/pause")
    assert answer.status_code in (200, 409)
    assert server.until(job_id)["status"] == "COMPLETED"
    assert server.lines(job_id)[-1] == "done"


def test_checkpoints_beyond_the_limit_are_pruned_while_the_job_runs(server: LocalServer) -> None:
    config = {"checkpoint": {"save_total_limit": 2, "metric_for_best_model": "loss", "greater_is_better": True}}
    job_id = server.submit_source(TRAINS, "--steps", 60, "--save-every", 10, output_config=config)
    job = server.until(job_id)
    assert job["status"] == "COMPLETED"
    # The best is the first one, whose loss is the greatest; it stays beside the two that the limit allows.
    assert [checkpoint["step"] for checkpoint in job["checkpoints"]] == [10, 50, 60]
    assert latest_checkpoint(job)["step"] == 60
    pruned = server.events_of(job_id, "checkpoint_deleted")
    assert len(pruned) == 3
    assert all("save_total_limit is 2" in event["message"] for event in pruned)
    assert all(event["actor"] == "coordinator" for event in pruned)


def test_retry_goes_on_from_the_best_where_that_is_wanted(server: LocalServer) -> None:
    config = {"metric_for_best_model": "loss", "greater_is_better": True, "resume_from_best": True}
    job_id = server.submit_source(TRAINS, "--save-every", 10, "--fail-at", 35, output_config={"checkpoint": config})
    job = server.until(job_id, "FAILED")
    best = next(checkpoint for checkpoint in job["checkpoints"] if checkpoint["is_best"])
    assert best["step"] == 10
    child = server.control(job_id, "retry")
    assert child["checkpoint_id"] == best["checkpoint_id"]
    server.until(child["job_id"], "FAILED")
    assert number_after(server, child["job_id"], "begins at") == 10

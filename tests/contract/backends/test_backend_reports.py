"""What code inside a job reports, from its call to the job resource, the metrics and the events."""

from __future__ import annotations

import json

from backends_under_test import long_on

from job_server import JobServer

REPORTS = """
import math
from trainmaster.jobs import report

with report.phase("preparing"):
    report.note("about to begin")
for step in range(1, 11):
    report.metrics(step=step, epoch=step / 10, loss=1 / step, rate=0.5)
report.metrics(step=10, broken=math.nan)
report.progress(10, total_steps=20)
with report.phase("evaluating"):
    report.metrics({"eval/accuracy": 0.75}, step=10)
with report.checkpoint(step=10, metrics={"loss": 0.1}) as directory:
    (directory / "weights").write_bytes(b"w" * 1000)
report.phase("exporting")
(report.output_dir() / "model").write_text("exported")
report.finished()
"""

STALLS = """
import time
from trainmaster.jobs import report

def waits_for_a_peer_that_comes_late():
    time.sleep(4)

report.progress(1)
waits_for_a_peer_that_comes_late()
report.progress(2)
time.sleep(600)
"""


@long_on("local-files")
def test_progress_metrics_phases_checkpoints_and_results_are_shown(server: JobServer) -> None:
    checkpoint = {"checkpoint": {"metric_for_best_model": "loss"}}
    job_id = server.submit_source(REPORTS, output_config=checkpoint)
    reports = list(server.follow(f"/v1/jobs/{job_id}/metrics/stream"))
    assert json.loads(reports[-2]["data"])["status"] == "COMPLETED"
    told = [json.loads(report["data"]) for report in reports if report.get("event") == "metrics"]
    losses = [report["values"]["loss"] for report in told if "loss" in report["values"]]
    assert losses == [1 / step for step in range(1, 11)]

    job = server.job(job_id)
    assert (job["status"], job["progress"]["step"], job["progress"]["total_steps"]) == ("COMPLETED", 10, 20)
    assert job["progress"]["epoch"] == 1.0
    assert job["metrics"] == {"loss": 0.1, "rate": 0.5, "eval/accuracy": 0.75}
    assert server.statuses(job_id)[4:] == [
        *("TRAINING", "EVALUATING", "TRAINING", "CHECKPOINTING", "TRAINING", "EXPORTING", "COMPLETED")
    ]
    notes = [event["message"] for event in server.events_of(job_id, "note")]
    assert notes == ["about to begin", "broken is nan at step 10"]
    (saved,) = job["checkpoints"]
    assert (saved["step"], saved["metrics"], saved["is_best"], saved["size_bytes"]) == (10, {"loss": 0.1}, True, 1000)
    assert job["output"]["model_uri"] == f"artifacts:{job_id}/output"
    assert server.artifact(job_id, "output/model") == b"exported"

    page = server.data("GET", f"/v1/jobs/{job_id}/metrics")
    assert page["latest"] == job["metrics"]
    series = {series["name"]: series["points"] for series in page["series"]}
    assert [(step, value) for step, _, value in series["loss"]] == [(step, 1 / step) for step in range(1, 11)]
    (only,) = server.data("GET", f"/v1/jobs/{job_id}/metrics?names=rate&since_step=9")["series"]
    assert [step for step, _, _ in only["points"]] == [9, 10]


@long_on("local-http", "container")
def test_job_without_a_step_is_shown_as_stalled_with_its_stacks(server: JobServer) -> None:
    job_id = server.submit_source(STALLS)
    assert server.wait_for_event(job_id, "stalled")["reason"] == "STALLED"
    assert server.job(job_id)["status"] == "TRAINING"
    assert "waits_for_a_peer_that_comes_late" in server.wait_for_event(job_id, "stacks")["data"]["0"]
    assert "step 2" in server.wait_for_event(job_id, "moving_again")["message"]

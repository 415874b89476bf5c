"""What code inside a job reports, from its call to the job resource, the metrics and the events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_servers import LocalServer, serving

from real_server import wait_for

KUBEFLOW = Path(__file__).parents[3] / ".venvs" / "kubeflow" / "bin" / "python"
"""An interpreter with the real kubeflow package."""

REPORTS = """
import math, pathlib, sys, time
from trainmaster.jobs import report

gate = pathlib.Path(sys.argv[1])
with report.phase("preparing"):
    report.note("about to begin")
for step in range(1, 11):
    report.metrics(step=step, epoch=step / 10, loss=1 / step, rate=0.5)
report.metrics(step=10, broken=math.nan)
report.progress(10, total_steps=20)
while not gate.exists():
    time.sleep(0.01)
with report.phase("evaluating"):
    report.metrics({"eval/accuracy": 0.75}, step=10)
with report.checkpoint(step=10, metrics={"loss": 0.1}) as directory:
    (directory / "weights").write_bytes(b"w" * 1000)
report.phase("exporting")
(report.output_dir() / "model").write_text("exported")
report.finished()
"""

STALLS = """
import pathlib, sys, time
from trainmaster.jobs import report

def waits_for_a_peer_that_never_comes(gate):
    while not gate.exists():
        time.sleep(0.01)

def waits_for_another_one(gate):
    waits_for_a_peer_that_never_comes(gate)

report.progress(1)
waits_for_a_peer_that_never_comes(pathlib.Path(sys.argv[1]))
report.progress(2)
waits_for_another_one(pathlib.Path(sys.argv[2]))
"""

REPORTS_TO_KUBEFLOW = """
import pathlib, sys, time
from kubeflow.trainer import update_trainjob_status

sent = update_trainjob_status(
    progress_percent=42, estimated_remaining_seconds=90, metrics={"loss": 0.25, "tokens": 1000, "note": "no number"}
)
print("sent", sent, flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
"""


def test_progress_metrics_and_phases_are_shown(server: LocalServer, scripts: Path) -> None:
    gate = scripts / "gate"
    (scripts / "reports.py").write_text(REPORTS)
    checkpoint = {"checkpoint": {"metric_for_best_model": "loss"}}
    job_id = server.submit_python(scripts / "reports.py", gate, output_config=checkpoint)
    wait_for(lambda: server.job(job_id)["progress"]["step"] == 10, "step 10")
    job = server.job(job_id)
    assert job["status"] == "TRAINING"
    assert job["progress"]["total_steps"] == 20
    assert (job["progress"]["percent"], job["progress"]["epoch"]) == (50.0, 1.0)
    assert (job["metrics"]["loss"], job["metrics"]["rate"]) == (0.1, 0.5)
    assert "broken" not in job["metrics"]
    gate.touch()
    job = server.until(job_id)
    assert job["status"] == "COMPLETED"
    assert [event["to"] for event in server.events_of(job_id, "status")][4:] == [
        *("TRAINING", "EVALUATING", "TRAINING", "CHECKPOINTING", "TRAINING", "EXPORTING", "COMPLETED")
    ]
    assert [event["message"] for event in server.events_of(job_id, "note")] == [
        *("about to begin", "broken is nan at step 10")
    ]
    (saved,) = job["checkpoints"]
    assert (saved["step"], saved["metrics"], saved["is_best"], saved["size_bytes"]) == (10, {"loss": 0.1}, True, 1000)
    assert job["output"]["model_uri"] == f"artifacts:{job_id}/output"
    assert (server.directory / "artifacts" / job_id / "output" / "model").read_text() == "exported"


def test_metrics_are_a_page_and_a_stream(server: LocalServer, scripts: Path) -> None:
    gate = scripts / "gate"
    (scripts / "reports.py").write_text(REPORTS)
    job_id = server.submit_python(scripts / "reports.py", gate)
    gate.touch()
    reports = list(server.follow(f"/v1/jobs/{job_id}/metrics/stream"))
    assert json.loads(reports[-2]["data"])["status"] == "COMPLETED"
    told = [json.loads(report["data"]) for report in reports if report.get("event") == "metrics"]
    assert [report["values"]["loss"] for report in told if "loss" in report["values"]] == [
        1 / step for step in range(1, 11)
    ]
    page = server.data("GET", f"/v1/jobs/{job_id}/metrics")
    assert page["latest"] == {"loss": 0.1, "rate": 0.5, "eval/accuracy": 0.75}
    series = {series["name"]: series["points"] for series in page["series"]}
    assert [(step, value) for step, _, value in series["loss"]] == [(step, 1 / step) for step in range(1, 11)]
    (only,) = server.data("GET", f"/v1/jobs/{job_id}/metrics?names=rate&since_step=9")["series"]
    assert [step for step, _, _ in only["points"]] == [9, 10]


@pytest.fixture(scope="module")
def impatient_server(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A server that takes a second without a step for a stall."""
    directory = tmp_path_factory.mktemp(f"impatient-{transport}") / "data"
    root = str(tmp_path_factory.getbasetemp())
    with serving(directory, transport, "--data-root", root, "--stalled-after-s", "1") as server:
        yield server


def test_job_without_a_step_is_shown_as_stalled_with_its_stacks(impatient_server: LocalServer, scripts: Path) -> None:
    server, gates = impatient_server, [scripts / "first", scripts / "second"]
    (scripts / "stalls.py").write_text(STALLS)
    job_id = server.submit_python(scripts / "stalls.py", *gates)
    stalled = server.wait_for_event(job_id, "stalled")
    assert stalled["reason"] == "STALLED"
    job = server.job(job_id)
    assert (job["status"], job["stalled"]) == ("TRAINING", True)
    assert job["stalled_at"] is not None
    stacks = server.wait_for_event(job_id, "stacks")
    assert "waits_for_a_peer_that_never_comes" in stacks["data"]["0"]

    gates[0].touch()
    assert "step 2" in server.wait_for_event(job_id, "moving_again")["message"]
    _, again = wait_for(lambda: server.events_of(job_id, "stacks")[1:] and server.events_of(job_id, "stacks"), "more")
    assert "waits_for_another_one" in again["data"]["0"]
    assert "waits_for_another_one" not in stacks["data"]["0"]

    gates[1].touch()
    job = server.until(job_id)
    assert (job["status"], job["stalled"]) == ("COMPLETED", False)
    assert len(server.events_of(job_id, "stalled")) == 2


def test_progress_for_kubeflow_is_progress_here(server: LocalServer, scripts: Path) -> None:
    gate = scripts / "gate"
    (scripts / "reports.py").write_text(REPORTS_TO_KUBEFLOW)
    job_id = server.submit(str(KUBEFLOW), str(scripts / "reports.py"), str(gate))
    server.wait_for_line(job_id, "sent True")
    wait_for(lambda: server.job(job_id)["progress"]["percent"] == 42.0, "the percentage")
    job = server.job(job_id)
    assert job["progress"]["eta_seconds"] == 90.0
    assert job["metrics"] == {"loss": 0.25, "tokens": 1000.0}
    gate.touch()
    assert server.until(job_id)["status"] == "COMPLETED"
    assert server.data("GET", f"/v1/jobs/{job_id}/metrics")["latest"] == {"loss": 0.25, "tokens": 1000.0}

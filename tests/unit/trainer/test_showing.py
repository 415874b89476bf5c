"""Jobs of the server as a `TrainerClient` shows them."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trainmaster.client import types as api
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.core.spec.submit import compile_job
from trainmaster.server.core.states import JobStatus
from trainmaster.trainer import progress_bar
from trainmaster.trainer.job_document import FRAMEWORK_LABEL, RUNTIME_LABEL
from trainmaster.trainer.job_view import (
    STATUSES,
    WORKING_STEPS,
    event,
    failure,
    log_filter,
    name_of,
    preparing_steps,
    train_job,
)
from trainmaster.trainer.progress_bar import Wait
from trainmaster.trainer.runtimes import runtime_of
from trainmaster.trainer.runtimes.sources import built_in
from trainmaster.trainer.types import Progress, TrainJob

KNOWN = {each.name: runtime_of(each) for each in built_in().runtimes.values()}


def summary(**changes: Any) -> Any:
    return {
        "job_id": "job-1",
        "handle": "first",
        "name": "first",
        "labels": {RUNTIME_LABEL: "torch-distributed", FRAMEWORK_LABEL: "torch"},
        "kind": "function",
        "created_at": "2026-01-31T12:00:00.500000Z",
        "status": "TRAINING",
        "status_reason": None,
        "status_message": None,
        "node_count": 2,
        "placement": {"backend": "local", "nodes": ["a"], "gpus": [{"node_id": "a", "index": 0}] * 4},
        "progress": {"step": 3, "total_steps": 12, "epoch": None, "percent": None, "eta_seconds": 9.0},
        "metrics": {"loss": 0.5},
        "started_at": "2026-01-31T12:00:01Z",
        "finished_at": None,
        **changes,
    }


def whole(**changes: Any) -> Any:
    return summary(
        **{
            "pending_reason": None,
            "workload": {"kind": "function", "packages": [], "initializers": None},
            "resource_config": {"gpu_count": None, "gpu_type": None, "cpu_cores": None},
            "attempts": [],
            "checkpoints": [],
            "error": None,
            **changes,
        }
    )


PREPARED = {"kind": "function", "packages": ["einops"], "initializers": {"dataset": {"type": "s3"}, "model": None}}
FAILURE: api.Failure = {
    "error_type": "EXITED_NONZERO",
    "error_message": "rank 1 exited with code 3",
    "fault": "user",
    "advice": "mend it",
    "exit_code": 3,
    "signal": None,
    "rank": 1,
    "step": "node",
    "last_lines": ["boom"],
    "frame": None,
}


def test_every_status_of_the_server_has_one_of_the_four() -> None:
    assert set(STATUSES) == {str(status) for status in JobStatus}
    assert set(STATUSES.values()) == {"Created", "Running", "Complete", "Failed"}


def test_job_is_shown_with_all_that_is_known() -> None:
    checkpoint = {
        "checkpoint_id": "c1",
        "step": 2,
        "created_at": "2026-01-31T12:00:02Z",
        "uri": "artifacts:x",
        "size_bytes": 7,
        "metrics": {"loss": 1.0},
        "is_best": True,
        "is_latest": False,
    }
    job = train_job(whole(checkpoints=[checkpoint]), KNOWN)
    assert (job.name, job.status, job.state, job.num_nodes) == ("first", "Running", "TRAINING", 2)
    assert job.runtime is KNOWN["torch-distributed"]
    assert job.creation_timestamp == datetime(2026, 1, 31, 12, 0, 0, 500000, tzinfo=UTC)
    assert job.progress == Progress(step=3, total_steps=12, eta_seconds=9.0)
    assert job.metrics == {"loss": 0.5}
    assert [(each.checkpoint_id, each.step, each.is_best) for each in job.checkpoints] == [("c1", 2, True)]
    assert [(step.name, step.status, step.device, step.device_count) for step in job.steps] == [
        ("node-0", "Running", "gpu", "2"),
        ("node-1", "Running", "gpu", "2"),
    ]


def test_job_of_a_list_has_its_nodes_and_no_more() -> None:
    job = train_job(summary(), KNOWN)
    assert [step.name for step in job.steps] == ["node-0", "node-1"]
    assert job.checkpoints == []


def test_job_of_another_door_is_shown_too() -> None:
    job = train_job(summary(handle=None, labels={}, kind="command"), KNOWN)
    assert job.name == "job-1"
    assert job.runtime.name == "Unknown"
    assert job.row()["runtime"] == "Unknown"


def test_job_of_a_runtime_that_is_gone_keeps_its_name() -> None:
    job = train_job(summary(labels={RUNTIME_LABEL: "mine", FRAMEWORK_LABEL: "jax"}), KNOWN)
    assert (job.runtime.name, job.runtime.trainer.framework) == ("mine", "jax")


@pytest.mark.parametrize(
    ("changes", "current", "statuses"),
    [
        ({"status": "QUEUED", "started_at": None}, None, ["Created", "Created", "Created"]),
        ({"status": "PREPARING", "started_at": None}, None, ["Running", "Created", "Created"]),
        ({"status": "PREPARING", "started_at": None}, "environment", ["Complete", "Running", "Created"]),
        ({"status": "TRAINING"}, None, ["Complete", "Complete", "Running"]),
        ({"status": "COMPLETED"}, None, ["Complete", "Complete", "Complete"]),
        ({"status": "FAILED", "error": FAILURE}, None, ["Complete", "Complete", "Failed"]),
        (
            {"status": "FAILED", "error": {**FAILURE, "step": "environment"}, "started_at": None},
            None,
            ["Complete", "Failed", "Created"],
        ),
    ],
)
def test_steps_tell_how_far_the_preparation_is(changes: Any, current: str | None, statuses: list[str]) -> None:
    job = train_job(whole(workload=PREPARED, node_count=1, **changes), KNOWN, current_step=current)
    assert [step.name for step in job.steps] == ["dataset-initializer", "environment", "node-0"]
    assert [step.status for step in job.steps] == statuses


@pytest.mark.parametrize(
    ("resources", "device"),
    [
        ({"gpu_count": 4, "gpu_type": "mig-1g.5gb"}, ("mig-1g.5gb", "2")),
        ({"gpu_count": 0, "cpu_cores": 3}, ("cpu", "3")),
        ({"gpu_count": 0}, ("cpu", "Unknown")),
        ({}, ("Unknown", "Unknown")),
    ],
)
def test_device_of_a_job_that_waits_is_what_it_asks_for(resources: Any, device: tuple[str, str]) -> None:
    job = train_job(whole(placement=None, resource_config=resources), KNOWN)
    assert (job.steps[0].device, job.steps[0].device_count) == device


def test_logs_of_a_step_are_what_the_launch_calls_so() -> None:
    job = whole(workload=PREPARED)
    assert log_filter(job, "node-1") == {"step": "node", "node": 1}
    assert log_filter(job, "environment") == {"step": "environment"}
    for absent in ("node-2", "node", "node-x", "model-initializer", "main", ""):
        assert log_filter(job, absent) is None
    assert log_filter(whole(kind="command"), "node-0") == {"step": "main", "node": 0}


@pytest.mark.parametrize("step", ["dataset-initializer", "model-initializer", "prepare"])
def test_initializers_of_a_built_in_trainer_are_the_step_that_fetches(step: str) -> None:
    assert log_filter(whole(kind="trainer"), step) == {"step": "prepare"}
    assert log_filter(whole(kind="command"), step) is None


WORKLOADS: list[dict[str, Any]] = [
    {
        "kind": "function",
        "source": "def f(): ...",
        "name": "f",
        "packages": ["einops"],
        "initializers": {
            "dataset": {"type": "s3", "storage_uri": "s3://a/b"},
            "model": {"type": "huggingface", "storage_uri": "hf://a/b"},
        },
    },
    {"kind": "container", "image": "image:1"},
    {"kind": "command", "argv": ["true"], "packages": ["einops"]},
    {"kind": "trainer"},
]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each["kind"])
def test_steps_are_those_of_the_launch(workload: dict[str, Any]) -> None:
    training = {
        "training_config": {"training_type": "SFT", "base_model": {"model_id": "a/b"}},
        "data_config": {"sources": [{"path": "hf://a/b"}]},
    }
    kind = workload["kind"]
    request = parse_submit({"name": "a", "workload": workload, **(training if kind == "trainer" else {})})
    *preparing, work = (step.name for step in compile_job(request).launch.steps)
    assert preparing_steps(whole(kind=kind, workload=workload)) == preparing
    assert WORKING_STEPS.get(kind, "main") == work


def test_failure_says_why_where_and_what_it_wrote_last() -> None:
    failed = whole(status="FAILED", status_reason="EXITED_NONZERO", status_message="rank 1 exited", error=FAILURE)
    assert failure(failed, []) == (
        "job first is Failed (FAILED, EXITED_NONZERO): rank 1 exited\n"
        "exit code 3 of rank 1 in the step node\nmend it\nits last lines:\n  boom"
    )
    without = {**FAILURE, "last_lines": ["ModuleNotFoundError: No module named 'torch.nn'"]}
    said = failure({**failed, "error": without, "kind": "function"}, [])  # type: ignore[typeddict-item]
    assert 'packages_to_install=["torch"]' in said
    assert "mend it" not in said
    cancelled = whole(status="CANCELLED", status_reason="CANCELLED")
    assert failure(cancelled, ["bye"]).splitlines() == [
        "job first is Failed (CANCELLED, CANCELLED)",
        "its last lines:",
        "  bye",
    ]


def test_event_says_what_happened_when() -> None:
    happened: Any = {"ts": "2026-01-31T12:00:00Z", "type": "status", "to": "QUEUED", "reason": None, "message": "in"}
    shown = event(happened, "first")
    assert (shown.involved_object_kind, shown.involved_object_name, shown.reason) == ("TrainJob", "first", "QUEUED")
    assert event({**happened, "reason": "SUCCEEDED"}, "first").reason == "SUCCEEDED"
    assert event({**happened, "type": "launch_waits", "to": None}, "first").reason == "LAUNCH_WAITS"


def test_name_is_the_handle_or_the_id() -> None:
    assert name_of(summary()) == "first"
    assert name_of(summary(handle=None)) == "job-1"


def shown(**changes: Any) -> TrainJob:
    return train_job(whole(**changes), KNOWN)


def test_line_beside_the_bar_has_state_steps_and_loss() -> None:
    assert progress_bar.line(shown()) == "TRAINING · step 3 of 12 · loss 0.5 · 9 s left"
    assert progress_bar.percent(shown()) == 25.0
    assert progress_bar.percent(shown(progress={**summary()["progress"], "percent": 140.0})) == 100.0
    assert progress_bar.percent(shown(progress=dict.fromkeys(summary()["progress"]))) is None
    waiting = shown(status="QUEUED", pending_reason="2 GPUs are missing", progress=dict.fromkeys(summary()["progress"]))
    assert progress_bar.line(waiting) == "QUEUED · loss 0.5 · 2 GPUs are missing"
    assert "&lt;b&gt;" in progress_bar.bar_html(shown(handle="<b>"))


def test_terminal_bar_draws_and_leaves(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    bar = progress_bar.display()
    assert isinstance(bar, progress_bar.TerminalBar)
    bar.show(shown(handle="[bold]job"))
    bar.show(shown(status="COMPLETED"))
    bar.close()
    drawn = capsys.readouterr().err
    assert "[bold]job" in drawn
    assert "loss 0.5" in drawn


def test_notebook_bar_is_one_display_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []

    def display(shown: str, *, display_id: bool) -> Any:
        assert display_id
        drawn.append(shown)
        return SimpleNamespace(update=drawn.append)

    notebook = ModuleType("IPython")
    notebook.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    shown_by = ModuleType("IPython.display")
    shown_by.HTML, shown_by.display = str, display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setitem(sys.modules, "IPython.display", shown_by)
    bar = progress_bar.display()
    bar.show(shown())
    bar.show(shown(status="COMPLETED"))
    bar.close()
    assert 'value="25.0"' in drawn[0]
    assert 'value="100.0"' in drawn[1]


def test_without_a_terminal_nothing_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    bar = progress_bar.display()
    bar.show(shown())
    bar.close()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("status", "timeout", "interval"),
    [
        ({"Done"}, 10, 1),
        (set(), 10, 1),
        ({"Complete"}, 0, 1),
        ({"Complete"}, -1, 1),
        ({"Complete"}, 10, 0),
        ({"Complete"}, 10, 10),
        ({"Complete"}, 1, 2),
    ],
)
def test_wait_that_makes_no_sense_is_refused(status: set[str], timeout: float, interval: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        Wait(status, timeout, interval)

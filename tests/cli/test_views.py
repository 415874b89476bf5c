"""What a person reads of a job that is followed: in a pipe, in the footer, and when it has ended."""

from __future__ import annotations

from typing import Any

import pytest

from trainmaster.cli.job_summary import StepRate, ending, sentence
from trainmaster.cli.watch import LiveView, PlainView


def job(status: str = "TRAINING", **fields: Any) -> Any:
    return {
        "job_id": "job-1",
        "status": status,
        "pending_reason": None,
        "status_message": None,
        "attempt": 1,
        "kind": "trainer",
        "metrics": {},
        "progress": {"step": None, "total_steps": None, "percent": None, "eta_seconds": None},
        "runtime_seconds": 5.0,
        "latest_checkpoint_id": None,
        "stalled": False,
        "error": None,
        **fields,
    }


def told(capsys: pytest.CaptureFixture[str], *jobs: Any) -> list[str]:
    view = PlainView()
    for each in jobs:
        view.job(each)
    return capsys.readouterr().err.splitlines()


def test_pipe_is_told_the_first_status_and_those_that_last(capsys: pytest.CaptureFixture[str]) -> None:
    seen = ["PREPARING", "TRAINING", "TRAINING", "EVALUATING", "TRAINING", "EVALUATING", "EVALUATING", "COMPLETED"]
    assert told(capsys, *map(job, seen)) == ["PREPARING", "TRAINING", "EVALUATING"]


def test_pipe_is_not_told_how_a_wait_counts_down(capsys: pytest.CaptureFixture[str]) -> None:
    reasons = ["waits 5 s more", "waits 4 s more", "waits 3 s more", "needs 1 × GPU", "needs 1 × GPU"]
    lines = told(capsys, *(job("QUEUED", pending_reason=reason) for reason in reasons))
    assert lines == ["QUEUED: waits 5 s more", "QUEUED: needs 1 × GPU"]


def test_wait_for_an_image_is_told_once_in_a_pipe_and_as_it_goes_in_the_footer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    jobs = [job("SCHEDULING", status_message=f"pulling train:1: {layer} of 7 layers") for layer in (1, 1, 2, 2)]
    assert told(capsys, *jobs) == ["SCHEDULING: pulling train:1: 1 of 7 layers"]
    assert sentence(jobs[-1], StepRate()) == "pulling train:1: 2 of 7 layers"


@pytest.mark.parametrize(("percent", "said"), [(40.0, ""), (100.0, "load the model")])
def test_footer_says_what_happens_between_the_preparation_and_the_first_step(percent: float, said: str) -> None:
    text = sentence(job("PREPARING", metrics={"prepare_percent": percent, "loss": 1.0}), StepRate())
    assert (said in text, "loss" in text) == (True, False)


def test_footer_promises_no_end_of_an_export() -> None:
    progress = {"step": 3, "total_steps": 3, "percent": None, "eta_seconds": 0}
    assert "ETA 0s" in sentence(job(progress=progress), StepRate())
    assert sentence(job("EXPORTING", progress=progress), StepRate()) == "step 3/3"


def test_ending_of_a_training_says_how_to_fetch_the_model() -> None:
    assert ending(job("COMPLETED"))[1:] == ["  Fetch the model with `trainmaster download job-1 model`."]
    assert ending(job("COMPLETED", kind="script"))[1:] == []
    assert ending(job("CANCELLED"))[1:] == []


def log_line(message: str, **fields: Any) -> Any:
    return {"ts": None, "attempt": 1, "node": 0, "rank": 0, "step": "main", "stream": "stdout", **fields} | {
        "message": message
    }


def test_pipe_is_told_each_state_of_a_progress_bar_once(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainView()
    view.lines([log_line("10%", open=True), log_line("10%", open=True), log_line("other", rank=1)])
    view.lines([log_line("100%", open=True), log_line("100%"), log_line("100%")])
    assert capsys.readouterr().out.splitlines() == ["10%", "other", "100%", "100%"]


def test_terminal_keeps_a_progress_bar_beside_the_footer_until_it_has_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with LiveView() as view:
        view.lines([log_line("10%", open=True), log_line("20%", open=True)])
        assert "0%" not in capsys.readouterr().out
        view.lines([log_line("100%")])
        assert "100%" in capsys.readouterr().out

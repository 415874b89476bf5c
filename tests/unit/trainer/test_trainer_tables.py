"""Jobs, runtimes, steps and events in notebooks and terminals."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest
from rich.console import Console

from trainmaster.trainer.types import (
    Checkpoint,
    Event,
    Listing,
    Progress,
    Runtime,
    RuntimeKind,
    RuntimeTrainer,
    Step,
    TrainerType,
    TrainJob,
)

WHEN = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
NASTY = "<script>alert('&')</script> [red]no markup[/red]"


class Cells(HTMLParser):
    """What a browser shows of a table; refuses elements that no table of ours has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        assert tag in {"table", "thead", "tbody", "tr", "th", "td"}, tag
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        self.rows[-1][-1] += data


def job(name: str = "first", message: str | None = None) -> TrainJob:
    trainer = RuntimeTrainer(TrainerType.CUSTOM_TRAINER, "torch", "")
    return TrainJob(
        name=name,
        runtime=Runtime("torch-distributed", trainer, RuntimeKind.TRAINING_RUNTIME),
        steps=[],
        num_nodes=2,
        creation_timestamp=WHEN,
        status="Running",
        state="CHECKPOINTING",
        message=message,
        progress=Progress(step=30, total_steps=120, percent=25.0),
        metrics={"loss": 0.123456, "accuracy": None},
    )


def terminal(shown: object) -> str:
    console = Console(file=io.StringIO(), width=400)
    console.print(shown)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_job_is_a_row_with_its_progress() -> None:
    headings, cells = Cells(job()._repr_html_()).rows
    row = dict(zip(headings, cells, strict=True))
    assert row["job"] == "first"
    assert (row["status"], row["state"]) == ("Running", "CHECKPOINTING")
    assert row["progress"] == "step 30 of 120, 25 %"
    assert row["metrics"] == "loss 0.1235"
    assert row["created"] == "2026-01-02 03:04:05"
    assert row["finished"] == ""


def test_text_of_a_job_is_shown_as_text() -> None:
    headings, cells = Cells(job(message=NASTY)._repr_html_()).rows
    assert cells[headings.index("message")] == NASTY
    assert NASTY in terminal(job(message=NASTY))


def test_list_of_jobs_is_one_table() -> None:
    jobs = Listing([job("first"), job("second")])
    rows = Cells(jobs._repr_html_()).rows
    assert [row[0] for row in rows] == ["job", "first", "second"]
    assert [name in terminal(jobs) for name in ("first", "second", "step 30 of 120")] == [True, True, True]
    assert jobs == [job("first"), job("second")]
    assert isinstance(jobs[1:], Listing)
    assert jobs[1:]._repr_html_() == Listing([jobs[1]])._repr_html_()


def test_job_as_text_is_one_short_line() -> None:
    assert repr(job(message="as it was told")) == (
        "TrainJob(name='first', status='Running', state='CHECKPOINTING', runtime='torch-distributed', "
        "message='as it was told')"
    )


def test_empty_list_says_so() -> None:
    assert Listing()._repr_html_() == "<p>none</p>"
    assert terminal(Listing()).strip() == "none"


@pytest.mark.parametrize(
    ("shown", "seen"),
    [
        (job().runtime, "torch-distributed"),
        (Step("node-0", "Running", "pod-7", "gpu", "4"), "pod-7"),
        (Step("node-0", None, ""), "node-0"),
        (Event("TrainJob", "first", "it began", "STARTED", WHEN), "it began"),
        (Checkpoint(checkpoint_id="c-1", step=7, created_at=WHEN, uri="file:///x", is_best=True), "best"),
    ],
)
def test_everything_that_is_listed_is_a_row(shown: Runtime | Step | Event | Checkpoint, seen: str) -> None:
    headings, cells = Cells(shown._repr_html_()).rows
    assert len(headings) == len(cells)
    assert any(seen in cell for cell in cells)
    assert seen in terminal(shown)


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (Progress(), ""),
        (Progress(step=0), "step 0"),
        (Progress(percent=0.0), "0 %"),
        (Progress(step=3, total_steps=4), "step 3 of 4"),
    ],
)
def test_progress_says_what_it_knows(progress: Progress, text: str) -> None:
    assert str(progress) == text


def test_command_of_a_runtime_is_empty_until_it_is_said() -> None:
    one, other = (RuntimeTrainer(TrainerType.CUSTOM_TRAINER, "torch", "") for _ in range(2))
    assert one.command == ()
    assert one == other
    one.set_command(("torchrun",))
    assert one.command == ("torchrun",)
    assert one != other

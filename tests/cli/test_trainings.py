"""Trainings on the command line: what is sent, what is refused at once, and how one is shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from trainmaster.cli.progress import brief, percent

pytestmark = pytest.mark.usefixtures("connected")

Tm = Callable[..., Result]


def written(directory: Path, path: str = "rows.jsonl", **training: Any) -> str:
    file = directory / "job.json"
    document = {
        "name": "tune",
        "training_config": {
            "training_type": "LORA",
            "base_model": {"model_id": "org/model", "revision": "main"},
            **training,
        },
        "data_config": {"sources": [{"path": path}, {"path": "hf://org/more"}]},
        "resource_config": {"gpu_count": 0},
    }
    file.write_text(json.dumps(document))
    return str(file)


def test_training_that_names_a_file_which_is_not_there_says_so_before_anything_is_sent(tm: Tm, tmp_path: Path) -> None:
    result = tm("submit", written(tmp_path))
    assert result.exit_code == 1
    assert "data_config.sources[0].path: there is no rows.jsonl" in result.stderr


def test_training_that_is_refused_at_admission_says_so_while_its_owner_looks(tm: Tm, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    result = tm("submit", written(tmp_path, framework={"type": "DEEPSPEED"}))
    assert result.exit_code == 4
    assert "is FAILED" in result.stdout
    assert "framework DEEPSPEED is not installed" in result.stderr


def test_training_is_shown_by_its_model_its_type_and_its_data(tm: Tm, tmp_path: Path) -> None:
    result = tm("submit", written(tmp_path, "/nowhere/rows.jsonl"))
    shown = tm("show", result.stdout.split()[0]).stdout
    assert "org/model@main, LORA with HF_TRAINER, on /nowhere/rows.jsonl and 1 more" in " ".join(shown.split())


def test_unknown_hyperparameter_is_named_with_the_nearest(tm: Tm, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    result = tm("submit", written(tmp_path, hyperparameters={"learning_rat": 1}))
    assert result.exit_code == 1
    assert "did you mean 'learning_rate'?" in result.stderr


@pytest.mark.parametrize(
    ("status", "metrics", "done", "said"),
    [
        ("PREPARING", {"prepare_percent": 34.0}, 34.0, "34% prepared"),
        ("PREPARING", {}, None, ""),
        ("TRAINING", {"prepare_percent": 100.0}, 20.0, "20% 2/10"),
    ],
)
def test_progress_is_that_of_the_preparation_while_there_is_one(
    status: str, metrics: dict[str, float], done: float | None, said: str
) -> None:
    progress = {"step": 2, "total_steps": 10, "percent": None, "epoch": None, "eta_seconds": None}
    job: Any = {"status": status, "metrics": metrics, "progress": progress}
    assert percent(job) == done
    assert brief(job) == said

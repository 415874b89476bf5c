"""Trainings on the command line: what is sent, what is refused at once, and how one is shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_server import Server
from typer.testing import Result

from trainmaster.cli.job_summary import brief, percent
from trainmaster.client import Client

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
    assert "data_config.sources[0].path: there is no such file or directory: rows.jsonl; looked in" in result.stderr


def test_training_that_is_refused_at_admission_says_so_while_its_owner_looks(tm: Tm, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    result = tm("submit", written(tmp_path, base_model={"model_id": str(tmp_path / "no-model")}))
    assert result.exit_code == 4
    assert "is FAILED" in result.stdout
    assert "training_config.base_model.model_id" in result.stderr


def test_training_with_a_framework_that_nobody_has_is_refused_with_one_that_works(tm: Tm, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    result = tm("submit", written(tmp_path, framework={"type": "DEEPSPEED"}))
    assert result.exit_code == 1
    assert "framework DEEPSPEED is not available in this version" in result.stderr
    assert "use AUTO" in result.stderr


def test_training_is_shown_with_its_model_hyperparameters_and_data(tm: Tm, tmp_path: Path) -> None:
    chosen = {"learning_rate": "1e-4", "lora_r": "8"}
    result = tm("submit", written(tmp_path, "/nowhere/rows.jsonl", hyperparameters=chosen))
    shown = " ".join(tm("show", result.stdout.split()[0]).stdout.split())
    assert "trains org/model@main, LORA with AUTO" in shown
    assert "hyperparameters learning_rate 1e-4, lora_r 8" in shown
    assert "data /nowhere/rows.jsonl" in shown
    assert "batch_size 1" in shown
    assert "null" not in shown


def test_unknown_hyperparameter_is_named_with_the_nearest(tm: Tm, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    result = tm("submit", written(tmp_path, hyperparameters={"learning_rat": 1}))
    assert result.exit_code == 1
    assert "did you mean 'learning_rate'?" in result.stderr


def uploads(server: Server) -> list[str]:
    return [path.name for path in (server.directory / "blobs").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"training_type": "RLHF"}, "training_type RLHF is not available in this version"),
        ({"hyperparameters": {"learning_rat": 1}}, "did you mean 'learning_rate'?"),
        ({"base_model": {"model_id": "artifacts:job-none/output/model"}}, "there is no job job-none"),
        ({"resume_from_checkpoint": "none"}, "there is no committed checkpoint 'none'"),
    ],
)
def test_training_that_is_refused_is_so_before_its_files_are_sent(
    tm: Tm, tmp_path: Path, connected: Server, client: Client, changes: dict[str, Any], says: str
) -> None:
    before, jobs = uploads(connected), len(list(client.list()))
    (tmp_path / "rows.jsonl").write_text(f'{{"text": "{tmp_path}"}}\n')
    result = tm("submit", written(tmp_path, **changes))
    assert result.exit_code == 1
    assert says in result.stderr
    assert "Sends" not in result.stderr
    assert uploads(connected) == before
    assert len(list(client.list())) == jobs


def test_training_that_is_accepted_has_its_files_sent_once(tm: Tm, tmp_path: Path, connected: Server) -> None:
    before = uploads(connected)
    (tmp_path / "rows.jsonl").write_text(f'{{"text": "{tmp_path}"}}\n')
    first, second = tm("submit", written(tmp_path)), tm("submit", written(tmp_path))
    assert (first.exit_code, second.exit_code) == (0, 0), first.stderr
    assert "Sends rows.jsonl" in first.stderr
    assert len(uploads(connected)) == len(before) + 1


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

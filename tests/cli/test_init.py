"""`trainmaster init`: the job files that it writes are jobs that the server takes."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from patience import PATIENCE_S
from trainmaster.cli.job_file import load
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.core.spec.submit import SubmitJobRequest, compile_job
from trainmaster.server.core.training.hyperparameters import hyperparameters_of
from trainmaster.server.core.training.types import BUILT_IN, TrainingType

TYPES = sorted(BUILT_IN)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def accepted(file: Path, *shipped: str) -> SubmitJobRequest:
    """The request of a job file whose local data was sent along, if a server would take it."""
    document, _ = load(str(file))
    files = [{"path": path, "sha256": "0" * 64} for path in shipped or ("train.jsonl",)]
    return parse_submit({**document, "workload": {"kind": "trainer", "files": files}})


def uncommented(text: str) -> str:
    """A job file with every field that was commented out."""
    return re.sub(r"^( *)#(\w)", r"\1\2", text, flags=re.MULTILINE)


@pytest.mark.parametrize("training_type", TYPES)
def test_written_file_is_a_job_that_can_run(tm: Callable[..., Result], training_type: TrainingType) -> None:
    result = tm("init", "--type", training_type.lower(), "--model", "org/a-model")
    assert result.exit_code == 0, result.stderr
    request = accepted(Path("job.yaml"))
    assert request.training_config is not None
    assert request.training_config.training_type is training_type
    assert request.training_config.base_model.model_id == "org/a-model"
    assert compile_job(request).launch.steps


@pytest.mark.parametrize("training_type", TYPES)
def test_every_commented_line_may_be_used(tm: Callable[..., Result], training_type: TrainingType) -> None:
    Path("all.yaml").write_text(uncommented(tm("init", "-", "--type", training_type).stdout))
    request = accepted(Path("all.yaml"))
    assert request.training_config is not None
    assert set(request.training_config.hyperparameters) == set(hyperparameters_of(training_type))


@pytest.mark.parametrize("training_type", TYPES)
def test_shown_hyperparameters_are_the_defaults(tm: Callable[..., Result], training_type: TrainingType) -> None:
    Path("all.yaml").write_text(uncommented(tm("init", "-", "--type", training_type).stdout))
    training = accepted(Path("all.yaml")).training_config
    assert training is not None
    for name, known in hyperparameters_of(training_type).items():
        default = known.default_for(training_type)
        assert default is None or known.read(training.hyperparameters[name]) == default


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"n_positions": 256}, 256),
        ({"max_position_embeddings": 512}, 512),
        ({"max_position_embeddings": 512, "rope_scaling": {"factor": 4.0}}, 1024),
        ({"max_position_embeddings": 32_768}, 1024),
        ({}, 1024),
    ],
)
def test_length_is_no_more_than_the_model_has_positions(
    tm: Callable[..., Result], config: dict[str, Any], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(config))
    assert f"max_seq_length: {length} " in tm("init", "-", "--model", "./model").stdout
    kept = Path("hub/models--org--tiny/snapshots/abc")
    kept.mkdir(parents=True)
    (kept / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("HF_HUB_CACHE", str(Path("hub").absolute()))
    assert f"max_seq_length: {length} " in tm("init", "-", "--model", "org/tiny").stdout


@pytest.mark.parametrize("given", ["full-finetune", "FULL_FINETUNE", "full_finetune"])
def test_type_may_be_written_as_people_like(tm: Callable[..., Result], given: str) -> None:
    assert "training_type: FULL_FINETUNE\n" in tm("init", "-", "--type", given).stdout


@pytest.mark.parametrize("given", ["qlora", "rlhf"])
def test_type_of_a_later_version_is_refused(tm: Callable[..., Result], given: str) -> None:
    result = tm("init", "--type", given)
    assert result.exit_code == 2
    assert f"{given.upper()} is not available in this version" in result.stderr
    assert not Path("job.yaml").exists()


def test_unknown_type_leads_to_the_nearest(tm: Callable[..., Result]) -> None:
    result = tm("init", "--type", "lorra")
    assert result.exit_code == 2
    assert "did you mean 'lora'?" in result.stderr


def test_file_that_is_there_stays_unless_forced(tm: Callable[..., Result]) -> None:
    Path("job.yaml").write_text("mine")
    result = tm("init")
    assert result.exit_code == 2
    assert "--force" in result.stderr
    assert Path("job.yaml").read_text() == "mine"
    assert tm("init", "--force").exit_code == 0
    assert accepted(Path("job.yaml"))


def test_missing_directory_is_told(tm: Callable[..., Result]) -> None:
    result = tm("init", "nowhere/job.yaml")
    assert result.exit_code == 2
    assert "nowhere/job.yaml: No such file or directory" in result.stderr


def test_names_that_yaml_could_misread_are_kept(tm: Callable[..., Result]) -> None:
    tm("init", "--model", "org/7: a # model", "--data", "on, off.jsonl")
    request = accepted(Path("job.yaml"), "on, off.jsonl")
    assert request.training_config is not None
    assert request.training_config.base_model.model_id == "org/7: a # model"


@pytest.mark.parametrize("data", ["ftp://host/rows.jsonl", "", "two\nlines"])
def test_data_that_no_job_can_name_is_refused(tm: Callable[..., Result], data: str) -> None:
    result = tm("init", "--data", data)
    assert result.exit_code == 2
    assert "data_config.sources[0].path" in result.stderr
    assert not Path("job.yaml").exists()


def test_local_paths_are_as_the_job_file_has_to_name_them(tm: Callable[..., Result]) -> None:
    for directory in ("jobs/model", "data"):
        Path(directory).mkdir(parents=True)
    tm("init", "jobs/job.yaml", "--model", "jobs/model", "--data", "data/rows.jsonl")
    document, _ = load("jobs/job.yaml")
    assert document["training_config"]["base_model"]["model_id"] == "./model"
    assert document["data_config"]["sources"][0]["path"] == "../data/rows.jsonl"


def test_next_steps_are_told(tm: Callable[..., Result]) -> None:
    told = tm("init", "first.yaml").stderr
    assert "Put your data into train.jsonl" in told
    assert "trainmaster data check first.yaml" in told
    assert "trainmaster submit first.yaml --follow" in told
    Path("rows.jsonl").touch()
    assert "Put your data" not in tm("init", "second.yaml", "--data", "rows.jsonl").stderr


def test_next_steps_can_be_pasted_into_a_shell(tm: Callable[..., Result]) -> None:
    assert "trainmaster submit 'my job.yaml' --follow" in tm("init", "my job.yaml").stderr


def test_model_that_is_no_directory_here_is_told_to_be_a_name(tm: Callable[..., Result]) -> None:
    Path("tiny").mkdir()
    told = "There is no directory tinny here, so tinny is taken as the name of a model on Hugging Face."
    assert told in tm("init", "a.yaml", "--model", "tinny").stderr
    assert "Hugging Face" not in tm("init", "b.yaml", "--model", "tiny").stderr
    assert "Hugging Face" not in tm("init", "c.yaml", "--model", "hf://gpt2").stderr


def test_programs_get_the_job_as_json(tm: Callable[..., Result]) -> None:
    told: dict[str, Any] = json.loads(tm("init", "-", "--type", "sft", "--json").stdout)
    assert told["file"] is None
    assert told["job"]["training_config"]["training_type"] == "SFT"
    assert json.loads(tm("init", "--json").stdout)["file"] == "job.yaml"


def test_terminal_is_asked_for_what_is_missing() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "trainmaster", "init", "--data", "rows.jsonl"]
    try:
        os.write(ours, b"sft\norg/asked\n")
        ran = subprocess.run(
            command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=True
        )
    finally:
        os.close(theirs)
        os.close(ours)
    assert "Training type [lora]" in ran.stderr
    assert "Training data" not in ran.stderr
    training = accepted(Path("job.yaml"), "rows.jsonl").training_config
    assert training is not None
    assert (training.training_type, training.base_model.model_id) == (TrainingType.SFT, "org/asked")

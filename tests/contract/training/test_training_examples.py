"""Every example is a job that trains: it learns, says how it went, and leaves a model that loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from local_servers import LocalServer
from patience import PATIENCE_S
from real_server import wait_for
from tiny_trainings import EXAMPLES, finish, output, pickles, series, statuses, submit, weights_digest

PRETRAINED_EPOCHS = 10
COMMAND = Path(sys.executable).with_name("trainmaster")
TWO_RANKS = (
    "training_config.framework.distributed.world_size=2",
    "training_config.framework.distributed.backend=gloo",
    "data_config.batch_size=8",
)


def submit_example(server: LocalServer, name: str, model: Path | str, *settings: str) -> str:
    arguments = ["submit", str(EXAMPLES / name), "--set", f"training_config.base_model.model_id={model}"]
    for setting in settings:
        arguments += ["--set", setting]
    environment = {**os.environ, "TRAINMASTER_URL": server.url, "TRAINMASTER_API_KEY": server.key}
    told = subprocess.run([COMMAND, *arguments], env=environment, check=True, capture_output=True, text=True)
    return told.stdout.split()[0]


def short(epochs: int) -> tuple[str, str]:
    """Enough to learn from; the README's test trains as long as an example says."""
    return f"training_config.hyperparameters.num_train_epochs={epochs}", "output_config.checkpoint.save_steps=15"


@pytest.fixture(scope="module")
def pretrained(shared_server: LocalServer, tiny_model: Path) -> str:
    """The job that taught the model of random weights what the others build upon."""
    job_id = submit_example(shared_server, "pretrain.yaml", tiny_model, *short(PRETRAINED_EPOCHS))
    assert finish(shared_server, job_id)["output"]["model_uri"] == f"artifacts:{job_id}/output/model"
    return job_id


def test_pretraining_learns_and_leaves_a_model_that_loads(server: LocalServer, pretrained: str) -> None:
    check_course(server, pretrained, "EVALUATING")


# The README's test trains by SFT.
@pytest.mark.parametrize(
    "name", ["lora.yaml", *(pytest.param(name, marks=pytest.mark.long) for name in ("sft.yaml", "full_finetune.yaml"))]
)
def test_fine_tuning_learns_from_what_another_job_left_and_leaves_a_model_that_loads(
    server: LocalServer, pretrained: str, name: str
) -> None:
    directory = output(server, pretrained) / "model"
    before = weights_digest(directory)
    ranks = TWO_RANKS if name == "lora.yaml" else ()
    job_id = submit_example(server, name, server.job(pretrained)["output"]["model_uri"], *short(8), *ranks)
    finish(server, job_id)
    check_course(server, job_id, *([] if name == "full_finetune.yaml" else ["EVALUATING"]))
    assert server.job(job_id)["training_config"]["base_model"]["model_id"] == f"artifacts:{pretrained}/output/model"
    prepared = server.directory / "runs" / job_id / "1" / "nodes" / "0" / "prepared" / "prepared.json"
    assert json.loads(prepared.read_text())["model_path"] == str(directory)
    assert weights_digest(directory) == before
    losses = [[value for _, value in series(server, each, "loss")] for each in (pretrained, job_id)]
    assert losses[1][0] < sum(losses[0][:3]) / 3, "it does not begin where the first one ended"


def test_preferences_are_learnt_from_a_file_to_a_model_that_loads(server: LocalServer, pretrained: str) -> None:
    job_id = submit_example(server, "dpo.yaml", server.job(pretrained)["output"]["model_uri"])
    finish(server, job_id)
    check_course(server, job_id, "EVALUATING")
    for name in ("reward_accuracy", "eval_reward_accuracy"):
        assert series(server, job_id, name)[-1][1] > 0.8
    assert server.job(job_id)["best_checkpoint_id"]


@pytest.mark.long  # tests/training/test_resuming.py compares the bits, tests/contract/backends pauses
def test_training_that_is_paused_ends_with_the_same_weights(
    server: LocalServer, tiny_model: Path, pretrained: str
) -> None:
    told_soon = "training_config.hyperparameters.logging_steps=1"
    job_id = submit_example(server, "pretrain.yaml", tiny_model, *short(PRETRAINED_EPOCHS), told_soon)
    wait_for(lambda: server.job(job_id)["progress"]["step"], f"the first steps of {job_id}")
    server.control(job_id, "pause")
    paused = server.until(job_id, "PAUSED", timeout_s=PATIENCE_S)
    assert paused["progress"]["step"] < server.job(pretrained)["progress"]["step"]
    server.control(job_id, "resume")
    job = finish(server, job_id)
    assert [attempt["reason"] for attempt in job["attempts"]] == ["PAUSED", "SUCCEEDED"]
    (resumed,) = server.events_of(job_id, "resumed")
    assert "from checkpoint" in resumed["message"]
    assert weights_digest(output(server, job_id)) == weights_digest(output(server, pretrained))


def check_course(server: LocalServer, job_id: str, *phases: str) -> None:
    """It got better, told how, and left what it should."""
    job = server.job(job_id)
    losses = [value for _, value in series(server, job_id, "loss")]
    assert losses[-1] < 0.6 * losses[0], losses
    assert {"PREPARING", "TRAINING", "CHECKPOINTING", "EXPORTING", *phases} <= set(statuses(server, job_id))
    for metric in ("learning_rate", "grad_norm", "tokens_per_s", "samples_per_s"):
        assert series(server, job_id, metric), metric
    if phases:
        evals = [value for _, value in series(server, job_id, "eval_loss")]
        assert evals[-1] < evals[0]
    assert job["output"]["model_uri"]
    assert loaded(output(server, job_id) / "model").num_parameters() > 400_000
    assert not pickles(server.directory / "artifacts" / job_id)
    assert not pickles(server.directory / "runs" / job_id)


def loaded(model: Path) -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(model)
    return AutoModelForCausalLM.from_pretrained(model)


def test_training_that_is_not_available_is_refused_with_what_to_do(server: LocalServer, tiny_model: Path) -> None:
    for training_type, framework in (("QLORA", "HF_TRAINER"), ("RLHF", "FSDP")):
        job = {
            "name": "later",
            "training_config": {
                "training_type": training_type,
                "base_model": {"model_id": str(tiny_model)},
                "framework": {"type": framework},
            },
            "data_config": {"sources": [{"path": str(EXAMPLES / "data" / "questions.jsonl")}]},
        }
        answer = server.ask("POST", "/v1/jobs", job)
        assert answer.status_code == 400
        assert training_type in answer.json()["error"]["message"]


def test_example_of_an_adapter_as_a_training_that_is_not_available_says_that_alone(
    server: LocalServer, tiny_model: Path
) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        submit_example(server, "lora.yaml", tiny_model, "training_config.training_type=RLHF")
    assert "training_type RLHF is not available in this version" in caught.value.stderr
    assert "merge_lora" not in caught.value.stderr


def test_unknown_hyperparameter_is_refused_with_the_nearest_name(server: LocalServer, tiny_model: Path) -> None:
    job = {
        "name": "typo",
        "training_config": {
            "training_type": "LORA",
            "base_model": {"model_id": str(tiny_model)},
            "hyperparameters": {"learning_rat": "1"},
        },
        "data_config": {"sources": [{"path": str(EXAMPLES / "data" / "questions.jsonl")}]},
    }
    answer = server.ask("POST", "/v1/jobs", job)
    assert answer.status_code == 400
    assert "learning_rate" in answer.text


def test_row_that_cannot_be_trained_on_is_named(server: LocalServer, tiny_model: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "fine"}\n{"txet": "not fine"}\n')
    job_id = submit(
        server,
        {
            "name": "bad-row",
            "training_config": {"training_type": "FULL_FINETUNE", "base_model": {"model_id": str(tiny_model)}},
            "data_config": {"sources": [{"path": str(data)}]},
            "resource_config": {"gpu_count": 0},
        },
    )
    job = server.until(job_id, "FAILED", "COMPLETED", timeout_s=PATIENCE_S)
    assert (job["status"], job["error_type"]) == ("FAILED", "BAD_INPUT")
    assert "rows.jsonl" in job["error_message"]
    assert "2" in job["error_message"]

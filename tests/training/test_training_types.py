"""What a training does: for every type the loss goes down, and the server is told how."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_model import TRL
from trainings import Make, Zygote, refusal

from trainmaster.protocol.reasons import StopCause

FORBIDDEN = {".pt", ".pth", ".bin", ".pkl", ".pickle"}
"""Files that would have to be unpickled."""


@pytest.mark.parametrize(
    ("training_type", "learning_rate"),
    [("SFT", 1e-2), ("FULL_FINETUNE", 1e-2), ("CONTINUED_PRETRAIN", 1e-2), ("LORA", 5e-2)],
)
def test_training_of_each_type_lowers_the_loss(
    make_job: Make, tiny: Path, training_type: str, learning_rate: float
) -> None:
    job = make_job(
        training_type, evaluate=True, hyperparameters={"learning_rate": learning_rate, "num_train_epochs": 3.0}
    )
    job.train()
    losses, evaluated = job.series("loss"), job.series("eval_loss")
    assert losses[-1] < 0.7 * losses[0]
    assert evaluated[-1] < evaluated[0]
    left = [path for directory in (job.directory, tiny) for path in directory.rglob("*")]
    assert [path for path in left if path.suffix in FORBIDDEN] == []


def test_packed_rows_are_kept_for_the_next_attempt_and_nothing_else_is(make_job: Make, tiny: Path) -> None:
    def train(training_type: str, **parts: Any) -> set[Path]:
        make_job(training_type, hyperparameters={"max_steps": 1}, **parts).train()
        return set(tiny.rglob("*"))

    packed = train("CONTINUED_PRETRAIN")
    assert train("CONTINUED_PRETRAIN") == packed
    assert train("CONTINUED_PRETRAIN", **TRL) == packed
    assert train("SFT") == packed


def test_rows_see_nothing_of_each_other_however_they_are_put_together(
    zygote: Zygote, tiny: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    pid = zygote.start({}, log, call="checks:rows_are_apart", arguments=[str(tiny), str(tmp_path)])
    assert zygote.wait(pid) == 0, log.read_text()


def test_training_shorter_than_a_logging_interval_reports_its_loss(make_job: Make) -> None:
    job = make_job(hyperparameters={"max_steps": 3, "logging_steps": 10})
    job.train()
    assert len(job.series("loss")) == 1


def test_training_tells_phases_progress_and_metrics(make_job: Make) -> None:
    job = make_job(evaluate=True, hyperparameters={"num_train_epochs": 2.0})
    job.train()
    phases = [event["phase"] for event in job.events() if event["type"] == "phase"]
    assert phases[0] == "training"
    assert phases[-1] == "exporting"
    assert {"checkpointing", "evaluating"} <= set(phases)
    assert job.events()[-1]["type"] == "finished"
    last = [record for record in job.metrics() if "loss" in record["values"]][-1]
    assert (last["step"], last["total_steps"], last["epoch"]) == (24, 24, 2.0)
    told = {"loss", "learning_rate", "grad_norm", "tokens_per_s", "samples_per_s", "mfu"}
    assert told <= set(last["values"])
    assert all(last["values"][name] > 0 for name in ("tokens_per_s", "samples_per_s", "mfu", "grad_norm"))
    assert len(job.series("eval_loss")) == 2
    opening, *_ = (line for line in job.log().splitlines() if line.startswith("training "))
    assert opening.startswith("training takes 24 steps: all ")
    assert opening.endswith(" parameters, on 1 CPU process")
    assert "step 24 of 24, epoch 2.00, loss" in job.log()


def test_speed_after_a_resume_is_that_of_the_new_attempt(make_job: Make) -> None:
    job = make_job(ranks=2, data={"batch_size": 2})
    job.interrupt(StopCause.PAUSE, 4)
    job.train(resume_from=job.latest())
    speeds = [record["values"] for record in job.metrics() if "tokens_per_s" in record["values"]]
    lengths = [values["tokens_per_s"] / values["samples_per_s"] for values in speeds]
    assert len(lengths) >= 6
    assert all(7 <= length <= 15 for length in lengths), "every row has so many tokens"


def test_checkpoint_has_the_metrics_of_its_step(make_job: Make) -> None:
    job = make_job(evaluate=True, hyperparameters={"num_train_epochs": 2.0}, checkpoint={"save_steps": 12})
    job.train()
    saved = [event for event in job.events() if event["type"] == "checkpoint"]
    assert [event["step"] for event in saved] == [12, 24]
    evaluated = [
        (record["step"], record["values"]["eval_loss"]) for record in job.metrics() if "eval_loss" in record["values"]
    ]
    assert [(event["step"], event["metrics"]["eval_loss"]) for event in saved] == evaluated
    assert all("loss" in event["metrics"] for event in saved)


def test_two_ranks_train_on_different_rows_and_agree(make_job: Make) -> None:
    job = make_job(ranks=2, data={"batch_size": 2, "gradient_accumulation_steps": 2})
    job.train()
    assert [record["total_steps"] for record in job.metrics()][-1] == 6
    assert not job.directory.joinpath("attempt-1", "metrics-1.jsonl").exists()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"framework": {"config": {"seed": "1"}}}, "framework.config.seed: set data_config.seed instead"),
        ({"framework": {"config": {"eval_delay": "soon"}}}, "framework.config.eval_delay: 'soon' is not of type float"),
        ({"hyperparameters": {"mixed_precision": "fp16"}}, "fp16 needs a GPU"),
        ({"base_model": {"model_kwargs": {"torch_dtype": "float16"}}}, "set base_model.dtype instead"),
        ({"output": {"output_path": "/etc/model"}}, "does not lie below a data root"),
    ],
)
def test_training_that_cannot_be_done_is_refused_with_what_to_do(make_job: Make, parts: dict, message: str) -> None:
    assert message in refusal(make_job(**parts))


@pytest.mark.parametrize("model_type", ["t5", "of-no-version"])
def test_base_model_that_cannot_be_loaded_is_told(make_job: Make, tiny: Path, model_type: str) -> None:
    job = make_job()
    shutil.copytree(tiny / "model", job.directory / "model")
    config = job.directory / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": model_type}))
    job.prepared["model_path"] = str(config.parent)
    assert "the base model tiny cannot be loaded: " in refusal(job)


def test_token_that_the_model_does_not_know_is_told(make_job: Make, tiny: Path, zygote: Zygote) -> None:
    job = make_job()
    log = job.directory / "log"
    pid = zygote.start({}, log, call="tiny_model:make_smaller", arguments=[str(job.directory / "model")])
    assert zygote.wait(pid) == 0, log.read_text()
    job.prepared["model_path"] = str(job.directory / "model")
    assert "the rows have the token 'tree' (number 21), and the model has embeddings for 20 tokens" in refusal(job)


def test_every_option_that_is_accepted_is_known_to_the_framework(zygote: Zygote, tmp_path: Path) -> None:
    pid = zygote.start({}, tmp_path / "log", call="checks:options_are_known")
    assert zygote.wait(pid) == 0, (tmp_path / "log").read_text()


def test_options_of_the_framework_reach_it(make_job: Make) -> None:
    job = make_job(
        hyperparameters={"lr_scheduler_type": "cosine_with_restarts", "max_steps": 4, "learning_rate": 1.0},
        framework={"config": {"lr_scheduler_kwargs": '{"num_cycles": 2}', "logging_first_step": "true"}},
        base_model={"model_kwargs": {"attention_dropout": "0.25"}, "dtype": "bfloat16"},
    )
    job.train()
    config = json.loads((job.output / "model" / "config.json").read_text())
    assert (config["attention_dropout"], config["dtype"]) == (0.25, "bfloat16")
    assert job.series("learning_rate") == pytest.approx([1.0, 0.5, 1.0, 0.5])

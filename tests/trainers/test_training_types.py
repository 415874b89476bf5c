"""What a training does: for every type the loss goes down, and the server is told how."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trainings import Make

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
    assert "step 24 of 24, epoch 2.00, loss" in job.log()


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
        (
            {"framework": {"config": {"eval_delai": "1"}}},
            "framework.config.eval_delai is not known; did you mean eval_delay?",
        ),
        ({"framework": {"config": {"seed": "1"}}}, "framework.config.seed: set data_config.seed instead"),
        ({"framework": {"distributed": {"config": {"zero": "1"}}}}, "framework.distributed.config.zero is not known"),
        ({"framework": {"distributed": {"strategy": "zero3"}}}, "use ddp, or leave it out"),
        ({"framework": {"type": "FSDP"}}, "needs at least two ranks"),
        ({"hyperparameters": {"eval_strategy": "epoch"}}, "there is no validation data"),
        ({"checkpoint": {"metric_for_best_model": "eval_loss"}}, "there is no validation data"),
        ({"hyperparameters": {"mixed_precision": "fp16"}}, "fp16 needs a GPU"),
        ({"base_model": {"model_kwargs": {"torch_dtype": "float16"}}}, "set base_model.dtype instead"),
        ({"output": {"output_path": "/etc/model"}}, "does not lie below a data root"),
    ],
)
def test_training_that_cannot_be_done_is_refused_with_what_to_do(make_job: Make, parts: dict, message: str) -> None:
    job = make_job(**parts)
    job.start()
    assert job.finish() == [1]
    failed = [event for event in job.events() if event["type"] == "failed"]
    assert [event["reason"] for event in failed] == ["BAD_INPUT"]
    assert message in failed[0]["message"]
    assert "Traceback" not in job.log()


def test_options_of_the_framework_reach_it(make_job: Make) -> None:
    job = make_job(
        hyperparameters={"lr_scheduler_type": "cosine_with_restarts", "max_steps": 4, "learning_rate": 1.0},
        framework={"config": {"lr_scheduler_kwargs": '{"num_cycles": 2}', "logging_first_step": "true"}},
        base_model={"model_kwargs": {"attention_dropout": "0.25"}, "dtype": "float32"},
    )
    job.train()
    assert json.loads((job.output / "model" / "config.json").read_text())["attention_dropout"] == 0.25
    assert job.series("learning_rate") == pytest.approx([1.0, 0.5, 1.0, 0.5])

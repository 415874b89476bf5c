"""FSDP: weights and optimizer parted over two ranks, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from trainings import Make

from trainmaster.protocol.reasons import StopCause

OPTIONS = {"learning_rate": 1e-2, "gradient_checkpointing": True}
FSDP = {"type": "FSDP", "distributed": {"backend": "nccl", "config": {"reshard_after_forward": "true"}}}
TRL = {"type": "HF_TRAINER", "distributed": {"strategy": "fsdp", "config": {"reshard_after_forward": "true"}}}
LOOPS = pytest.mark.parametrize("framework", [FSDP, TRL], ids=["engine", "trl"])


@LOOPS
@pytest.mark.parametrize("training_type", ["SFT", pytest.param("LORA", marks=pytest.mark.long)])
def test_sharded_training_paused_and_resumed_ends_with_the_same_bits(
    make_job: Make, training_type: str, framework: dict[str, Any]
) -> None:
    parts = {"ranks": 2, "framework": framework, "data": {"batch_size": 4}, "hyperparameters": OPTIONS}
    whole, job = make_job(training_type, **parts), make_job(training_type, **parts)
    whole.train()
    losses = whole.series("loss")
    assert losses[-1] < 0.9 * losses[0]
    assert ("the engine trains" in whole.log()) is (framework is FSDP)
    if training_type == "SFT" or framework is TRL:  # the engine's ranks all have the adapter
        assert len(list((whole.latest() / "sharded").iterdir())) == 2, "each rank writes its part"
    job.interrupt(StopCause.PAUSE, 4)
    job.train(resume_from=job.latest())
    assert "training continues at step 4 of " in job.log()
    assert "parameters, on 2 CPU processes" in job.log()
    assert job.result() == whole.result()


@pytest.mark.long  # the first test resumes, and test_checkpoints.py evaluates
@LOOPS
@pytest.mark.parametrize("training_type", ["FULL_FINETUNE", "LORA"])
def test_sharded_training_saved_right_after_an_evaluation_goes_on_from_there_exactly(
    make_job: Make, training_type: str, framework: dict[str, Any]
) -> None:
    parts = {
        "ranks": 2,
        "framework": framework,
        "data": {"batch_size": 4},
        "checkpoint": {"save_steps": 3},
        "hyperparameters": {**OPTIONS, "max_steps": 6, "eval_strategy": "steps", "eval_steps": 3},
    }
    whole, resumed = make_job(training_type, evaluate=True, **parts), make_job(training_type, evaluate=True, **parts)
    whole.train()
    resumed.train(resume_from=whole.checkpoints / "checkpoint-3")
    assert resumed.result() == whole.result()


@pytest.mark.parametrize("framework", [FSDP, pytest.param(TRL, marks=pytest.mark.long)], ids=["engine", "trl"])
def test_checkpoint_of_a_sharded_training_is_resumed_by_a_single_rank(
    make_job: Make, framework: dict[str, Any]
) -> None:
    sharded = make_job(ranks=2, framework=framework, data={"batch_size": 4}, hyperparameters={"max_steps": 6})
    sharded.interrupt(StopCause.PREEMPT, 3)
    single = make_job(hyperparameters={"max_steps": 8})
    single.train(resume_from=sharded.latest())
    assert single.metrics()[-1]["step"] == 8


@pytest.mark.long  # test_checkpoints.py has this with one rank
def test_corrupt_checkpoint_of_a_sharded_training_is_passed_over(make_job: Make) -> None:
    job = make_job(ranks=2, framework=FSDP, data={"batch_size": 4}, hyperparameters={"num_train_epochs": 2.0})
    job.interrupt(StopCause.PAUSE, 7)
    path = next((job.latest() / "sharded").iterdir())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    job.train(resume_from=job.latest())
    notes = [event["message"] for event in job.events() if event["type"] == "note"]
    assert any("is corrupt" in note for note in notes)

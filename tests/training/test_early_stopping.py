"""A training ends when its evaluations have stopped becoming better, and does not go on after an interruption."""

from __future__ import annotations

from typing import Any

import pytest
from trainings import Job, Make

from trainmaster.protocol.reasons import StopCause

LOOPS = ("ENGINE", "HF_TRAINER")


def job_of(make_job: Make, loop: str, **changes: Any) -> Job:
    """With so high a learning rate, every evaluation after the first few is worse."""
    parameters = {
        "learning_rate": 0.3,
        "num_train_epochs": 5.0,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "early_stopping_patience": 2,
        "lr_scheduler_type": "constant",
        **changes,
    }
    checkpoint = {"save_steps": 4, "metric_for_best_model": "eval_loss"}
    return make_job("SFT", evaluate=True, framework={"type": loop}, hyperparameters=parameters, checkpoint=checkpoint)


def notes(job: Job) -> list[str]:
    return [event["message"] for event in job.events() if event["type"] == "note"]


@pytest.mark.parametrize("loop", LOOPS)
def test_training_ends_when_evaluations_stop_becoming_better(make_job: Make, loop: str) -> None:
    job = job_of(make_job, loop)
    job.train()
    losses = job.series("eval_loss")
    best = losses.index(min(losses))
    assert len(losses) == best + 1 + 2
    step = 2 * len(losses)
    assert step < 60
    [told] = [note for note in notes(job) if "ends at step" in note]
    assert told == f"the training ends at step {step} of 60: eval_loss has not become better in 2 evaluations"
    # Wherever it ends, there is a checkpoint to go back to.
    assert job.latest().name == f"checkpoint-{step}"
    last = job.metrics()[-1]
    assert (last["step"], last["total_steps"]) == (step, step)


@pytest.mark.parametrize("loop", LOOPS)
def test_training_that_becomes_better_goes_on(make_job: Make, loop: str) -> None:
    job = job_of(make_job, loop, learning_rate=1e-3, num_train_epochs=1.0)
    job.train()
    assert len(job.series("eval_loss")) == 6
    assert not [note for note in notes(job) if "ends at step" in note]


@pytest.mark.parametrize("loop", LOOPS)
def test_interrupted_training_ends_where_it_would_have_ended(make_job: Make, loop: str) -> None:
    whole, job = job_of(make_job, loop), job_of(make_job, loop)
    whole.train()
    end = int(whole.latest().name.split("-")[1])
    job.interrupt(StopCause.PREEMPT, end - 1)
    job.train(resume_from=job.latest())
    assert (job.result(), job.latest().name) == (whole.result(), whole.latest().name)
    # After the end, only the export is left.
    job.train(resume_from=job.latest())
    assert job.series("loss") == []
    assert job.result() == whole.result()
    last = job.metrics()[-1]
    assert (last["step"], last["total_steps"]) == (end, end)

"""An interrupted training ends with the very same bits as one that nobody interrupted."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from tiny_model import TRL
from trainings import Job, Make

from trainmaster.protocol.reasons import StopCause

INTERRUPTIONS = {"killed": None, "paused": StopCause.PAUSE, "preempted": StopCause.PREEMPT}
LOOPS = ("engine", "trl")
PARTS: dict[str, dict[str, Any]] = {
    "SFT": {},
    "LORA": {"hyperparameters": {"lora_r": 4, "num_train_epochs": 2.0, "learning_rate": 1e-2}},
    "CONTINUED_PRETRAIN": {"data": {"batch_size": 1}},
}
COVERING = (
    ("engine", "SFT", "killed", 2),
    ("engine", "LORA", "preempted", 1),
    ("engine", "LORA", "killed", 1),
    ("engine", "CONTINUED_PRETRAIN", "paused", 1),
    ("trl", "SFT", "killed", 1),
    ("trl", "LORA", "preempted", 2),
    ("trl", "CONTINUED_PRETRAIN", "paused", 1),
)
"""Every loop with every type, interruption and number of ranks; the others combine what these prove."""
COMBINATIONS = [
    pytest.param(*each, marks=() if each in COVERING else pytest.mark.long)
    for each in itertools.product(LOOPS, PARTS, INTERRUPTIONS, (1, 2))
]


def two_epochs(make_job: Make, loop: str, training_type: str, ranks: int) -> Job:
    """Two epochs of six steps or so with an evaluation after each, and a checkpoint every three steps."""
    parts = {"hyperparameters": {"num_train_epochs": 2.0}, "data": {"batch_size": 8 // ranks}, **PARTS[training_type]}
    if loop == "trl":
        dropout = {"lora_dropout": 0.1} if training_type == "LORA" else {}
        parts = {**parts, **TRL, "hyperparameters": {**parts["hyperparameters"], **dropout}}
    return make_job(training_type, ranks=ranks, evaluate=True, **parts)


@pytest.fixture(scope="module")
def references() -> dict[tuple[str, str, int], tuple[str, str]]:
    return {}


@pytest.mark.parametrize(("loop", "training_type", "how", "ranks"), COMBINATIONS)
def test_interrupted_training_ends_with_the_bits_of_an_uninterrupted_one(
    make_job: Make,
    loop: str,
    training_type: str,
    how: str,
    ranks: int,
    references: dict[tuple[str, str, int], tuple[str, str]],
) -> None:
    of_job = (loop, training_type, ranks)
    if of_job not in references:
        whole = two_epochs(make_job, *of_job)
        whole.train()
        references[of_job] = whole.result(), whole.state()
    steps = 6
    job = two_epochs(make_job, *of_job)
    step = random.randint(4, steps + 3)
    job.interrupt(INTERRUPTIONS[how], step)
    job.train(resume_from=job.latest())
    assert (job.result(), job.state()) == references[of_job], f"interrupted at step {step}"


@pytest.mark.parametrize(
    "optim", ["adafactor", *(pytest.param(each, marks=pytest.mark.long) for each in ("sgd", "adagrad"))]
)
def test_interruption_is_exact_with_other_optimizers(make_job: Make, optim: str) -> None:
    whole, job = (make_job(hyperparameters={"optim": optim, "max_steps": 8}) for _ in range(2))
    whole.train()
    job.interrupt(StopCause.PAUSE, 4)
    job.train(resume_from=job.latest())
    assert (job.result(), job.state()) == (whole.result(), whole.state())


@pytest.mark.parametrize("noise", [{}, {"neftune_noise_alpha": 5.0}], ids=LOOPS)
def test_interruption_is_exact_with_workers_accumulation_and_noise(make_job: Make, noise: dict[str, float]) -> None:
    parts: dict[str, Any] = {
        "data": {"batch_size": 2, "gradient_accumulation_steps": 3, "num_workers": 2},
        "hyperparameters": {
            **noise,
            "gradient_checkpointing": True,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 0.25,
            "weight_decay": 0.1,
        },
    }
    whole, job = make_job("LORA", **parts), make_job("LORA", **parts)
    whole.train()
    job.interrupt(StopCause.PAUSE, 4)
    job.train(resume_from=job.latest())
    assert (job.result(), job.state()) == (whole.result(), whole.state())

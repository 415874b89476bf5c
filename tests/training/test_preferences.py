"""Training on preferences: every loss prefers the chosen answers more and more, as TRL's does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trainings import Job, Make, Zygote, refusal

from trainmaster.protocol.reasons import StopCause
from trainmaster.server.core.training.preferences import LOSSES, PreferenceLoss

METRICS = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy", "logps_chosen", "logps_rejected")
WHOLE = {"adapter": "none", "learning_rate": 2e-3}
INTERRUPTIONS = {"killed": None, "paused": StopCause.PAUSE, "preempted": StopCause.PREEMPT}


@pytest.mark.parametrize("loss", sorted(LOSSES.keys() - {PreferenceLoss.KTO}))
def test_each_loss_learns_to_prefer_the_chosen_answers(make_job: Make, loss: PreferenceLoss) -> None:
    parameters = {"loss_type": loss, "learning_rate": 2e-2, "num_train_epochs": 2.0, "lora_r": 4}
    job = make_job("DPO", evaluate=True, hyperparameters=parameters)
    job.train()
    series = {name: job.series(name) for name in ("loss", "eval_loss", *METRICS)}
    assert series["loss"][-1] < series["loss"][0]
    assert series["eval_loss"][-1] < series["loss"][0]
    assert series["reward_margin"][-1] > series["reward_margin"][0]
    assert series["reward_accuracy"][-1] > 0.7
    assert job.series("eval_reward_accuracy")[-1] > 0.7
    if LOSSES[loss].reference:
        # The adapter has no effect yet: the model is the reference.
        assert series["reward_margin"][0] == pytest.approx(0, abs=1e-4)
    else:
        assert "computing what the base model says" not in job.log()


def test_single_answers_are_liked_more_and_more_or_less_and_less(make_job: Make) -> None:
    parameters = {"loss_type": "kto", "learning_rate": 2e-2, "num_train_epochs": 3.0, "lora_r": 4}
    job = make_job("DPO", evaluate=True, hyperparameters=parameters, data={"batch_size": 8})
    job.train()
    assert job.series("loss")[0] == pytest.approx(0.5, abs=1e-5)
    assert job.series("loss")[-1] < 0.4
    assert job.series("eval_loss")[-1] < 0.45
    assert job.series("reward_chosen")[-1] > 0 > job.series("reward_rejected")[-1]
    assert all(value >= 0 for value in job.series("kl"))
    assert job.series("eval_reward_chosen")[-1] > job.series("eval_reward_rejected")[-1]
    assert not job.series("liked")


def test_weights_of_answers_decide_which_ones_count(make_job: Make) -> None:
    def rewards(**weights: float) -> tuple[float, float]:
        parameters = {"loss_type": "kto", "learning_rate": 1e-2, "num_train_epochs": 2.0, "lora_r": 4, **weights}
        job = make_job("DPO", hyperparameters=parameters)
        job.train()
        return job.series("reward_chosen")[-1], job.series("reward_rejected")[-1]

    liked_alone, disliked_alone = rewards(undesirable_weight=0.0), rewards(desirable_weight=0.0)
    assert liked_alone[0] > disliked_alone[0]
    assert liked_alone[1] > disliked_alone[1]


def test_label_smoothing_keeps_the_margin_small(make_job: Make) -> None:
    def margin(**parameters: Any) -> float:
        job = make_job("DPO", hyperparameters={**WHOLE, "beta": 1.0, "num_train_epochs": 4.0, **parameters})
        job.train()
        return job.series("reward_margin")[-1]

    plain, smoothed = margin(), margin(label_smoothing=0.4)
    assert 0 < smoothed < plain / 2


def test_what_the_base_model_says_is_computed_once_for_all_jobs(make_job: Make, tiny: Path) -> None:
    found = []
    for parameters in ({"learning_rate": 1e-3}, {"learning_rate": 2e-3, "loss_type": "hinge"}):
        job = make_job("DPO", hyperparameters={"max_steps": 2, **parameters})
        job.prepared["cache_path"] = str(tiny / "own-cache")
        job.train()
        found.append("computing what the base model says" in job.log())
    assert found == [True, False]


def as_trl(zygote: Zygote, tiny: Path, job: Job, tmp_path: Path) -> list[dict[str, float]]:
    """What TRL's trainer logs of the same rows, options and seed."""
    log, options = tmp_path / "trl.log", tmp_path / "options.json"
    options.write_text(json.dumps(job.document["training_config"]["hyperparameters"]))
    arguments = [str(tiny), str(options), str(tmp_path / "trl")]
    pid = zygote.start({}, log, call="checks:train_preferences_by_trl", arguments=arguments)
    assert zygote.wait(pid) == 0, log.read_text()
    return [record for record in json.loads((tmp_path / "trl" / "logs.json").read_text()) if "loss" in record]


@pytest.mark.parametrize(
    ("loss", "parameters"),
    [
        ("sigmoid", WHOLE),
        ("sigmoid", {"lora_r": 4, "learning_rate": 1e-2, "beta": 0.3}),
        ("ipo", WHOLE),
        ("hinge", {**WHOLE, "beta": 0.5}),
        ("robust", {**WHOLE, "label_smoothing": 0.2}),
        ("sigmoid_norm", {**WHOLE, "beta": 2.0}),
    ],
)
def test_course_is_that_of_trl(
    make_job: Make, zygote: Zygote, tiny: Path, tmp_path: Path, loss: str, parameters: dict[str, Any]
) -> None:
    job = make_job("DPO", hyperparameters={"loss_type": loss, "max_steps": 20, "num_train_epochs": 3.0, **parameters})
    job.train()
    theirs = as_trl(zygote, tiny, job, tmp_path)
    for name, their_name in {
        "loss": "loss",
        "grad_norm": "grad_norm",
        "reward_margin": "rewards/margins",
        "reward_chosen": "rewards/chosen",
        "reward_accuracy": "rewards/accuracies",
        "logps_rejected": "logps/rejected",
    }.items():
        # TRL's rewards are of sums of logprobs, whatever the loss.
        if name.startswith("reward") and LOSSES[PreferenceLoss(loss)].mean:
            continue
        expected = [record[their_name] for record in theirs]
        assert len(expected) == 20
        assert job.series(name) == pytest.approx(expected, rel=2e-3, abs=2e-4), name


@pytest.mark.parametrize(
    ("loss", "how", "ranks"),
    [*(("sigmoid", how, ranks) for how in INTERRUPTIONS for ranks in (1, 2)), ("kto", "preempted", 2)],
)
def test_interrupted_training_ends_with_the_bits_of_an_uninterrupted_one(
    make_job: Make, loss: str, how: str, ranks: int
) -> None:
    def job() -> Job:
        parameters = {"num_train_epochs": 2.0, "learning_rate": 1e-2, "lora_r": 4, "loss_type": loss}
        return make_job("DPO", ranks=ranks, evaluate=True, hyperparameters=parameters, data={"batch_size": 8 // ranks})

    whole, interrupted = job(), job()
    whole.train()
    interrupted.interrupt(INTERRUPTIONS[how], 7)
    interrupted.train(resume_from=interrupted.latest())
    assert (interrupted.result(), interrupted.state()) == (whole.result(), whole.state())


def test_sharded_ranks_take_the_course_of_one(make_job: Make) -> None:
    parts = {"hyperparameters": {**WHOLE, "num_train_epochs": 1.0}, "evaluate": True}
    one = make_job("DPO", data={"batch_size": 4}, **parts)
    one.train()
    framework = {"type": "FSDP", "distributed": {"world_size": 2, "strategy": "fsdp2"}}
    two = make_job("DPO", ranks=2, framework=framework, data={"batch_size": 2}, **parts)
    two.train()
    for name in ("loss", "reward_margin", "eval_loss"):
        assert two.series(name) == pytest.approx(one.series(name), rel=1e-3, abs=1e-5)


def test_a_model_that_the_engine_lacks_is_refused(make_job: Make) -> None:
    job = make_job("DPO", base_model={"model_kwargs": {"attention_dropout": "0.1"}})
    assert "DPO is trained by the engine alone: the model's attention_dropout is 0.1" in refusal(job)

"""What the benchmarks `service_tokens` and `training` set against the engine alone, and with which targets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from benchmarks.engine_tokens import setting_of
from benchmarks.engine_work import Setting
from benchmarks.models import LARGE
from benchmarks.report import WrongResultError
from benchmarks.service_tokens import rl_figure, sft_figure
from benchmarks.training import against_engine, compared
from benchmarks.training_runs import JobRun, Plan, Times

SFT: Mapping[str, Any] = {"tokens": 34_000, "seconds": 2.0, "loss": 12.0}
RL: Mapping[str, Any] = {"tokens": 262_144, "seconds": 33.0, "sampled_s": 13.0}
STEPS = 9
STEP_TOKENS = 16 * 2048
SAMPLED = 64 * 8 * 512
PLAN = Plan.of(LARGE, "LORA", 2048)


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting(**setting_of(LARGE, Path("model"), seconds=1.0))


@pytest.mark.parametrize(("step_s", "met"), [(STEP_TOKENS / 17_000, True), (STEP_TOKENS / 16_000, False)])
def test_steps_through_the_client_are_set_against_the_engines(setting: Setting, step_s: float, met: bool) -> None:
    found = {"seconds": STEPS * step_s, "first_loss": 12.01 * STEP_TOKENS}
    figure = sft_figure("8B", setting, found, SFT, targets=True)
    assert figure.measured == pytest.approx(STEP_TOKENS / step_s)
    assert figure.target == pytest.approx(0.97 * 17_000)
    assert figure.met is met
    assert sft_figure("8B", setting, found, SFT, targets=False).target is None


def test_steps_through_the_client_with_another_loss_are_wrong(setting: Setting) -> None:
    with pytest.raises(WrongResultError, match=r"the first loss is 11\.0000, and the engine's own 12\.0000"):
        sft_figure("8B", setting, {"seconds": 1.0, "first_loss": 11.0 * STEP_TOKENS}, SFT, targets=True)


def test_samples_through_the_client_are_set_against_the_engines_own_step(setting: Setting) -> None:
    found = {"tokens": SAMPLED, "sampled_s": 16.0, "saved_s": 0.5, "trained_s": 21.0}
    figure = rl_figure("8B", setting, found, RL, targets=True)
    assert figure.measured == SAMPLED / 16
    assert figure.target == pytest.approx(0.9 * SAMPLED / 13)
    assert not figure.met
    assert "training 21.00 s, by the engine alone 20.00 s" in figure.note
    with pytest.raises(WrongResultError, match="8 tokens were sampled"):
        rl_figure("8B", setting, {**found, "tokens": 8}, RL, targets=True)


def times(step_s: float) -> Times:
    return Times(plan=PLAN, at={step: step * step_s for step in range(PLAN.every, PLAN.last + 1, PLAN.every)})


def test_job_is_set_against_the_script_by_hand_and_against_the_engine() -> None:
    run = JobRun(times=times(1.0), metrics={}, by_engine=True)
    figure = compared(PLAN, run, times(2.0), "")
    assert figure.measured == PLAN.step_tokens
    assert figure.target == pytest.approx(0.97 * PLAN.step_tokens / 2)
    engine = against_engine(figure, 1.1 * PLAN.step_tokens)
    assert engine.measured == figure.measured
    assert engine.ratio.startswith("0.909 x the engine alone")
    assert not engine.met


def test_job_without_a_script_by_hand_has_no_target_and_says_why() -> None:
    run = JobRun(times=times(1.0), metrics={}, by_engine=True)
    figure = compared(PLAN, run, None, "ModuleNotFoundError: No module named 'trl'")
    assert figure.peer is None
    assert figure.target is None
    assert figure.note.endswith("nothing by hand: ModuleNotFoundError: No module named 'trl'")

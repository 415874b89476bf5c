"""AdamW against float64 arithmetic and PyTorch's own, and what is done to gradients before a step."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import make_checkpoint

from trainmaster.engine.trained_model import AdamW, check_step, scale_gradients
from trainmaster.engine.types import AdamOptions, EngineError, Normalization

SHAPES = {"a": (3, 5), "b": (7,)}
STEPS = [
    AdamOptions(learning_rate=1e-2),
    AdamOptions(learning_rate=3e-3, beta1=0.8, beta2=0.99, eps=1e-6, weight_decay=0.1),
    AdamOptions(learning_rate=5e-3, beta1=0.0, beta2=0.95, eps=1e-8),
    AdamOptions(learning_rate=0.0, weight_decay=0.5),
    AdamOptions(learning_rate=1e-1, eps=1e-3, weight_decay=0.01),
]


def some(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}


def copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in tensors.items()}


def test_steps_match_float64_arithmetic() -> None:
    parameters = some(0)
    weights = {name: each.numpy().astype(np.float64) for name, each in parameters.items()}
    first = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    second = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    optimizer = AdamW(parameters)
    for index, options in enumerate(STEPS, start=1):
        gradients = some(index)
        optimizer.step(copies(gradients), options)
        for name, tensor in gradients.items():
            gradient = tensor.numpy().astype(np.float64)
            first[name] = options.beta1 * first[name] + (1 - options.beta1) * gradient
            second[name] = options.beta2 * second[name] + (1 - options.beta2) * gradient**2
            upper = first[name] / (1 - options.beta1**index)
            lower = np.sqrt(second[name] / (1 - options.beta2**index)) + options.eps
            weights[name] -= options.learning_rate * (options.weight_decay * weights[name] + upper / lower)
            np.testing.assert_allclose(parameters[name].numpy(), weights[name], rtol=2e-5, atol=1e-6)


def test_steps_match_those_of_pytorch() -> None:
    parameters, theirs = some(0), copies(some(0))
    optimizer = AdamW(parameters)
    reference = torch.optim.AdamW(list(theirs.values()), foreach=False, fused=False)
    for index, options in enumerate(STEPS, start=1):
        betas = (options.beta1, options.beta2)
        reference.param_groups[0].update(
            lr=options.learning_rate, betas=betas, eps=options.eps, weight_decay=options.weight_decay
        )
        gradients = some(index)
        for name, each in theirs.items():
            each.grad = gradients[name].clone()
        reference.step()
        optimizer.step(gradients, options)
        for name, each in theirs.items():
            torch.testing.assert_close(parameters[name], each, rtol=1e-6, atol=1e-7)


def test_interrupted_steps_end_in_the_same_bits() -> None:
    straight = some(0)
    optimizer = AdamW(straight)
    for index, options in enumerate(STEPS):
        optimizer.step(some(index), options)
    resumed = some(0)
    optimizer = AdamW(resumed)
    for index, options in enumerate(STEPS):
        weights, state = copies(optimizer.weights()), copied_state(optimizer)
        resumed = some(99)
        optimizer = AdamW(resumed)
        optimizer.load_weights(weights)
        optimizer.load_state(state)
        optimizer.step(some(index), options)
    assert all(torch.equal(resumed[name], straight[name]) for name in SHAPES)


def copied_state(optimizer: AdamW) -> dict[str, Any]:
    state = optimizer.state()
    return {key: copies(value) if isinstance(value, dict) else value for key, value in state.items()}


def test_parameters_of_16_bits_follow_float32_originals() -> None:
    exact = some(0)
    rough = {name: each.bfloat16() for name, each in exact.items()}
    started = copies(rough)
    optimizer = AdamW(rough)
    tiny = AdamOptions(learning_rate=1e-5)
    ones = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    for _ in range(400):
        optimizer.step(copies(ones), tiny)
    for name, each in rough.items():
        assert each.dtype == torch.bfloat16
        expected = started[name].float() - 400 * 1e-5
        torch.testing.assert_close(optimizer.weights()[name], expected, rtol=0, atol=2e-5)
        assert torch.equal(each, optimizer.weights()[name].bfloat16())

    continued = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    second = AdamW(continued)
    second.load_weights(copies(optimizer.weights()))
    second.load_state(copied_state(optimizer))
    for each in (optimizer, second):
        each.step(copies(ones), tiny)
    assert all(torch.equal(second.weights()[name], optimizer.weights()[name]) for name in SHAPES)


def test_loaded_weights_without_moments_start_afresh() -> None:
    optimizer = AdamW(some(0))
    optimizer.step(some(1), STEPS[0])
    optimizer.load_weights(some(2))
    optimizer.load_state({"steps": 0, "first_moments": {}, "second_moments": {}})
    fresh = AdamW(some(2))
    for each in (optimizer, fresh):
        each.step(some(3), STEPS[0])
    assert all(torch.equal(optimizer.weights()[name], fresh.weights()[name]) for name in SHAPES)


@pytest.mark.parametrize(
    ("normalization", "divisor"),
    [(Normalization.NONE, 1), (Normalization.NUM_LOSS_TOKENS, 40), (Normalization.NUM_SEQUENCES, 8)],
)
def test_gradients_are_divided_before_they_are_clipped(normalization: Normalization, divisor: int) -> None:
    gradients, theirs = some(1), [torch.nn.Parameter(each) for each in some(1).values()]
    for parameter, gradient in zip(theirs, some(1).values(), strict=True):
        parameter.grad = gradient / divisor
    norm = torch.nn.utils.clip_grad_norm_(theirs, 0.05)
    options = AdamOptions(
        learning_rate=1.0, grad_clip_norm=0.05, normalization=normalization, grad_norm_metrics="detailed"
    )
    metrics = scale_gradients(gradients, options, loss_tokens=40, sequences=8)
    for parameter, mine in zip(theirs, gradients.values(), strict=True):
        torch.testing.assert_close(mine, parameter.grad)
    assert metrics.keys() == {"grad_norm", "grad_norm/a", "grad_norm/b"}
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-6)
    assert math.hypot(metrics["grad_norm/a"], metrics["grad_norm/b"]) == pytest.approx(metrics["grad_norm"], rel=1e-6)


def test_gradients_within_the_clip_norm_stay_as_they_are() -> None:
    gradients = some(1)
    plain = AdamOptions(learning_rate=1.0, grad_clip_norm=1e3)
    assert scale_gradients(gradients, plain, loss_tokens=40, sequences=8) == {}
    assert all(torch.equal(gradients[name], each) for name, each in some(1).items())


def test_basic_norm_metrics_are_one_number() -> None:
    metrics = scale_gradients(
        some(1), AdamOptions(learning_rate=1.0, grad_norm_metrics="basic"), loss_tokens=1, sequences=1
    )
    expected = math.sqrt(sum(float(each.square().sum()) for each in some(1).values()))
    assert metrics == {"grad_norm": pytest.approx(expected, rel=1e-6)}


def test_gradients_that_are_not_finite_are_refused() -> None:
    gradients = some(1)
    gradients["b"][3] = math.nan
    with pytest.raises(EngineError, match="the weights stay as they are"):
        scale_gradients(gradients, AdamOptions(learning_rate=1.0), loss_tokens=1, sequences=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate is -1.0; it has to be 0 or more"),
        ({"learning_rate": math.nan}, "learning_rate is nan"),
        ({"learning_rate": math.inf}, "learning_rate is inf"),
        ({"beta1": 1.0}, "beta1 is 1.0; it has to be in"),
        ({"beta2": -0.1}, "beta2 is -0.1"),
        ({"eps": 0.0}, "eps is 0.0; it has to be above 0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"grad_clip_norm": -1.0}, "grad_clip_norm is -1.0"),
        ({"grad_norm_metrics": "some"}, "unknown gradient norm metrics 'some'; there are off, basic, detailed"),
    ],
)
def test_step_that_makes_no_sense_is_refused(change: dict[str, Any], message: str) -> None:
    check_step(STEPS[0])
    with pytest.raises(EngineError, match=message):
        check_step(replace(STEPS[0], **change))


ONE_STEP = """
import sys
import numpy as np
from trainmaster.engine.engine import Engine
from trainmaster.engine.types import AdamOptions, Datum, LoraOptions, Pass, Trained

engine = Engine(sys.argv[1])
engine.create_model("lora", Trained.ADAPTER, LoraOptions(rank=2, seed=1))
inputs = {"target_tokens": np.array([2, 3, 4]), "weights": np.ones(3, np.float32)}
datum = Datum(tokens=np.array([1, 2, 3]), inputs=inputs)
[result] = engine.run([Pass(model_id="lora", data=(datum,), loss="cross_entropy")])
assert not isinstance(result, Exception), result
engine.optim_step("lora", AdamOptions(learning_rate=0.1))
assert "torch._dynamo" not in sys.modules
"""


def test_training_does_not_load_the_compiler_of_torch(tmp_path: Path) -> None:
    """Two seconds of every start of a trainer service."""
    subprocess.run([sys.executable, "-c", ONE_STEP, make_checkpoint(tmp_path)], check=True)

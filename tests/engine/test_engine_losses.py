"""Every loss, its gradient and its metrics against plain float64 arithmetic, written from docs/reference/losses.md."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from trainmaster.engine import losses
from trainmaster.engine.types import Datum, EngineError

POLICY_LOSSES = ["importance_sampling", "ppo", "cispo", "dro", "gspo", "dapo", "reinforce"]
CLIPPED_LOSSES = {"ppo": (0.8, 1.2), "cispo": (0.8, 1.2), "dapo": (0.8, 1.28), "gspo": (0.9997, 1.0004)}


def a_batch(lengths: list[int], seed: int = 0) -> tuple[list[Datum], list[np.ndarray]]:
    """Policy data with prompts and with ratios on both sides of every threshold, and log-probabilities of now."""
    random = np.random.default_rng(seed)
    data, current = [], []
    for length in lengths:
        now = -random.exponential(1.5, length).astype(np.float32)
        advantages = random.normal(0, 1, length).astype(np.float32)
        advantages[: length // 3] = 0
        inputs = {
            "target_tokens": random.integers(0, 100, length),
            "logprobs": (now + random.normal(0, 0.3, length)).astype(np.float32),
            "advantages": advantages,
        }
        data.append(Datum(tokens=random.integers(0, 100, length), inputs=inputs))
        current.append(now)
    return data, current


def compute(
    name: str, data: list[Datum], current: list[np.ndarray], options: Mapping[str, float] = {}
) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
    """Loss of each token, gradient by each log-probability, and metrics, as the engine computes them."""
    filled = losses.options_of(name, options)
    given = [losses.inputs_of(name, filled, index, datum) for index, datum in enumerate(data)]
    inputs = {key: np.concatenate([each[key] for each in given]) for key in given[0]}
    lengths = [len(datum.tokens) for datum in data]
    logprobs = torch.tensor(np.concatenate(current), requires_grad=True)
    tokens = losses.Tokens(
        logprobs=logprobs,
        inputs={key: torch.tensor(value) for key, value in inputs.items() if key != "target_tokens"},
        options=filled,
        lengths=torch.tensor(lengths),
    )
    found = losses.find(name).formula(tokens)
    found.values.sum().backward()
    assert logprobs.grad is not None
    ratios = None if found.ratios is None else found.ratios.numpy()
    values = found.values.detach().numpy()
    loss, now = losses.find(name), logprobs.detach().numpy()
    return values, logprobs.grad.numpy(), losses.measure(loss, values, ratios, now, inputs, lengths)


def plain(
    name: str, datum: Datum, now: np.ndarray, options: Mapping[str, float] = {}
) -> tuple[list[float], list[float], list[float]]:
    """Loss, gradient and ratio of each token of one sequence, token by token in float64."""
    length = len(datum.tokens)
    old, gain = (datum.inputs[key].astype(np.float64) for key in ("logprobs", "advantages"))
    now = now.astype(np.float64)
    low, high = (
        options.get(key, default)
        for key, default in zip(
            ("clip_low_threshold", "clip_high_threshold"), CLIPPED_LOSSES.get(name, (0, 0)), strict=True
        )
    )
    lows = datum.inputs.get("clip_low_threshold", np.full(length, low))
    highs = datum.inputs.get("clip_high_threshold", np.full(length, high))
    mask = datum.inputs.get("sequence_ratio_mask", gain)
    marked = [t for t in range(length) if mask[t] != 0]
    of_sequence = math.exp(sum(now[t] - old[t] for t in marked) / len(marked)) if marked else 1.0
    values, gradients, ratios = [], [], []
    for t in range(length):
        ratio = of_sequence if name == "gspo" else math.exp(now[t] - old[t])
        inside = min(max(ratio, float(lows[t])), float(highs[t]))
        match name:
            case "importance_sampling":
                value, gradient = -ratio * gain[t], -ratio * gain[t]
            case "ppo" | "dapo" | "gspo":
                value = -min(ratio * gain[t], inside * gain[t])
                gradient = 0.0 if inside * gain[t] < ratio * gain[t] else -ratio * gain[t]
            case "cispo":
                value, gradient = -inside * now[t] * gain[t], -inside * gain[t]
            case "dro":
                beta = options.get("beta", 0.05)
                value = -(now[t] * gain[t] - 0.5 * beta * (now[t] - old[t]) ** 2)
                gradient = -gain[t] + beta * (now[t] - old[t])
            case "reinforce":
                value, gradient = -now[t] * gain[t], -gain[t]
            case _:
                raise AssertionError(name)
        values.append(value)
        gradients.append(gradient)
        ratios.append(ratio)
    return values, gradients, ratios


def assert_as_plain(name: str, data: list[Datum], current: list[np.ndarray], options: Mapping[str, float] = {}) -> None:
    values, gradients, metrics = compute(name, data, current, options)
    expected = [plain(name, datum, now, options) for datum, now in zip(data, current, strict=True)]
    np.testing.assert_allclose(values, np.concatenate([each[0] for each in expected]), rtol=3e-6, atol=1e-6)
    np.testing.assert_allclose(gradients, np.concatenate([each[1] for each in expected]), rtol=3e-6, atol=1e-6)
    assert metrics["loss:sum"] == pytest.approx(sum(sum(each[0]) for each in expected), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_loss_matches_plain_arithmetic(name: str) -> None:
    assert_as_plain(name, *a_batch([7, 1, 12, 30]))


@pytest.mark.parametrize("name", CLIPPED_LOSSES)
def test_clip_thresholds_are_those_of_the_request(name: str) -> None:
    options = {"clip_low_threshold": 0.93, "clip_high_threshold": 1.02}
    data, current = a_batch([9, 20], seed=3)
    assert_as_plain(name, data, current, options)
    assert not np.array_equal(compute(name, data, current, options)[0], compute(name, data, current)[0])


@pytest.mark.parametrize("name", CLIPPED_LOSSES)
def test_clip_thresholds_of_a_token_win_over_those_of_the_request(name: str) -> None:
    data, current = a_batch([9, 20], seed=4)
    random = np.random.default_rng(1)
    thresholds = {
        "clip_low_threshold": random.uniform(0.7, 0.99, 20).astype(np.float32),
        "clip_high_threshold": random.uniform(1.01, 1.4, 20).astype(np.float32),
    }
    # The other datum has none, and keeps the request's.
    data[1] = Datum(tokens=data[1].tokens, inputs={**data[1].inputs, **thresholds})
    assert_as_plain(name, data, current, {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05})


def test_gspo_takes_its_ratio_over_the_marked_tokens() -> None:
    data, current = a_batch([8, 5, 6], seed=5)
    mask = np.array([0, 1, 0, 1, 1, 0, 0, 0], np.float32)
    data[0] = Datum(tokens=data[0].tokens, inputs={**data[0].inputs, "sequence_ratio_mask": mask})
    data[2] = Datum(tokens=data[2].tokens, inputs={**data[2].inputs, "sequence_ratio_mask": np.zeros(6, np.float32)})
    assert_as_plain("gspo", data, current, {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0})
    unmasked = [
        Datum(tokens=each.tokens, inputs={k: v for k, v in each.inputs.items() if "mask" not in k}) for each in data
    ]
    wide = {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}
    assert not np.allclose(compute("gspo", data, current, wide)[0], compute("gspo", unmasked, current, wide)[0])


def test_dro_uses_the_beta_of_the_request() -> None:
    assert_as_plain("dro", *a_batch([11, 4], seed=6), {"beta": 0.7})


def test_reinforce_needs_no_earlier_logprobs() -> None:
    data, current = a_batch([5, 6])
    alone = [
        Datum(tokens=each.tokens, inputs={k: v for k, v in each.inputs.items() if k != "logprobs"}) for each in data
    ]
    np.testing.assert_array_equal(compute("reinforce", alone, current)[0], compute("reinforce", data, current)[0])


def test_loss_is_added_by_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with neither weights nor advantages, an option with a range, and an input with a default of its own."""
    added = losses.LossFunction(
        formula=lambda tokens: losses.TokenLosses(tokens.inputs["scale"] * tokens.logprobs.square()),
        optional={"scale": lambda options, inputs: options["power"] * (inputs["target_tokens"] > 1)},
        options={"power": losses.LossOption(2.0, least=1.0, most=4.0)},
    )
    monkeypatch.setitem(losses.LOSSES, "added", added)  # type: ignore[arg-type]
    data = [
        Datum(tokens=np.arange(3), inputs={"target_tokens": np.arange(3)}),
        Datum(tokens=np.arange(2), inputs={"target_tokens": np.arange(2), "scale": np.array([5.0, 6.0])}),
    ]
    current = [np.array([-1, -2, -3], np.float32), np.array([-4, -1], np.float32)]
    values, gradients, metrics = compute("added", data, current, {"power": 3})
    assert values.tolist() == [0, 0, 27, 80, 6]
    assert gradients.tolist() == [0, 0, -18, -40, -12]
    assert metrics == {"loss:sum": 113, "loss_tokens:sum": 5}
    with pytest.raises(EngineError, match=r"'power' of the loss function added is 0\.5; it cannot be below 1"):
        losses.options_of("added", {"power": 0.5})
    with pytest.raises(EngineError, match="'power' of the loss function added is 5; it cannot be above 4"):
        losses.options_of("added", {"power": 5})


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_token_without_advantage_never_makes_nan_of_a_huge_ratio(name: str) -> None:
    advantages = np.array([0, 1, 0], np.float32)
    inputs = {
        "target_tokens": np.arange(3),
        "logprobs": np.array([-500, -1, -500], np.float32),
        "advantages": advantages,
    }
    values, gradients, metrics = compute(
        name, [Datum(tokens=np.arange(3), inputs=inputs)], [np.array([-0.1, -1.1, -0.1], np.float32)]
    )
    assert np.isfinite(values).all()
    assert np.isfinite(gradients).all()
    assert all(math.isfinite(value) for value in metrics.values())


def test_cross_entropy_takes_weights_of_any_sign() -> None:
    random = np.random.default_rng(0)
    weights = random.normal(0, 1, 12).astype(np.float32)
    now = -random.exponential(1, 12).astype(np.float32)
    datum = Datum(tokens=np.arange(12), inputs={"target_tokens": np.arange(12), "weights": weights})
    values, gradients, metrics = compute("cross_entropy", [datum], [now])
    np.testing.assert_allclose(values, -now.astype(np.float64) * weights, rtol=1e-6)
    np.testing.assert_array_equal(gradients, -weights)
    assert metrics == {"loss:sum": pytest.approx(-(now.astype(np.float64) @ weights)), "loss_tokens:sum": 12}


def test_cross_entropy_with_several_targets_at_a_position() -> None:
    random = np.random.default_rng(1)
    weights = random.uniform(0, 1, (5, 3)).astype(np.float32)
    weights[:2] = 0
    now = -random.exponential(1, (5, 3)).astype(np.float32)
    datum = Datum(tokens=np.arange(5), inputs={"target_tokens": np.arange(15).reshape(5, 3), "weights": weights})
    values, gradients, metrics = compute("cross_entropy", [datum], [now])
    assert values.shape == (5, 3)
    np.testing.assert_array_equal(gradients, -weights)
    assert metrics["loss:sum"] == pytest.approx(-(now.astype(np.float64) * weights).sum(), rel=1e-6)
    assert metrics["loss_tokens:sum"] == 3


def test_cross_entropy_without_weights_counts_every_token() -> None:
    now = np.array([-1, -2.5, -0.25], np.float32)
    datum = Datum(tokens=np.arange(3), inputs={"target_tokens": np.arange(3)})
    _, _, metrics = compute("cross_entropy", [datum], [now])
    assert metrics == {"loss:sum": 3.75, "loss_tokens:sum": 3}


@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if losses.LOGPROBS in losses.LOSSES[name].required])
def test_metrics_match_plain_arithmetic(name: str) -> None:
    data, current = a_batch([7, 1, 12, 30], seed=8)
    data[1].inputs["advantages"][:] = 0  # type: ignore[index]
    metrics = compute(name, data, current)[2]
    ratios, divergences, clipped, learned = [], [], [], []
    low, high = CLIPPED_LOSSES.get(name, (0, 0))
    for datum, now in zip(data, current, strict=True):
        counted = np.flatnonzero(datum.inputs["advantages"])
        of_tokens = np.array(plain(name, datum, now)[2])[counted]
        difference = now.astype(np.float64)[counted] - datum.inputs["logprobs"][counted]
        ratios.append(of_tokens.mean() if counted.size else 1.0)
        divergences.append((np.exp(difference) - 1 - difference).mean() if counted.size else 0.0)
        clipped.append(((of_tokens < low) | (of_tokens > high)).mean() if counted.size else 0.0)
        learned.extend(of_tokens)
    expected = {
        "loss_tokens:sum": len(learned),
        "ratio:mean": np.mean(ratios),
        "ratio:max": max(learned),
        "ratio:min": min(learned),
        "kl:mean": np.mean(divergences),
    }
    if name in CLIPPED_LOSSES:
        expected["clip_fraction:mean"] = np.mean(clipped)
    assert {key: value for key, value in metrics.items() if key != "loss:sum"} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_metrics_of_parts_merge_into_those_of_the_whole(name: str) -> None:
    data, current = a_batch([7, 3, 12, 30, 2], seed=9)
    whole = compute(name, data, current)[2]
    parts = [(len(data[a:b]), compute(name, data[a:b], current[a:b])[2]) for a, b in ((0, 1), (1, 4), (4, 5))]
    assert losses.merge(parts) == pytest.approx(whole, rel=1e-6)


def test_every_metric_names_its_reduction() -> None:
    data, current = a_batch([4])
    for name in POLICY_LOSSES:
        metrics = compute(name, data, current)[2]
        assert "loss:sum" in metrics
        assert {key.split(":")[1] for key in metrics} <= {"sum", "mean", "max", "min"}


def refusal(name: str, inputs: Mapping[str, np.ndarray], length: int = 3, index: int = 4) -> str:
    options = losses.options_of(name, {})
    with pytest.raises(EngineError) as caught:
        losses.inputs_of(name, options, index, Datum(tokens=np.arange(length), inputs=inputs))
    return str(caught.value)


def test_unknown_loss_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        EngineError, match="unknown loss function 'grpo'; there are cross_entropy, importance_sampling, ppo"
    ):
        losses.find("grpo")


def test_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        EngineError, match="unknown option 'epsilon' of the loss function ppo; it knows clip_low_threshold, clip_high"
    ):
        losses.options_of("ppo", {"epsilon": 0.2})
    with pytest.raises(EngineError, match="the option 'output' is 'embedding': a pass gives log-probabilities here"):
        losses.options_of("cross_entropy", {"output": "embedding", "pooling": "last"})
    with pytest.raises(EngineError, match="unknown option 'beta' of the loss function cross_entropy; it has none"):
        losses.options_of("cross_entropy", {"beta": 0.2})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "ppo",
            {"clip_low_threshold": "0.8"},
            "'clip_low_threshold' of the loss function ppo is '0.8'; it has to be a number",
        ),
        ("ppo", {"clip_high_threshold": math.nan}, "is nan; it has to be a number"),
        (
            "ppo",
            {"clip_low_threshold": 1.3},
            "'clip_low_threshold' of the loss function ppo is 1.3; it cannot be above clip_high_threshold 1.2",
        ),
        ("dro", {"beta": -1.0}, "'beta' of the loss function dro is -1; it cannot be below 0"),
    ],
)
def test_option_that_makes_no_sense_is_refused(name: str, options: dict[str, float | str], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        losses.options_of(name, options)


def test_missing_input_is_named_with_its_datum() -> None:
    three = np.arange(3)
    assert refusal("ppo", {"target_tokens": three, "logprobs": np.zeros(3)}) == (
        "datum 4 lacks the input 'advantages', which ppo needs; it knows target_tokens, logprobs, advantages, "
        "clip_low_threshold, clip_high_threshold"
    )
    assert "datum 4 lacks the input 'target_tokens'" in refusal("cross_entropy", {"weights": np.ones(3)})


def test_unknown_input_is_refused() -> None:
    three = np.arange(3)
    message = refusal("cross_entropy", {"target_tokens": three, "weights": np.ones(3), "mask": np.ones(3)})
    assert message == "datum 4 has an input 'mask' that cross_entropy does not know; it knows target_tokens, weights"


@pytest.mark.parametrize(
    ("inputs", "part"),
    [
        (
            {"target_tokens": np.arange(4)},
            "target_tokens of datum 4 have the shape [4]; cross_entropy takes [3] or [3, k]",
        ),
        ({"target_tokens": np.zeros((3, 0), np.int64)}, "have the shape [3, 0]"),
        ({"target_tokens": np.zeros((), np.int64)}, "have the shape []"),
        ({"target_tokens": np.arange(3.0)}, "are of type float64; they have to be whole numbers"),
        (
            {"weights": np.ones(2)},
            "'weights' of datum 4 has the shape [2]; it must have that of its target_tokens, [3]",
        ),
        ({"weights": np.array([1, np.nan, 1])}, "'weights' of datum 4 has values that are not finite"),
        ({"weights": np.array(["a", "b", "c"])}, "it has to be numbers"),
        ({"target_tokens": np.zeros((3, 2), np.int64), "weights": np.ones(3)}, "that of its target_tokens, [3, 2]"),
    ],
)
def test_misshaped_input_is_refused(inputs: dict[str, np.ndarray], part: str) -> None:
    assert part in refusal("cross_entropy", {"target_tokens": np.arange(3), **inputs})


def test_policy_loss_takes_one_target_at_a_position() -> None:
    wide = np.ones((3, 2), np.int64)
    message = refusal("ppo", {"target_tokens": wide, "logprobs": wide, "advantages": wide})
    assert "have the shape [3, 2]; ppo takes [3]" in message


def test_documented_losses_and_defaults_are_those_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "losses.md").read_text()
    formulas = page.partition("\n## Formulas\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| .+ \|([^|]*)\|$", formulas, re.MULTILINE)
    documented = {name: dict(re.findall(r"`(\w+)` (-?[\d.]+(?:e-?\d+)?)", options)) for name, options in rows}
    assert {name: {key: float(value) for key, value in each.items()} for name, each in documented.items()} == {
        name: pytest.approx({key: option.default for key, option in loss.options.items()})
        for name, loss in losses.LOSSES.items()
    }


def test_token_wise_losses_are_those_of_the_formula_in_any_parts() -> None:
    token_wise = {name for name, loss in losses.LOSSES.items() if loss.token_wise}
    assert token_wise == {"cross_entropy", *POLICY_LOSSES} - {"gspo"}
    data, current = a_batch([7, 9])
    for name in token_wise - {"cross_entropy"}:
        values, gradients, _ = compute(name, data, current)
        cut = [0, 3, 12, 16]
        pieces = [piece_of(name, data, current, slice(*ends)) for ends in itertools.pairwise(cut)]
        np.testing.assert_array_equal(values, np.concatenate([each[0] for each in pieces]))
        np.testing.assert_array_equal(gradients, np.concatenate([each[1] for each in pieces]))


def piece_of(name: str, data: list[Datum], current: list[np.ndarray], rows: slice) -> tuple[np.ndarray, np.ndarray]:
    """Some rows as if they were a sequence."""
    joined = {key: np.concatenate([datum.inputs[key] for datum in data])[rows] for key in data[0].inputs}
    datum = Datum(tokens=np.concatenate([datum.tokens for datum in data])[rows], inputs=joined)
    values, gradients, _ = compute(name, [datum], [np.concatenate(current)[rows]])
    return values, gradients

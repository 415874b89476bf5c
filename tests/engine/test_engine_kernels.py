"""The kernels of a GPU, against the formulas in float64; see `kernel_runs` for where."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from kernel_runs import DEVICE, DIGITS, FAMILIES, INTERPRETED, TYPES, a_model, apart, drawn
from torch import Tensor
from torch.nn import functional

from trainmaster.engine import kernels
from trainmaster.engine.attention import PackedAttention
from trainmaster.engine.kernels import gates, heads, norms
from trainmaster.engine.rotary import apply_rotary


@pytest.fixture(params=TYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    given: torch.dtype = request.param
    return given


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than there are rows, when weights get gradients."""
    for module in (norms, heads):
        monkeypatch.setattr(module, "_PROGRAMS", 3)


def agree(
    ours: Callable[..., Sequence[Tensor]], theirs: Callable[..., Sequence[Tensor]], given: Sequence[Tensor]
) -> None:
    """Both give the same results, without gradients too, and pull the same gradients back."""
    digits = DIGITS[given[0].dtype]
    with torch.no_grad():
        alone = ours(*given)
    own = [each.clone().requires_grad_() for each in given]
    wide = [each.double().requires_grad_() for each in given]
    results, expected = ours(*own), theirs(*wide)
    for result, bare, exact in zip(results, alone, expected, strict=True):
        assert torch.equal(result, bare)
        assert result.dtype == given[0].dtype
        assert apart(result, exact) < digits
    pulls = [drawn(*each.shape, dtype=given[0].dtype, seed=90 + place) for place, each in enumerate(results)]
    sum((result * pull).sum() for result, pull in zip(results, pulls, strict=True)).backward()
    sum((exact * pull.double()).sum() for exact, pull in zip(expected, pulls, strict=True)).backward()
    for mine, exact in zip(own, wide, strict=True):
        assert mine.grad is not None
        assert exact.grad is not None
        assert apart(mine.grad, exact.grad) < 2 * digits


def plain_norm(rows: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return functional.rms_norm(rows, weight.shape, weight + offset, eps)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("count", "width"), [(5, 64), (3, 100), (2, 4096)])
def test_norm_is_that_of_the_formula(count: int, width: int, offset: float, dtype: torch.dtype) -> None:
    given = [drawn(count, width, dtype=dtype, seed=1), drawn(width, dtype=dtype, seed=2)]
    agree(
        lambda rows, weight: [norms.rms_norm(rows, weight, 1e-5, offset)],
        lambda rows, weight: [plain_norm(rows, weight, 1e-5, offset)],
        given,
    )


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("count", "width"), [(5, 64), (3, 100)])
def test_norm_of_a_sum_gives_the_sum_too(count: int, width: int, offset: float, dtype: torch.dtype) -> None:
    given = [drawn(count, width, dtype=dtype, seed=seed) for seed in (1, 2)] + [drawn(width, dtype=dtype, seed=3)]

    def theirs(rows: Tensor, added: Tensor, weight: Tensor) -> list[Tensor]:
        return [plain_norm(rows + added, weight, 1e-5, offset), rows + added]

    agree(lambda rows, added, weight: norms.add_rms_norm(rows, added, weight, 1e-5, offset), theirs, given)


def test_norm_of_a_sum_needs_no_gradient_of_the_sum(dtype: torch.dtype) -> None:
    rows, added, weight = (drawn(*size, dtype=dtype, seed=7).requires_grad_() for size in ((4, 32), (4, 32), (32,)))
    norms.add_rms_norm(rows, added, weight, 1e-5)[0].sum().backward()
    alone = (rows.detach() + added.detach()).requires_grad_()
    norms.rms_norm(alone, weight.detach(), 1e-5).sum().backward()
    assert rows.grad is not None
    assert torch.equal(rows.grad, alone.grad)
    assert torch.equal(rows.grad, added.grad)


def test_frozen_weight_of_a_norm_gets_no_gradient(dtype: torch.dtype) -> None:
    rows, weight = drawn(4, 32, dtype=dtype, seed=1).requires_grad_(), drawn(32, dtype=dtype, seed=2)
    norms.rms_norm(rows, weight, 1e-5).sum().backward()
    assert weight.grad is None


def test_norm_reads_rows_that_lie_apart(dtype: torch.dtype) -> None:
    wide, weight = drawn(6, 80, dtype=dtype, seed=1), drawn(32, dtype=dtype, seed=2)
    with torch.no_grad():
        assert torch.equal(
            norms.rms_norm(wide[:, 48:], weight, 1e-5), norms.rms_norm(wide[:, 48:].contiguous(), weight, 1e-5)
        )


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [48, 1024, 1500])
def test_gate_is_that_of_the_formula(activation: str, width: int, dtype: torch.dtype) -> None:
    def theirs(gate: Tensor, up: Tensor) -> list[Tensor]:
        active = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
        return [active * up]

    given = [3 * drawn(5, width, dtype=dtype, seed=seed) for seed in (1, 2)]
    agree(lambda gate, up: [gates.gated(gate, up, activation)], theirs, given)


def test_gate_stays_finite_far_from_zero(dtype: torch.dtype) -> None:
    gate = torch.tensor([[-300.0, -90.0, 90.0, 300.0]], dtype=dtype, device=DEVICE).requires_grad_()
    for activation in ("silu", "gelu_tanh"):
        result = gates.gated(gate, torch.ones_like(gate), activation)
        assert torch.equal(result, functional.relu(gate))
        (grad,) = torch.autograd.grad(result.sum(), gate)
        assert grad.tolist() == [[0.0, 0.0, 1.0, 1.0]]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("count", "queries", "keys", "width", "pairs"),
    [(5, 4, 2, 16, 8), (3, 12, 1, 24, 12), (4, 9, 3, 8, 2), (2, 32, 8, 128, 64)],
)
def test_heads_are_normed_and_turned(
    count: int, queries: int, keys: int, width: int, pairs: int, normed: bool, interleaved: bool, dtype: torch.dtype
) -> None:
    angles = drawn(count, 1, pairs, dtype=torch.float32, seed=9) * 3
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    given = [drawn(count, each, width, dtype=dtype, seed=each) for each in (queries, keys)]
    if normed:
        given += [drawn(width, dtype=dtype, seed=seed) for seed in (5, 6)]

    def ours(query: Tensor, key: Tensor, *weights: Tensor) -> Sequence[Tensor]:
        own = heads.HeadNorms(*weights, 1e-5, 1.0) if weights else None
        return heads.turned(query, key, cosines, sines, own, interleaved=interleaved)

    def theirs(query: Tensor, key: Tensor, *weights: Tensor) -> list[Tensor]:
        if weights:
            query, key = (plain_norm(each, own, 1e-5, 1.0) for each, own in zip((query, key), weights, strict=True))
        angles = cosines.double(), sines.double()
        return [apply_rotary(each, angles, interleaved=interleaved) for each in (query, key)]

    agree(ours, theirs, given)


def test_heads_may_be_columns_of_one_product(dtype: torch.dtype) -> None:
    joined = drawn(6, 8 * 16, dtype=dtype, seed=1)
    angles = drawn(6, 1, 8, dtype=torch.float32, seed=2)
    query, key = joined[:, : 4 * 16].unflatten(1, (4, 16)), joined[:, 4 * 16 : 6 * 16].unflatten(1, (2, 16))
    with torch.no_grad():
        found = heads.turned(query, key, angles.cos(), angles.sin())
        expected = heads.turned(query.contiguous(), key.contiguous(), angles.cos(), angles.sin())
    assert all(torch.equal(*each) for each in zip(found, expected, strict=True))


@pytest.mark.parametrize("recompute", [False] if INTERPRETED else [False, True])
@pytest.mark.parametrize("kind", FAMILIES)
def test_model_with_kernels_is_the_model_without(kind: str, recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (5, 3)
    tokens = torch.arange(8, device=DEVICE) * 7
    positions = torch.cat([torch.arange(length) for length in lengths]).to(DEVICE)
    found: list[list[Tensor]] = []
    for served in (True, False):
        monkeypatch.setattr(kernels, "serve", lambda _, served=served: served)
        model = a_model(kind).requires_grad_()
        hidden = model.hidden(tokens, positions, PackedAttention(lengths), recompute=recompute)
        hidden.square().sum().backward()
        found.append([hidden, *(each.grad for each in model.model.parameters() if each.grad is not None)])
    assert len(found[0]) == 1 + len(list(model.model.parameters()))
    for ours, theirs in zip(*found, strict=True):
        assert apart(ours, theirs) < 2e-5

"""Adapters of a pack that a GPU computes together, against each computed by itself; see `kernel_runs` for where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from kernel_runs import DEVICE, DIGITS, INTERPRETED, TYPES, a_model, apart, drawn
from torch import Tensor

from trainmaster.engine import kernels
from trainmaster.engine.adapters import Adapter, AdapterRows
from trainmaster.engine.attention import PackedAttention
from trainmaster.engine.factor_stacks import FactorStacks
from trainmaster.engine.kernels.groups import Groups, add_group_outer, group_product
from trainmaster.engine.memory import PassMemory
from trainmaster.engine.model import Transformer
from trainmaster.engine.products import ROWS
from trainmaster.engine.types import LoraOptions

BOUNDS = [(3, 70), (70, 70), (80, 150)]
"""Groups with a whole tile and a part of one, an empty one, and rows of none."""


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_each_group_of_rows_has_its_own_factors(dtype: torch.dtype) -> None:
    groups = Groups.of(BOUNDS, torch.device(DEVICE))
    rows, factors = drawn(150, 40, dtype=dtype, seed=1), drawn(3, 24, 40, dtype=dtype, seed=2)
    lowered, raised = drawn(150, 100, dtype=dtype, seed=3)[:, 10:34], drawn(150, 40, dtype=dtype, seed=4)
    out, outer = torch.zeros(150, 24, dtype=dtype, device=DEVICE), torch.ones(3, 24, 40, device=DEVICE)
    expected_out, expected_raised, expected_outer = out.double(), raised.double(), outer.double()
    for group, (start, end) in enumerate(BOUNDS):
        expected_out[start:end] = rows[start:end].double() @ factors[group].double().t()
        expected_raised[start:end] += lowered[start:end].double() @ factors[group].double()
        expected_outer[group] += lowered[start:end].double().t() @ rows[start:end].double()
    group_product(rows, factors, groups, out=out)
    group_product(lowered, factors, groups, out=raised, add=True, transposed=True)
    add_group_outer(lowered, rows, groups, out=outer)
    assert apart(out, expected_out) < DIGITS[dtype]
    assert apart(raised, expected_raised) < DIGITS[dtype]
    assert apart(outer, expected_outer) < DIGITS[torch.float32]
    assert not out[70:80].any()


def an_adapter(model: Transformer, seed: int, **options: Any) -> Adapter:
    adapter = Adapter(model.config, LoraOptions(**{"rank": 8, "seed": seed, **options}), device=DEVICE)
    with torch.no_grad():
        for place, parameter in enumerate(adapter.parameters()):
            parameter.copy_(0.2 * drawn(*parameter.shape, dtype=torch.float32, seed=100 * seed + place))
    return adapter


MIXTURES: dict[str, list[tuple[dict[str, Any] | None, int]]] = {
    "one": [({}, 12)],
    "one of another scale": [({"alpha": 20.0, "rank": 5}, 12)],
    "one and rows of none": [({}, 7), (None, 5)],
    "several": [({}, 5), (None, 2), ({"rank": 3, "alpha": 7.0}, 4), ({}, 2)],
    "of different layers": [({"train_mlp": False}, 6), ({"train_attn": False}, 6)],
}


@pytest.fixture(params=MIXTURES)
def mixture(request: pytest.FixtureRequest) -> list[tuple[dict[str, Any] | None, int]]:
    return MIXTURES[request.param]


@pytest.fixture(autouse=True)
def _served(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Kernels serve the interpreter, too."""
    monkeypatch.setattr(kernels, "serve", lambda _: True)
    return monkeypatch


def pulled(model: Transformer, rows: AdapterRows, *, recompute: bool = False) -> list[Tensor]:
    """The hidden states of a pack, and the gradients of its adapters by them."""
    lengths = [count for _, count in rows.parts]
    positions = torch.cat([torch.arange(length) for length in lengths]).to(DEVICE)
    tokens = torch.arange(sum(lengths), device=DEVICE) * 5
    hidden = model.hidden(tokens, positions, PackedAttention(lengths), rows, recompute=recompute)
    hidden.square().sum().backward()
    found = [hidden.detach()]
    for adapter, _ in rows.parts:
        for name, parameter in adapter.named_parameters() if adapter else ():
            if "lm_head" not in name:
                assert parameter.grad is not None
                found.append(parameter.grad)
            parameter.grad = None
    return found


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("recompute", [True] if INTERPRETED else [False, True])
def test_adapters_together_are_each_by_itself(
    mixture: list[tuple[Mapping[str, Any] | None, int]],
    recompute: bool,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With weights end to end, as GPUs have them, and biases."""
    model = a_model(kind)
    model.lay_weights_together()
    parts = [
        (None if options is None else an_adapter(model, seed, **options), count)
        for seed, (options, count) in enumerate(mixture)
    ]
    ours = pulled(model, AdapterRows(parts), recompute=recompute)
    monkeypatch.setattr(kernels, "serve", lambda _: False)
    theirs = pulled(model, AdapterRows(parts))
    assert len(ours) > 8
    # Without norms of queries and keys, their gradients are what is left of sums a thousand times as large.
    limit = 2e-5 if kind == "qwen3" else 5e-3
    for mine, exact in zip(ours, theirs, strict=True):
        assert apart(mine, exact) < limit


class NotingAttention(torch.autograd.Function):
    """Keeps what attention keeps, and attends to nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended = query.clone()
        ctx.save_for_backward(query, key, value, attended, query.new_empty(query.shape[:2], dtype=torch.float32))
        return attended

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        _, key, value, *_ = ctx.saved_tensors
        return grad, torch.zeros_like(key), torch.zeros_like(value)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3_text", "olmo2", "phi3"])
def test_layers_keep_the_memory_that_they_are_said_to_keep(kind: str) -> None:
    model = a_model(kind)
    rows, kept = 2 * ROWS, {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    adapters = AdapterRows([(an_adapter(model, 1), rows)])
    stacked = adapters.stacked(torch.zeros(1, device=DEVICE))
    assert stacked is not None
    tokens = torch.arange(rows, device=DEVICE)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = model.hidden(
            tokens, tokens, lambda _layer, query, key, value, _: NotingAttention.apply(query, key, value), adapters
        )
    for tensor in (*model.parameters(), stacked.stack.values):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    config = model.config
    said = PassMemory.of(config, bytes_each=4, rank=8).kept * config.num_layers * rows
    assert 0.95 * said <= sum(kept.values()) <= 1.1 * said
    assert hidden.requires_grad


def test_adapters_without_gradients_are_computed_alike() -> None:
    model = a_model("qwen3")
    parts = [(an_adapter(model, 1), 5), (None, 3), (an_adapter(model, 2), 4)]
    with_gradients = pulled(model, AdapterRows(parts))[0]
    tokens, positions = torch.arange(12, device=DEVICE) * 5, torch.cat([torch.arange(n) for n in (5, 3, 4)]).to(DEVICE)
    with torch.no_grad():
        alone = model.hidden(tokens, positions, PackedAttention((5, 3, 4)), AdapterRows(parts))
    assert torch.equal(alone, with_gradients)


def test_kept_stack_follows_its_adapters() -> None:
    model, stacks = a_model("qwen3"), FactorStacks()
    parts = [(an_adapter(model, 1), 5), (an_adapter(model, 2), 4)]
    first = pulled(model, AdapterRows(parts, stacks))
    stack = stacks.of([adapter for adapter, _ in parts], torch.float32)
    other = an_adapter(model, 3)
    parts[1][0].load(dict(other.named_parameters()))
    second = pulled(model, AdapterRows(parts, stacks))
    assert stacks.of([adapter for adapter, _ in parts], torch.float32) is stack
    assert apart(first[0], second[0]) > 1e-3
    expected = pulled(model, AdapterRows([parts[0], (other, 4)]))
    assert all(torch.equal(*each) for each in zip(second, expected, strict=True))

"""Logprobs a few rows at a time: the same numbers and gradients as all at once, and never all logits."""

from __future__ import annotations

import pytest
import torch
from packed_runs import Watch, filled_adapter
from torch import Tensor

from trainmaster.engine.adapters import Adapter, AdapterRows
from trainmaster.engine.architectures.family import LayerNorms
from trainmaster.engine.config import ModelConfig, Rope
from trainmaster.engine.logprobs import all_logits, target_logprobs, top_logprobs
from trainmaster.engine.model import Unembedding
from trainmaster.engine.types import LoraOptions

HIDDEN, VOCABULARY = 24, 301
CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_key_value_heads=1,
    head_dim=8,
    max_positions=64,
    norm_eps=1e-6,
    activation="silu",
    tied=False,
    windows=(None,),
    ropes=(Rope(theta=1e4),),
    attention_scale=1.0,
    norms=LayerNorms(),
)


def made(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def unembedding_of(softcap: float | None, dtype: torch.dtype = torch.float64) -> Unembedding:
    unembedding = Unembedding(CONFIG)
    unembedding.weight = torch.nn.Parameter(made(VOCABULARY, HIDDEN, seed=1, dtype=dtype))
    unembedding.logit_softcap = softcap
    return unembedding


def adapter_of(seed: int, rank: int, dtype: torch.dtype = torch.float64) -> Adapter:
    adapter = Adapter(CONFIG, LoraOptions(rank=rank, train_attn=False, train_mlp=False), dtype=dtype)
    with torch.no_grad():
        for index, parameter in enumerate(adapter.parameters()):
            parameter.copy_(made(*parameter.shape, seed=10 * seed + index, dtype=dtype))
    return adapter


def plain_logits(hidden: Tensor, unembedding: Unembedding, parts: list[tuple[Adapter | None, int]]) -> Tensor:
    """By the formula, all at once, left to autograd."""
    logits, start = [], 0
    for adapter, rows in parts:
        own = hidden[start : start + rows]
        each = own @ unembedding.weight.T
        if adapter is not None:
            factors = adapter.factors["lm_head"]
            each = each + adapter.scale * (own @ factors.a.T) @ factors.b.T
        logits.append(each)
        start += rows
    joined = torch.cat(logits)
    cap = unembedding.logit_softcap
    return joined if cap is None else cap * torch.tanh(joined / cap)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("columns", [None, 1, 3])
@pytest.mark.parametrize("chunk", [1, 7, 16, 1000])
def test_logprobs_and_gradients_are_those_of_autograd(softcap: float | None, columns: int | None, chunk: int) -> None:
    unembedding = unembedding_of(softcap)
    parts: list[tuple[Adapter | None, int]] = [(adapter_of(1, 2), 13), (None, 9), (adapter_of(2, 5), 20), (None, 1)]
    rows = sum(count for _, count in parts)
    hidden = made(rows, HIDDEN, seed=3).requires_grad_()
    shape = (rows,) if columns is None else (rows, columns)
    targets = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(4))
    if columns:
        targets[0] = 5  # the same token more than once in a row
    upstream = made(*shape, seed=5)
    leaves = [hidden, unembedding.weight, *(each for adapter, _ in parts if adapter for each in adapter.parameters())]

    logprobs = target_logprobs(hidden, targets, unembedding, AdapterRows(parts), chunk)
    found = torch.autograd.grad(logprobs, leaves, upstream)
    everything = plain_logits(hidden, unembedding, parts).log_softmax(-1)
    expected = everything.gather(1, targets.view(rows, -1)).view(shape)
    assert logprobs.shape == shape
    torch.testing.assert_close(logprobs, expected, atol=1e-12, rtol=1e-12)
    for own, theirs in zip(found, torch.autograd.grad(expected, leaves, upstream), strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-10, rtol=1e-10)


def test_gradients_pass_the_check_by_differences() -> None:
    unembedding, adapter = unembedding_of(3.0), adapter_of(1, 2)
    targets = torch.tensor([[1, 2], [2, 2], [300, 0]])
    factors = adapter.factors["lm_head"]

    def compute(hidden: Tensor, _a: Tensor, _b: Tensor) -> Tensor:
        return target_logprobs(hidden, targets, unembedding, AdapterRows([(adapter, 3)]), 2)

    hidden = made(3, HIDDEN, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(compute, (hidden, factors.a, factors.b))


def test_all_logits_are_never_held() -> None:
    unembedding = unembedding_of(None, torch.float32)
    adapters = AdapterRows([(adapter_of(1, 2, torch.float32), 500), (adapter_of(2, 4, torch.float32), 524)])
    hidden = made(1024, HIDDEN, seed=3, dtype=torch.float32).requires_grad_()
    targets = torch.arange(1024) % VOCABULARY
    with Watch() as watch:
        target_logprobs(hidden, targets, unembedding, adapters, 64).sum().backward()
        top_logprobs(hidden, 5, unembedding, adapters, 64)
    assert hidden.grad is not None
    # A group ends with a whole span, and is filled up to a multiple of 16 rows.
    assert watch.largest <= 2 * 64 * VOCABULARY
    # The watch sees what it should: without chunks, all of them are made.
    with Watch() as watch:
        target_logprobs(hidden, targets, unembedding, adapters)
    assert watch.largest == 1024 * VOCABULARY


def test_nothing_is_kept_for_the_gradients_but_the_rows() -> None:
    unembedding = unembedding_of(None, torch.float32)
    hidden = made(1024, HIDDEN, seed=3, dtype=torch.float32).requires_grad_()
    kept = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        target_logprobs(hidden, torch.arange(1024) % VOCABULARY, unembedding)
    assert max(kept) == max(hidden.numel(), unembedding.weight.numel())


def test_sums_are_in_float32_for_16_bits() -> None:
    unembedding = unembedding_of(None, torch.bfloat16)
    unembedding.weight.requires_grad_(False)
    hidden = made(64, HIDDEN, seed=3, dtype=torch.float32).bfloat16().requires_grad_()
    targets = torch.arange(64)
    logprobs = target_logprobs(hidden, targets, unembedding, AdapterRows([(adapter_of(1, 2, torch.float32), 64)]), 16)
    assert logprobs.dtype == torch.float32
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16
    base = target_logprobs(hidden, targets, unembedding)
    exact = (hidden.double() @ unembedding.weight.double().T).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    # Logits are rounded to 16 bits on the CPU; a sum over the vocabulary in them would be off by far more.
    assert (base - exact).abs().max() < 0.1


def test_top_logprobs_are_the_likeliest() -> None:
    unembedding = unembedding_of(5.0)
    parts: list[tuple[Adapter | None, int]] = [(adapter_of(1, 2), 13), (None, 9)]
    hidden = made(22, HIDDEN, seed=3)
    tokens, logprobs = top_logprobs(hidden, 4, unembedding, AdapterRows(parts), 8)
    expected = plain_logits(hidden, unembedding, parts).log_softmax(-1).topk(4, dim=1)
    assert torch.equal(tokens, expected.indices)
    torch.testing.assert_close(logprobs, expected.values)
    logits = all_logits(hidden, unembedding, AdapterRows(parts))
    torch.testing.assert_close(logits, plain_logits(hidden, unembedding, parts))


def test_rows_that_do_not_add_up_are_refused() -> None:
    adapters = AdapterRows([(filled_adapter(CONFIG), 3)])
    with pytest.raises(ValueError, match="3 rows cannot adapt 2"):
        target_logprobs(torch.zeros(2, HIDDEN), torch.tensor([0, 1]), unembedding_of(None, torch.float32), adapters)

"""Attention of packed sequences a few lengths at a time: whose rows are computed with whose, and cuDNN's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trainmaster.engine.attention import PackedAttention, Scoring
from trainmaster.engine.dense_attention import Run, dense_attention, is_faster, runs_of

PACKS = [[64, 64, 64], [70, 3, 64, 64, 128, 1], [128, 10], [5], [300, 200]]


def drawn(*shape: int, seed: int, **options: Any) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.to(**options)


def exact(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float) -> Tensor:
    """Each sequence by itself, in float64."""
    parts = zip(*(each.double().split(lengths) for each in (query, key, value)), strict=True)
    attended = []
    for part in parts:
        own = (each.transpose(0, 1)[None] for each in part)
        made = functional.scaled_dot_product_attention(*own, is_causal=True, scale=scale, enable_gqa=True)
        attended.append(made[0].transpose(0, 1))
    return torch.cat(attended)


def test_sequences_of_one_computed_length_are_one_run() -> None:
    assert runs_of([2048, 2048, 2000, 2000, 70]) == [
        Run(0, 2, 2048, 2048),
        Run(4096, 1, 2000, 2048),
        Run(6096, 1, 2000, 2048),
        Run(8096, 1, 70, 128),
    ]


def test_few_lengths_are_computed() -> None:
    padded = {run.padded for length in range(1, 8193) for run in runs_of([length])}
    assert len(padded) == 16 + 3 * 8
    assert all(run.padded * 0.88 < length for length in range(1024, 8193) for run in runs_of([length]))


@pytest.mark.parametrize("lengths", PACKS)
def test_rows_that_follow_a_sequence_change_nothing(lengths: list[int]) -> None:
    query, key, value = (drawn(sum(lengths), heads, 8, seed=heads) for heads in (4, 2, 2))
    grad = drawn(sum(lengths), 4, 8, seed=7)
    needed = [each.clone().requires_grad_() for each in (query, key, value)]
    attend: Callable[..., Any] = exact
    expected = attend(*needed, lengths, 0.3)
    expected.backward(grad)
    found: list[Tensor] = []
    grads: list[list[Tensor]] = []
    for run in runs_of(lengths):
        seen = [run.seen(each).clone().requires_grad_() for each in (query, key, value)]
        attended = functional.scaled_dot_product_attention(*seen, is_causal=True, scale=0.3, enable_gqa=True)
        attended.backward(run.alone(grad))  # type: ignore[no-untyped-call]
        found.append(run.of(attended))
        grads.append([run.of(each.grad) for each in seen if each.grad is not None])
    torch.testing.assert_close(torch.cat(found), expected)
    for ours, theirs in zip(zip(*grads, strict=True), needed, strict=True):
        torch.testing.assert_close(torch.cat(ours), theirs.grad)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuDNN needs a GPU")
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("lengths", [[1024] * 4, [1500, 1024, 1024, 2000], [3000, 700, 2500], [2000, 1030]])
def test_cudnn_gives_what_each_sequence_gives_alone(lengths: list[int], width: int) -> None:
    rows = sum(lengths)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    joint = drawn(rows, 12 * width, seed=2, **options)
    query = drawn(rows, 8, width, seed=1, **options)
    # Keys and values as columns of one product.
    key, value, _ = (part.view(rows, 4, width) for part in torch.split_with_sizes(joint, [4 * width] * 3, dim=1))
    grad = drawn(rows, 8, width, seed=3, **options)
    assert is_faster(query, lengths, None)
    results: list[list[Any]] = []
    computed: list[Callable[..., Any]] = [dense_attention, exact]
    for attend in computed:
        needed = [each.detach().requires_grad_() for each in (query, key, value)]
        attended = attend(*needed, lengths, width**-0.5)
        attended.backward(grad.to(attended.dtype))
        results.append([attended.detach(), *(each.grad for each in needed)])
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape
        assert float((ours.double() - theirs.double()).norm() / theirs.double().norm()) < 8e-3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuDNN needs a GPU")
def test_cudnn_serves_what_it_can() -> None:
    query = drawn(4096, 8, 64, seed=1, device="cuda", dtype=torch.bfloat16)
    assert is_faster(query, [2048, 2048], 2048)
    assert not is_faster(query, [2048, 2048], 2047)
    assert not is_faster(query, [100] * 40 + [96], None)
    torch.use_deterministic_algorithms(True)  # type: ignore[no-untyped-call]
    try:
        assert not is_faster(query, [2048, 2048], None)
    finally:
        torch.use_deterministic_algorithms(False)  # type: ignore[no-untyped-call]
    wide = drawn(4096, 2, 256, seed=1, device="cuda", dtype=torch.bfloat16)
    attended = PackedAttention([2048, 2048])(0, wide, wide, wide, Scoring(scale=0.1, window=None, softcap=None))
    assert not is_faster(wide, [2048, 2048], None)
    assert attended.isfinite().all()

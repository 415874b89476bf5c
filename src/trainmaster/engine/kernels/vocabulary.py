"""Rows of logits, each read once: what its target tokens' logprobs are, and what gradients of these pull back.

Logits are float32 [n, vocabulary] and as the model means them, after its softcap. Targets are int64 [n, k].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@dataclass(frozen=True, slots=True, eq=False)
class RowTotals:
    totals: Tensor
    """The log of the sum of a row's exponentials: float32 [n]."""
    logprobs: Tensor
    """Of the targets: float32 [n, k]."""


@dataclass(frozen=True, slots=True, eq=False)
class RowMeasures(RowTotals):
    entropies: Tensor
    """float32 [n]."""
    likeliest: Tensor
    """The token with the largest logit: int64 [n]."""


def row_totals(logits: Tensor, targets: Tensor) -> RowTotals:
    return _read(logits, targets, measured=False)


def row_measures(logits: Tensor, targets: Tensor) -> RowMeasures:
    return _read(logits, targets, measured=True)


def pull_logits(
    logits: Tensor, totals: Tensor, targets: Tensor, grads: Tensor, out: Tensor, softcap: float | None = None
) -> Tensor:
    """The gradient of the logits before the softcap, by that of the targets' logprobs, float32 [n, k], into `out`."""
    (count, width), each = logits.shape, targets.shape[1]
    assert logits.stride(1) == out.stride(1) == 1
    if count:
        _pull_row[(count, triton.cdiv(width, _BLOCK))](
            logits,
            totals,
            targets.contiguous(),
            grads.contiguous(),
            out,
            logits.stride(0),
            out.stride(0),
            width,
            each,
            softcap or 1.0,
            SOFTCAP=bool(softcap),
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return out


def _read(logits: Tensor, targets: Tensor, *, measured: bool) -> RowMeasures:
    (count, width), each = logits.shape, targets.shape[1]
    assert logits.stride(1) == 1
    totals = torch.empty(count, dtype=torch.float32, device=logits.device)
    logprobs = torch.empty((count, each), dtype=torch.float32, device=logits.device)
    entropies = torch.empty_like(totals) if measured else totals
    likeliest = torch.empty(count if measured else 0, dtype=torch.int64, device=logits.device)
    if count:
        _read_row[(count,)](
            logits,
            targets.contiguous(),
            totals,
            logprobs,
            entropies,
            likeliest if measured else targets,
            logits.stride(0),
            width,
            each,
            MEASURE=measured,
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return RowMeasures(totals, logprobs, entropies, likeliest)


@triton.jit
def _read_row(
    logits,
    targets,
    totals,
    logprobs,
    entropies,
    likeliest,
    stride,
    width,
    each,
    MEASURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    # Of each lane: the largest logit so far, and sums relative to it.
    most = tl.full((BLOCK,), -1e38, dtype=tl.float32)
    place = tl.zeros((BLOCK,), dtype=tl.int32)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    weighted = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column = start + lane
        inside = column < width
        own = tl.load(logits + row * stride + column, mask=inside, other=-float("inf"))
        higher = tl.maximum(most, own)
        share = tl.exp(own - higher)
        shrunk = tl.exp(most - higher)
        sums = sums * shrunk + share
        if MEASURE:
            weighted = weighted * shrunk + tl.where(share > 0.0, share * own, 0.0)
            place = tl.where(own > most, column, place)
        most = higher
    top = tl.max(most, axis=0)
    shrunk = tl.exp(most - top)
    whole = tl.sum(sums * shrunk, axis=0)
    total = top + tl.log(whole)
    tl.store(totals + row, total)
    if MEASURE:
        tl.store(entropies + row, total - tl.sum(weighted * shrunk, axis=0) / whole)
        first = tl.min(tl.where(most == top, place, width), axis=0)
        tl.store(likeliest + row, first.to(tl.int64))
    for index in range(each):
        target = tl.load(targets + row * each + index)
        logit = tl.load(logits + row * stride + target)
        tl.store(logprobs + row * each + index, logit - total)


@triton.jit
def _pull_row(
    logits,
    totals,
    targets,
    grads,
    out,
    stride,
    out_stride,
    width,
    each,
    softcap,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    own = tl.load(logits + row * stride + column, mask=inside, other=0.0)
    share = tl.exp(own - tl.load(totals + row))
    pulled = tl.zeros((BLOCK,), dtype=tl.float32)
    for index in range(each):
        target = tl.load(targets + row * each + index)
        grad = tl.load(grads + row * each + index)
        pulled += tl.where(column == target, grad, 0.0) - grad * share
    if SOFTCAP:
        scaled = own / softcap
        pulled *= 1.0 - scaled * scaled
    tl.store(out + row * out_stride + column, pulled.to(out.dtype.element_ty), mask=inside)

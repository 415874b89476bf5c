"""The choice of the next tokens on the GPU: temperature, top-k and top-p, by one draw per row, with logprobs.

A row of logits is read in pieces by many programs. Kept are all tokens from a threshold on: where top-k or top-p say
so, it is found four bits at a time, by measuring fifteen thresholds at once. Equal logits are kept or left together.
Tokens lie in the order of the vocabulary; so a draw may choose another token than on the CPU, of the same distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_PIECE = 2048
_SHIFTS = range(28, -1, -4)
_LOWEST = -(2**31)
_LOWEST_LOGIT = tl.constexpr(-3e38)


@dataclass(frozen=True, slots=True, eq=False)
class RowRules:
    """How each row's token is chosen."""

    temperatures: Tensor
    """float32 [rows]; 0: the likeliest token."""
    top_ks: Tensor
    """int32 [rows]; 0: all."""
    top_ps: Tensor
    """float32 [rows]; 1: all."""
    draws: Tensor
    """float32 [rows], in [0, 1)."""


def choose_tokens(logits: Tensor, rules: RowRules, *, filtered: bool, tempered: bool) -> tuple[Tensor, Tensor]:
    """Tokens int64 [rows] and their logprobs, by float32 logits [rows, vocabulary].

    Without `filtered`, top_ks and top_ps are not looked at. With `tempered`, logprobs are those of the distribution
    that tokens were drawn from.
    """
    rows, size = logits.shape
    pieces = triton.cdiv(size, _PIECE)
    width = triton.next_power_of_2(pieces)
    grid = (rows, pieces)
    partial = logits.new_empty((rows, 4, width))
    least = torch.full((2, rows), _LOWEST, dtype=torch.int64, device=logits.device)
    _measure[grid](logits, rules.temperatures, least, partial, size, rows, WIDTH=width, PIECE=_PIECE)
    if filtered:
        measured = logits.new_empty((rows, 16, width))
        wanted = logits.new_empty(rows)
        for phase, limits in enumerate((rules.top_ks, rules.top_ps)):
            for shift in _SHIFTS:
                _measure_thresholds[grid](
                    logits, rules.temperatures, limits, partial, least, measured, size, rows, pieces, shift,
                    BY_MASS=bool(phase), WIDTH=width, PIECE=_PIECE,
                )  # fmt: skip
                _raise_threshold[(rows,)](
                    limits, least, measured, wanted, size, rows, pieces, shift,
                    BY_MASS=bool(phase), FIRST=shift == _SHIFTS[0], WIDTH=width,
                )  # fmt: skip
        _measure[grid](logits, rules.temperatures, least, partial, size, rows, WIDTH=width, PIECE=_PIECE)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = logits.new_empty(rows)
    _choose[(rows,)](
        logits, rules.temperatures, rules.draws, least, partial, tokens, logprobs, size, rows, pieces,
        TEMPERED=tempered, WIDTH=width, PIECE=_PIECE,
    )  # fmt: skip
    return tokens, logprobs


@triton.jit
def _inverse(temperature):
    """0 for a greedy row, whose weights nobody uses."""
    return tl.where(temperature > 0, 1.0 / tl.maximum(temperature, 1e-30), 0.0)


@triton.jit
def _ordered(logits):
    """Integers in the order of the numbers."""
    bits = logits.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _kept(logits, least, row, rows):
    threshold = tl.maximum(tl.load(least + row), tl.load(least + rows + row))
    return _ordered(logits) >= threshold


@triton.jit
def _measure(logits, temperatures, least, partial, size, rows, WIDTH: tl.constexpr, PIECE: tl.constexpr):
    """Of a piece: its greatest logit, where it is, and the sums of all weights and of the kept, tempered ones."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = piece * PIECE + tl.arange(0, PIECE)
    inside = places < size
    own = tl.load(logits + row * size + places, mask=inside, other=-float("inf"))
    top, place = tl.max(own, return_indices=True, axis=0)
    # Of a piece without any finite logit, all weights are 0.
    behind = own - tl.maximum(top, _LOWEST_LOGIT)
    weights = tl.where(inside, tl.exp(behind), 0.0)
    tempered = tl.exp(behind * _inverse(tl.load(temperatures + row)))
    kept = tl.where(inside & _kept(own, least, row, rows), tempered, 0.0)
    into = partial + row * 4 * WIDTH + piece
    tl.store(into, top)
    tl.store(into + WIDTH, place.to(tl.float32))
    tl.store(into + 2 * WIDTH, tl.sum(weights, axis=0))
    tl.store(into + 3 * WIDTH, tl.sum(kept, axis=0))


@triton.jit
def _measure_thresholds(
    logits, temperatures, limits, partial, least, measured, size, rows, pieces, shift,
    BY_MASS: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """How many tokens of a piece, or how much mass, lie at fifteen thresholds or above; at 0: what top-k keeps."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    limit = tl.load(limits + row)
    if BY_MASS:
        limited = limit < 1
    else:
        limited = (limit > 0) & (limit < size)
    if limited:
        places = piece * PIECE + tl.arange(0, PIECE)
        inside = places < size
        own = tl.load(logits + row * size + places, mask=inside, other=-float("inf"))
        if BY_MASS:
            tops = tl.arange(0, WIDTH)
            top = tl.max(tl.load(partial + row * 4 * WIDTH + tops, mask=tops < pieces, other=-float("inf")), axis=0)
            each = tl.exp((own - top) * _inverse(tl.load(temperatures + row)))
            base = tl.load(least + rows + row)
        else:
            each = tl.full((PIECE,), 1.0, dtype=tl.float32)
            base = tl.load(least + row)
        each = tl.where(inside, each, 0.0)
        order = _ordered(own)
        into = measured + row * 16 * WIDTH + piece
        tl.store(into, tl.sum(tl.where(order >= tl.load(least + row), each, 0.0), axis=0))
        for step in range(1, 16):
            threshold = base + (tl.full((), step, dtype=tl.int64) << shift)
            tl.store(into + step * WIDTH, tl.sum(tl.where(order >= threshold, each, 0.0), axis=0))


@triton.jit
def _raise_threshold(
    limits, least, measured, wanted, size, rows, pieces, shift,
    BY_MASS: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Raise a row's threshold to the highest of the fifteen that leaves enough."""
    row = tl.program_id(0).to(tl.int64)
    limit = tl.load(limits + row)
    if BY_MASS:
        limited = limit < 1
        threshold = least + rows + row
    else:
        limited = (limit > 0) & (limit < size)
        threshold = least + row
    if limited:
        steps, places = tl.arange(0, 16), tl.arange(0, WIDTH)
        found = tl.load(
            measured + row * 16 * WIDTH + steps[:, None] * WIDTH + places[None, :],
            mask=(places < pieces)[None, :] & (steps >= 0)[:, None],
            other=0.0,
        )
        totals = tl.sum(found, axis=1)
        if BY_MASS:
            if FIRST:
                target = limit * tl.sum(tl.where(steps == 0, totals, 0.0), axis=0)
                tl.store(wanted + row, target)
            else:
                target = tl.load(wanted + row)
        else:
            target = limit.to(tl.float32)
        raised = tl.sum(((totals >= target) & (steps > 0)).to(tl.int64), axis=0)
        tl.store(threshold, tl.load(threshold) + (raised << shift))


@triton.jit
def _choose(
    logits, temperatures, draws, least, partial, tokens, logprobs, size, rows, pieces,
    TEMPERED: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    inverse = _inverse(tl.load(temperatures + row))
    numbers = tl.arange(0, WIDTH)
    of_piece = partial + row * 4 * WIDTH + numbers
    tops = tl.load(of_piece, mask=numbers < pieces, other=-float("inf"))
    top, best = tl.max(tops, return_indices=True, axis=0)
    best = tl.minimum(best, pieces - 1)
    weights = tl.load(of_piece + 2 * WIDTH, mask=numbers < pieces, other=0.0) * tl.exp(tops - top)
    kept = tl.load(of_piece + 3 * WIDTH, mask=numbers < pieces, other=0.0) * tl.exp((tops - top) * inverse)
    total = tl.sum(kept, axis=0)
    if inverse == 0:
        place = tl.load(partial + row * 4 * WIDTH + WIDTH + best).to(tl.int32)
        token = best * PIECE + place
    else:
        drawn = tl.load(draws + row) * total
        sums = tl.cumsum(kept, axis=0)
        last = tl.max(tl.where(kept > 0, numbers, 0), axis=0)
        piece = tl.minimum(tl.sum((sums <= drawn).to(tl.int32), axis=0), last)
        # Not below 0, where another order of sums is rounded otherwise: that would be a token which is not kept.
        drawn = tl.maximum(drawn - tl.sum(tl.where(numbers < piece, kept, 0.0), axis=0), 0.0)
        places = tl.arange(0, PIECE)
        inside = piece * PIECE + places < size
        own = tl.load(logits + row * size + piece * PIECE + places, mask=inside, other=-float("inf"))
        each = tl.where(inside & _kept(own, least, row, rows), tl.exp((own - top) * inverse), 0.0)
        last_place = tl.max(tl.where(each > 0, places, 0), axis=0)
        place = tl.minimum(tl.sum((tl.cumsum(each, axis=0) <= drawn).to(tl.int32), axis=0), last_place)
        token = piece * PIECE + place
    token = tl.minimum(token, size - 1)
    chosen = tl.load(logits + row * size + token)
    if TEMPERED:
        if inverse == 0:
            logprob = chosen - chosen
        else:
            logprob = (chosen - top) * inverse - tl.log(total)
    else:
        logprob = chosen - top - tl.log(tl.sum(weights, axis=0))
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, logprob)

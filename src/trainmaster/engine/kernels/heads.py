"""Query and key heads on their way to attention: norm and rotation in one kernel for both."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 8
"""Heads of a row that one program computes."""
_PROGRAMS = 256
"""How many programs share the rows, for each block of heads, when they sum a part of the weights' gradients."""


class HeadNorms(NamedTuple):
    """Norms of each head before it is rotated."""

    query: Tensor
    key: Tensor
    eps: float
    offset: float = 0.0


def turned(
    query: Tensor,
    key: Tensor,
    cosines: Tensor,
    sines: Tensor,
    norms: HeadNorms | None = None,
    *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Heads [n, heads, width], normed and rotated by their rows' angles [n, 1, pairs].

    Pairs are elements half of the rotated width apart, or neighbours if `interleaved`; what is beyond them stays.
    """
    given, normed = norms or HeadNorms(query, key, 0.0), norms is not None
    if torch.is_grad_enabled():
        return _Turned.apply(query, key, cosines, sines, *given, normed, interleaved)  # type: ignore[no-any-return]
    return _forward(query, key, cosines, sines, given, normed=normed, interleaved=interleaved)


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        cosines: Tensor,
        sines: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        eps: float,
        offset: float,
        normed: bool,
        interleaved: bool,
    ) -> tuple[Tensor, Tensor]:
        if normed:
            ctx.save_for_backward(cosines, sines, query, key, query_weight, key_weight)
        else:
            ctx.save_for_backward(cosines, sines)
        ctx.norm, ctx.interleaved = (eps, offset), interleaved
        norms = HeadNorms(query_weight, key_weight, eps, offset)
        return _forward(query, key, cosines, sines, norms, normed=normed, interleaved=interleaved)

    @staticmethod
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor) -> tuple[Any, ...]:
        cosines, sines, *kept = ctx.saved_tensors
        nothing = (None,) * 4
        if not kept:
            made = _backward(
                grad_query,
                grad_key,
                cosines,
                sines,
                None,
                None,
                interleaved=ctx.interleaved,
                wants_weights=False,
            )
            return made[0], made[1], None, None, None, None, *nothing
        query, key, *weights = kept
        made = _backward(
            grad_query,
            grad_key,
            cosines,
            sines,
            (query, key),
            HeadNorms(*weights, *ctx.norm),
            interleaved=ctx.interleaved,
            wants_weights=ctx.needs_input_grad[4] or ctx.needs_input_grad[5],
        )
        return made[0], made[1], None, None, made[2], made[3], *nothing


def _forward(
    query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor, norms: HeadNorms, *, normed: bool, interleaved: bool
) -> tuple[Tensor, Tensor]:
    query, key, cosines, sines = _laid(query), _laid(key), cosines.contiguous(), sines.contiguous()
    (count, heads, width), key_heads = query.shape, key.shape[1]
    turned_query = torch.empty((count, heads, width), dtype=query.dtype, device=query.device)
    turned_key = torch.empty((count, key_heads, width), dtype=key.dtype, device=key.device)
    if count:
        _turn_forward[(count, triton.cdiv(heads, _HEADS) + triton.cdiv(key_heads, _HEADS))](
            query,
            key,
            norms.query,
            norms.key,
            cosines,
            sines,
            turned_query,
            turned_key,
            query.stride(0),
            key.stride(0),
            heads,
            key_heads,
            norms.eps,
            norms.offset,
            NORM=normed,
            **_sizes(width, cosines.shape[-1], interleaved=interleaved),
        )
    return turned_query, turned_key


def _backward(
    grad_query: Tensor,
    grad_key: Tensor,
    cosines: Tensor,
    sines: Tensor,
    before: tuple[Tensor, Tensor] | None,
    norms: HeadNorms | None,
    *,
    interleaved: bool,
    wants_weights: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of queries, keys and the weights of their norms; `before`: both as they were given."""
    grad_query, grad_key, cosines, sines = _laid(grad_query), _laid(grad_key), cosines.contiguous(), sines.contiguous()
    query, key = (_laid(each) for each in before or (grad_query, grad_key))
    given = norms or HeadNorms(query, key, 0.0)
    (count, heads, width), key_heads = grad_query.shape, grad_key.shape[1]
    onto_query = torch.empty((count, heads, width), dtype=grad_query.dtype, device=grad_query.device)
    onto_key = torch.empty((count, key_heads, width), dtype=grad_key.dtype, device=grad_key.device)
    query_blocks, key_blocks = triton.cdiv(heads, _HEADS), triton.cdiv(key_heads, _HEADS)
    programs = min(count, _PROGRAMS) if wants_weights else count
    parts = grad_query
    if wants_weights:
        shape = (query_blocks + key_blocks, programs, width)
        parts = torch.empty(shape, dtype=torch.float32, device=grad_query.device)
    if count:
        _turn_backward[(programs, query_blocks + key_blocks)](
            grad_query,
            grad_key,
            query,
            key,
            given.query,
            given.key,
            cosines,
            sines,
            onto_query,
            onto_key,
            parts,
            grad_query.stride(0),
            grad_key.stride(0),
            query.stride(0),
            key.stride(0),
            count,
            heads,
            key_heads,
            given.eps,
            given.offset,
            NORM=norms is not None,
            WEIGHTS=wants_weights,
            **_sizes(width, cosines.shape[-1], interleaved=interleaved),
        )
    if not wants_weights:
        return onto_query, onto_key, None, None
    of_query, of_key = parts[:query_blocks].sum((0, 1)), parts[query_blocks:].sum((0, 1))
    return onto_query, onto_key, of_query.to(given.query.dtype), of_key.to(given.key.dtype)


def _laid(heads: Tensor) -> Tensor:
    """Heads that lie end to end in each row, as the kernels read them; rows may lie apart."""
    return heads if heads.stride(2) == 1 and heads.stride(1) == heads.shape[2] else heads.contiguous()


def _sizes(width: int, half: int, *, interleaved: bool) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"WIDTH": width, "HALF": half, "NEIGHBOURS": interleaved, "HEADS": _HEADS, "BLOCK": block}


# An element at `column` is rotated with its partner: out = own * cosine + sign * partner * sine, where the sign is
# negative for the first of the two. Backward, it is the other one.


@triton.jit
def _pairs(column, NEIGHBOURS: tl.constexpr, HALF: tl.constexpr):
    """Of each column: the partner's column, the sign, and the index of the pair."""
    if NEIGHBOURS:
        pair = column // 2
        is_first = column % 2 == 0
        partner = tl.where(is_first, column + 1, column - 1)
    else:
        is_first = column < HALF
        pair = tl.where(is_first, column, column - HALF)
        partner = tl.where(is_first, column + HALF, column - HALF)
    return tl.where(column < 2 * HALF, partner, column), tl.where(is_first, -1.0, 1.0), pair


@triton.jit
def _turn_heads(
    given,
    weight,
    cosines,
    sines,
    result,
    row,
    stride,
    first_head,
    heads,
    eps,
    offset,
    NORM: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = first_head + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)
    rotated = column < 2 * HALF
    partner, sign, pair = _pairs(column, NEIGHBOURS, HALF)
    inside = (head < heads)[:, None] & (column < WIDTH)[None, :]
    source = given + row * stride
    own = tl.load(source + head[:, None] * WIDTH + column[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(source + head[:, None] * WIDTH + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(own * own, axis=1) / WIDTH + eps)
        own_weight = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32) + offset
        other_weight = tl.load(weight + partner, mask=column < WIDTH, other=0.0).to(tl.float32) + offset
        own = own * scale[:, None] * own_weight[None, :]
        other = other * scale[:, None] * other_weight[None, :]
    cosine = tl.load(cosines + row * HALF + pair, mask=rotated, other=1.0).to(tl.float32)
    sine = tl.load(sines + row * HALF + pair, mask=rotated, other=0.0).to(tl.float32) * sign
    turned = own * cosine[None, :] + other * sine[None, :]
    target = result + row * heads * WIDTH + head[:, None] * WIDTH + column[None, :]
    tl.store(target, turned.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _turn_forward(
    query,
    key,
    query_weight,
    key_weight,
    cosines,
    sines,
    turned_query,
    turned_key,
    query_stride,
    key_stride,
    heads,
    key_heads,
    eps,
    offset,
    NORM: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    query_blocks = tl.cdiv(heads, HEADS)
    if block < query_blocks:
        first = block * HEADS
        _turn_heads(
            query, query_weight, cosines, sines, turned_query, row, query_stride, first, heads, eps, offset,
            NORM, WIDTH, HALF, NEIGHBOURS, HEADS, BLOCK,
        )  # fmt: skip
    else:
        first = (block - query_blocks) * HEADS
        _turn_heads(
            key, key_weight, cosines, sines, turned_key, row, key_stride, first, key_heads, eps, offset,
            NORM, WIDTH, HALF, NEIGHBOURS, HEADS, BLOCK,
        )  # fmt: skip


@triton.jit
def _turn_heads_back(
    grad,
    given,
    weight,
    cosines,
    sines,
    onto,
    part,
    first_row,
    grad_stride,
    given_stride,
    count,
    first_head,
    heads,
    eps,
    offset,
    NORM: tl.constexpr,
    WEIGHTS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = first_head + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)
    rotated = column < 2 * HALF
    partner, sign, pair = _pairs(column, NEIGHBOURS, HALF)
    inside = (head < heads)[:, None] & (column < WIDTH)[None, :]
    places = head[:, None] * WIDTH + column[None, :]
    summed = tl.zeros((BLOCK,), dtype=tl.float32)
    row = first_row
    while row < count:
        pulled = grad + row * grad_stride
        own = tl.load(pulled + places, mask=inside, other=0.0).to(tl.float32)
        other = tl.load(pulled + head[:, None] * WIDTH + partner[None, :], mask=inside, other=0.0).to(tl.float32)
        cosine = tl.load(cosines + row * HALF + pair, mask=rotated, other=1.0).to(tl.float32)
        sine = tl.load(sines + row * HALF + pair, mask=rotated, other=0.0).to(tl.float32) * -sign
        back = own * cosine[None, :] + other * sine[None, :]
        if NORM:
            unit = tl.load(given + row * given_stride + places, mask=inside, other=0.0).to(tl.float32)
            scale = (1.0 / tl.sqrt(tl.sum(unit * unit, axis=1) / WIDTH + eps))[:, None]
            unit = unit * scale
            if WEIGHTS:
                summed += tl.sum(back * unit, axis=0)
            factors = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32) + offset
            back = back * factors[None, :]
            back = scale * (back - unit * (tl.sum(back * unit, axis=1) / WIDTH)[:, None])
        tl.store(onto + row * heads * WIDTH + places, back.to(onto.dtype.element_ty), mask=inside)
        row += tl.num_programs(0)
    if WEIGHTS:
        tl.store(part + column, summed, mask=column < WIDTH)


@triton.jit
def _turn_backward(
    grad_query,
    grad_key,
    query,
    key,
    query_weight,
    key_weight,
    cosines,
    sines,
    onto_query,
    onto_key,
    parts,
    grad_query_stride,
    grad_key_stride,
    query_stride,
    key_stride,
    count,
    heads,
    key_heads,
    eps,
    offset,
    NORM: tl.constexpr,
    WEIGHTS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    query_blocks = tl.cdiv(heads, HEADS)
    part = parts + (block * tl.num_programs(0) + program) * WIDTH
    if block < query_blocks:
        first = block * HEADS
        _turn_heads_back(
            grad_query, query, query_weight, cosines, sines, onto_query, part, program, grad_query_stride,
            query_stride, count, first, heads, eps, offset, NORM, WEIGHTS, WIDTH, HALF, NEIGHBOURS, HEADS, BLOCK,
        )  # fmt: skip
    else:
        first = (block - query_blocks) * HEADS
        _turn_heads_back(
            grad_key, key, key_weight, cosines, sines, onto_key, part, program, grad_key_stride,
            key_stride, count, first, key_heads, eps, offset, NORM, WEIGHTS, WIDTH, HALF, NEIGHBOURS, HEADS, BLOCK,
        )  # fmt: skip

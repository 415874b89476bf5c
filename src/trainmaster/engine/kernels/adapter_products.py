"""The adapters' part of a layer's outputs, for many adapters at once: rows find their own by its place in a stack.

`lower` multiplies rows by the first factors; a few rows share their inputs among several programs, whose sums `raise`
adds up before it multiplies by the second factors. Programs pass over the adapters that none of their rows has: so
rows of one adapter should lie together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_FEW = 64
"""So many rows leave the card idle unless they share their inputs."""
_PROGRAMS = 256


def lower_rows(rows: Tensor, stack: Tensor, places: Tensor, rank: int) -> Tensor:
    """Rows [n, in] times each one's own factor in a stack [places, outputs, in]: float32 [parts, n, outputs].

    `places`, int32 [n]: where each row's adapter is in the stack; -1: it has none. The sum over parts is the result.
    `outputs` is a multiple of `rank`.
    """
    count, inputs = rows.shape
    outputs = stack.shape[1]
    tall = 16 if count <= _FEW else 64
    columns = min(64, rank)
    grid = triton.cdiv(count, tall), outputs // columns
    deep = 128 if rows.element_size() == 2 else 32
    parts = 1
    while count <= _FEW and grid[0] * grid[1] * parts < _PROGRAMS and inputs // (parts * 2) >= 2 * deep:
        parts *= 2
    lowered = rows.new_empty((parts, count, outputs), dtype=torch.float32)
    _lower[(*grid, parts)](
        rows, stack, places, lowered, count, inputs, rows.stride(0), len(stack),
        OUTPUTS=outputs, TALL=tall, COLUMNS=columns, DEEP=deep, EACH=triton.cdiv(triton.cdiv(inputs, parts), deep),
        num_warps=4, num_stages=3 if tall == 16 else 2,
    )  # fmt: skip
    return lowered


def raise_rows(outputs: Tensor, lowered: Tensor, first: int, stack: Tensor, places: Tensor) -> None:
    """Add to outputs [n, out] the lowered rows, from column `first` on, times factors [places, out, rank]."""
    count, width = outputs.shape
    rank = stack.shape[2]
    tall = 16 if count <= _FEW else 64
    columns = 64 if count <= _FEW else 128
    grid = triton.cdiv(count, tall), triton.cdiv(width, columns)
    _raise[grid](
        outputs, lowered, stack, places, count, width, outputs.stride(0), lowered.shape[2], first, len(stack),
        len(lowered), RANK=rank, RANKS=min(rank, 64), TALL=tall, COLUMNS=columns, num_warps=4, num_stages=2,
    )  # fmt: skip


@triton.jit
def _lower(
    rows, stack, places, lowered, count, inputs, stride, adapters,
    OUTPUTS: tl.constexpr, TALL: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    own_rows = tl.program_id(0) * TALL + tl.arange(0, TALL)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(2)
    there = own_rows < count
    own_places = tl.load(places + own_rows, mask=there, other=-1)
    least = tl.min(tl.where(own_places < 0, adapters, own_places), axis=0)
    most = tl.max(own_places, axis=0)
    inner = tl.arange(0, DEEP)
    size = tl.full((), OUTPUTS, dtype=tl.int64) * inputs
    sums = tl.zeros((TALL, COLUMNS), dtype=tl.float32)
    for adapter in range(least, most + 1):
        its = own_places == adapter
        if tl.sum(its.to(tl.int32), axis=0) > 0:
            factor = stack + adapter * size
            own = tl.zeros((TALL, COLUMNS), dtype=tl.float32)
            for step in range(EACH):
                depth = (part * EACH + step) * DEEP + inner
                inside = depth < inputs
                left = tl.load(
                    rows + own_rows.to(tl.int64)[:, None] * stride + depth[None, :],
                    mask=there[:, None] & inside[None, :],
                    other=0.0,
                )
                right = tl.load(
                    factor + columns[:, None] * inputs + depth[None, :],
                    mask=inside[None, :] & (columns >= 0)[:, None],
                    other=0.0,
                )
                own += tl.dot(left, tl.trans(right), input_precision="ieee")
            sums = tl.where(its[:, None], own, sums)
    into = lowered + (part * count + own_rows.to(tl.int64))[:, None] * OUTPUTS + columns[None, :]
    tl.store(into, sums, mask=there[:, None] & (columns >= 0)[None, :])


@triton.jit
def _raise(
    outputs, lowered, stack, places, count, width, stride, lowered_stride, first, adapters, parts,
    RANK: tl.constexpr, RANKS: tl.constexpr, TALL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    own_rows = tl.program_id(0) * TALL + tl.arange(0, TALL)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = own_rows < count
    own_places = tl.load(places + own_rows, mask=there, other=-1)
    least = tl.min(tl.where(own_places < 0, adapters, own_places), axis=0)
    most = tl.max(own_places, axis=0)
    if most >= 0:
        size = tl.full((), RANK, dtype=tl.int64) * width
        sums = tl.zeros((TALL, COLUMNS), dtype=tl.float32)
        for start in range(0, RANK, RANKS):
            ranks = start + tl.arange(0, RANKS)
            low = tl.zeros((TALL, RANKS), dtype=tl.float32)
            for part in range(parts):
                low += tl.load(
                    lowered
                    + (part * count + own_rows.to(tl.int64))[:, None] * lowered_stride
                    + (first + ranks)[None, :],
                    mask=there[:, None] & (ranks >= 0)[None, :],
                    other=0.0,
                )
            rounded = low.to(stack.dtype.element_ty)
            for adapter in range(least, most + 1):
                its = own_places == adapter
                if tl.sum(its.to(tl.int32), axis=0) > 0:
                    right = tl.load(
                        stack + adapter * size + columns[:, None] * RANK + ranks[None, :],
                        mask=(columns < width)[:, None] & (ranks >= 0)[None, :],
                        other=0.0,
                    )
                    own = tl.where(its[:, None], rounded, tl.zeros_like(rounded))
                    sums += tl.dot(own, tl.trans(right), input_precision="ieee")
        into = outputs + own_rows.to(tl.int64)[:, None] * stride + columns[None, :]
        inside = there[:, None] & (columns < width)[None, :]
        base = tl.load(into, mask=inside, other=0.0).to(tl.float32)
        tl.store(into, (base + sums).to(outputs.dtype.element_ty), mask=inside)

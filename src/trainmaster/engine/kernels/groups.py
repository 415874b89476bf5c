"""Products of rows with one of several matrices, by the group that each row belongs to: the factors of many adapters.

One side of these products is short, so they take as long as reading and writing their rows. `groups` describes which
rows are whose: consecutive ones, and rows of no group stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from trainmaster.engine.transfers import on_device

_TILE = 64
"""Rows that a program computes, all of one group."""


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    tiles: Tensor
    """First row, end and group of each tile: int32 [tiles, 3]."""
    bounds: Tensor
    """First row and end of each group: int32 [groups, 2]."""

    @classmethod
    def of(cls, bounds: Sequence[tuple[int, int]], device: torch.device) -> Groups:
        """Groups of the rows from the first number of each pair to before the second; they may be empty."""
        tiles = [
            (first, min(first + _TILE, end), group)
            for group, (start, end) in enumerate(bounds)
            for first in range(start, end, _TILE)
        ]
        numbers = on_device(np.array([*sum(tiles, ()), *sum(bounds, ())], dtype=np.int32), device)
        split = 3 * len(tiles)
        return cls(numbers[:split].view(-1, 3), numbers[split:].view(-1, 2))


def group_product(
    rows: Tensor, factors: Tensor, groups: Groups, *, out: Tensor, add: bool = False, transposed: bool = False
) -> Tensor:
    """`rows @ factors[group].T` for each row, into `out` or added to it; `transposed`: `rows @ factors[group]`.

    Rows are [n, inner], factors [groups, outer, inner], and `out` is [n, outer].
    """
    outer, inner = factors.stride(1), factors.stride(2)
    if transposed:
        outer, inner = inner, outer
    width, depth = out.shape[1], rows.shape[1]
    if len(groups.tiles):
        block = min(max(triton.next_power_of_2(width), 16), 128)
        step = min(max(triton.next_power_of_2(depth), 16), 64)
        _group_product[(len(groups.tiles), triton.cdiv(width, block))](
            rows,
            factors,
            out,
            groups.tiles,
            rows.stride(0),
            rows.stride(1),
            factors.stride(0),
            outer,
            inner,
            out.stride(0),
            width,
            depth,
            ADD=add,
            ROWS=_TILE,
            BLOCK=block,
            STEP=step,
            num_warps=4,
            num_stages=3,
        )
    return out


def add_group_outer(left: Tensor, right: Tensor, groups: Groups, *, out: Tensor) -> Tensor:
    """Add `left[rows].T @ right[rows]` of each group's rows to `out[group]`, float32.

    `left` is [n, outer], `right` [n, inner] and `out` [groups, outer, inner].
    """
    count, height, width = out.shape
    if count:
        tall = min(max(triton.next_power_of_2(height), 16), 128)
        wide = min(max(triton.next_power_of_2(width), 16), 128)
        _group_outer[(count, triton.cdiv(height, tall), triton.cdiv(width, wide))](
            left,
            right,
            out,
            groups.bounds,
            left.stride(0),
            left.stride(1),
            right.stride(0),
            right.stride(1),
            out.stride(0),
            out.stride(1),
            height,
            width,
            TALL=tall,
            WIDE=wide,
            STEP=32,
            num_warps=4,
            num_stages=3,
        )
    return out


@triton.jit
def _group_product(
    rows,
    factors,
    out,
    tiles,
    rows_stride,
    rows_step,
    group_stride,
    outer_stride,
    inner_stride,
    out_stride,
    width,
    depth,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    tile = tl.program_id(0)
    first = tl.load(tiles + tile * 3)
    end = tl.load(tiles + tile * 3 + 1)
    group = tl.load(tiles + tile * 3 + 2).to(tl.int64)
    row = first + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < end
    is_column = column < width
    sums = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    from_rows = rows + row.to(tl.int64)[:, None] * rows_stride
    from_factors = factors + group * group_stride + column.to(tl.int64)[None, :] * outer_stride
    for start in range(0, depth, STEP):
        place = start + tl.arange(0, STEP)
        inside = place < depth
        own = tl.load(from_rows + place[None, :] * rows_step, mask=is_row[:, None] & inside[None, :], other=0.0)
        factor = tl.load(
            from_factors + place[:, None] * inner_stride, mask=inside[:, None] & is_column[None, :], other=0.0
        )
        sums = tl.dot(own, factor, sums, input_precision="ieee")
    onto = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    written = is_row[:, None] & is_column[None, :]
    if ADD:
        sums += tl.load(onto, mask=written, other=0.0).to(tl.float32)
    tl.store(onto, sums.to(out.dtype.element_ty), mask=written)


@triton.jit
def _group_outer(
    left,
    right,
    out,
    bounds,
    left_stride,
    left_step,
    right_stride,
    right_step,
    group_stride,
    out_stride,
    height,
    width,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    STEP: tl.constexpr,
):
    group = tl.program_id(0)
    first = tl.load(bounds + group * 2)
    end = tl.load(bounds + group * 2 + 1)
    line = tl.program_id(1) * TALL + tl.arange(0, TALL)
    column = tl.program_id(2) * WIDE + tl.arange(0, WIDE)
    is_line = line < height
    is_column = column < width
    sums = tl.zeros((TALL, WIDE), dtype=tl.float32)
    for start in range(first, end, STEP):
        row = start + tl.arange(0, STEP)
        inside = row < end
        wide_row = row.to(tl.int64)
        own = tl.load(
            left + wide_row[None, :] * left_stride + line[:, None] * left_step,
            mask=is_line[:, None] & inside[None, :],
            other=0.0,
        )
        other = tl.load(
            right + wide_row[:, None] * right_stride + column[None, :] * right_step,
            mask=inside[:, None] & is_column[None, :],
            other=0.0,
        )
        sums = tl.dot(own, other, sums, input_precision="ieee")
    onto = out + group.to(tl.int64) * group_stride + line.to(tl.int64)[:, None] * out_stride + column[None, :]
    written = is_line[:, None] & is_column[None, :]
    sums += tl.load(onto, mask=written, other=0.0)
    tl.store(onto, sums, mask=written)

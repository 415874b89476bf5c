"""Rows in 8 bits with a scale of their own: each is read once, and written as e4m3."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_PARTS = 3
"""Tensors that one program reads a row of: queries, keys and values."""
_PER_WARP = 1024
"""Numbers of a row that a warp holds."""
_MOST_WARPS = 32


def quantize_rows(
    parts: Sequence[Tensor], factors: Tensor | None, *, largest: float, smallest_row: float
) -> tuple[Tensor, Tensor]:
    """e4m3 [n, width] and float32 [n], of rows whose columns are those of all parts, times the factors [width]."""
    if len(parts) > _PARTS:
        parts = [torch.cat([*parts], dim=1)]
    parts = [part if part.stride(1) == 1 else part.contiguous() for part in parts]
    widths = [part.shape[1] for part in parts]
    count, device = len(parts[0]), parts[0].device
    values = torch.empty(count, sum(widths), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(count, dtype=torch.float32, device=device)
    if not count:
        return values, scales
    blocks = [triton.next_power_of_2(width) for width in widths]
    missing = _PARTS - len(parts)
    given = [*parts, *[parts[0]] * missing]
    _quantize_rows[(count,)](
        *given,
        parts[0] if factors is None else factors,
        values,
        scales,
        *(part.stride(0) for part in given),
        *widths,
        *[0] * missing,
        largest,
        smallest_row,
        HAS_FACTORS=factors is not None,
        FIRST=blocks[0],
        SECOND=blocks[1] if len(blocks) > 1 else 0,
        THIRD=blocks[2] if len(blocks) > 2 else 0,
        num_warps=min(max(triton.next_power_of_2(sum(blocks)) // _PER_WARP, 1), _MOST_WARPS),
    )
    return values, scales


@triton.jit
def _part(part, stride, width, factors, start, row, HAS_FACTORS: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    given = tl.load(part + row * stride + columns, mask=columns < width, other=0.0).to(tl.float32)
    if HAS_FACTORS:
        given *= tl.load(factors + start + columns, mask=columns < width, other=0.0)
    return given


@triton.jit
def _write(given, inverse, values, start, width, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    tl.store(values + start + columns, (given * inverse).to(tl.float8e4nv), mask=columns < width)


@triton.jit
def _quantize_rows(
    first,
    second,
    third,
    factors,
    values,
    scales,
    first_stride,
    second_stride,
    third_stride,
    first_width,
    second_width,
    third_width,
    largest,
    smallest_row,
    HAS_FACTORS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    third_start = first_width + second_width
    own_first = _part(first, first_stride, first_width, factors, 0, row, HAS_FACTORS, FIRST)
    most = tl.maximum(tl.max(tl.abs(own_first), axis=0), smallest_row)
    if SECOND:
        own_second = _part(second, second_stride, second_width, factors, first_width, row, HAS_FACTORS, SECOND)
        most = tl.maximum(most, tl.max(tl.abs(own_second), axis=0))
    if THIRD:
        own_third = _part(third, third_stride, third_width, factors, third_start, row, HAS_FACTORS, THIRD)
        most = tl.maximum(most, tl.max(tl.abs(own_third), axis=0))
    inverse = largest / most
    onto = values + row * (third_start + third_width)
    _write(own_first, inverse, onto, 0, first_width, FIRST)
    if SECOND:
        _write(own_second, inverse, onto, first_width, second_width, SECOND)
    if THIRD:
        _write(own_third, inverse, onto, third_start, third_width, THIRD)
    tl.store(scales + row, most / largest)

"""The adapters' part of a layer's outputs, for many adapters at once: rows find their own by its place in a stack.

`lower_rows` multiplies rows by the first factors; several programs share the inputs of a row, and their sums are added
up by `raise_rows`, before it multiplies by the second factors. Both compute segments: a few rows of one adapter.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 256
"""Columns of the outputs that one program of `raise_rows` computes."""
_AT_ONCE = 128
"""Of those."""
_PROGRAMS = 132
"""Enough to fill the card; more parts are more to add up."""
_MOST_PARTS = 16
_FEW = 512
"""Up to so many rows, it is reading the factors that takes the time."""


def segment_rows(count: int) -> int:
    """The most rows of a segment, where there are so many in all."""
    return 16 if count <= _FEW else 64


def most_segments(count: int, places: int) -> int:
    """As many as rows of so many adapters, each one's together, can have."""
    return min(count, -(-count // segment_rows(count)) + min(count, places))


def segments_of(places: np.ndarray, rows: int) -> np.ndarray:
    """The segments, of `rows` at most, of rows with adapters at these places: int32 [segments, 3].

    A segment is its first row, the row after its last, and the place; rows at -1 have no adapter, and no segment.
    """
    ends = [*(np.flatnonzero(np.diff(places)) + 1).tolist(), len(places)]
    found: list[tuple[int, int, int]] = []
    first = 0
    for end in ends:
        if len(places) and places[first] >= 0:
            found += [(start, min(start + rows, end), places[first]) for start in range(first, end, rows)]
        first = end
    return np.array(found, dtype=np.int32).reshape(-1, 3)


def lower_rows(rows: Tensor, stack: Tensor, segments: Tensor) -> Tensor:
    """Rows [n, in] times their own factor in a stack [places, out, in]: float32 [parts, n, out].

    The sum over parts is the result; rows of no segment have none. Segments of no rows are passed over. `out` is a
    multiple of 16.
    """
    count, inputs = rows.shape
    outputs = stack.shape[1]
    columns = 32 if outputs % 32 == 0 else 16
    deep = 128 if rows.element_size() == 2 else 32
    parts = 1
    while (
        len(segments) * (outputs // columns) * parts < _PROGRAMS and parts < _MOST_PARTS and inputs >= parts * 4 * deep
    ):
        parts *= 2
    lowered = rows.new_empty((parts, count, outputs), dtype=torch.float32)
    _lower[(len(segments), outputs // columns, parts)](
        rows, stack, segments, lowered, count, inputs, rows.stride(0),
        OUTPUTS=outputs, TALL=segment_rows(count), COLUMNS=columns, DEEP=deep,
        EACH=triton.cdiv(triton.cdiv(inputs, parts), deep), num_warps=4, num_stages=3,
    )  # fmt: skip
    return lowered


def raise_rows(outputs: Tensor, lowered: Tensor, stack: Tensor, segments: Tensor, blocks: Tensor) -> None:
    """Add to outputs [n, out] the lowered rows times their own factor in a stack [places, out, rank].

    `blocks`, int32 [blocks, 3], has columns of the outputs that have the same lowered rows: the first one, the one
    after the last, COLUMNS at most, and where those lowered rows begin.
    """
    count, width = outputs.shape
    rank = stack.shape[2]
    _raise[(len(blocks), len(segments))](
        outputs, lowered, stack, segments, blocks, count, width, outputs.stride(0), lowered.shape[2],
        PARTS=len(lowered), RANK=rank, RANKS=min(rank, 64), TALL=segment_rows(count), COLUMNS=_AT_ONCE,
        num_warps=4, num_stages=2,
    )  # fmt: skip


@triton.jit
def _lower(
    rows, stack, segments, lowered, count, inputs, stride,
    OUTPUTS: tl.constexpr, TALL: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    segment = segments + tl.program_id(0) * 3
    start, stop, place = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2)
    if start < stop:
        own_rows = start + tl.arange(0, TALL)
        own = own_rows < stop
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        part = tl.program_id(2)
        left = rows + own_rows.to(tl.int64)[:, None] * stride
        right = stack + place.to(tl.int64) * OUTPUTS * inputs + columns.to(tl.int64)[:, None] * inputs
        sums = tl.zeros((TALL, COLUMNS), dtype=tl.float32)
        for step in range(EACH):
            depth = (part * EACH + step) * DEEP + tl.arange(0, DEEP)
            inside = depth < inputs
            some = tl.load(left + depth[None, :], mask=own[:, None] & inside[None, :], other=0.0)
            weights = tl.load(right + depth[None, :], mask=inside[None, :] & (columns >= 0)[:, None], other=0.0)
            sums += tl.dot(some, tl.trans(weights), input_precision="ieee")
        into = lowered + (part * count + own_rows.to(tl.int64))[:, None] * OUTPUTS + columns[None, :]
        tl.store(into, sums, mask=own[:, None] & (columns >= 0)[None, :])


@triton.jit
def _raise(
    outputs, lowered, stack, segments, blocks, count, width, stride, lowered_stride,
    PARTS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, TALL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    segment, block = segments + tl.program_id(1) * 3, blocks + tl.program_id(0) * 3
    start, stop, place = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2)
    column, after, first = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    if start < stop:
        own_rows = start + tl.arange(0, TALL)
        own = own_rows < stop
        left = lowered + own_rows.to(tl.int64)[:, None] * lowered_stride + first
        for begin in tl.static_range(0, RANK, RANKS):
            ranks = begin + tl.arange(0, RANKS)
            low = tl.zeros((TALL, RANKS), dtype=tl.float32)
            for part in tl.static_range(PARTS):
                some = left + part * count * lowered_stride + ranks[None, :]
                low += tl.load(some, mask=own[:, None] & (ranks >= 0)[None, :], other=0.0)
            rounded = low.to(stack.dtype.element_ty)
            for next_column in range(column, after, COLUMNS):
                columns = next_column + tl.arange(0, COLUMNS)
                there = columns < after
                into = outputs + own_rows.to(tl.int64)[:, None] * stride + columns[None, :]
                inside = own[:, None] & there[None, :]
                base = tl.load(into, mask=inside, other=0.0).to(tl.float32)
                right = stack + (place.to(tl.int64) * width + columns.to(tl.int64)[:, None]) * RANK
                weights = tl.load(right + ranks[None, :], mask=there[:, None] & (ranks >= 0)[None, :], other=0.0)
                base += tl.dot(rounded, tl.trans(weights), input_precision="ieee")
                tl.store(into, base.to(outputs.dtype.element_ty), mask=inside)
            if begin + RANKS < RANK:
                # What was stored is read again by other threads of the same program.
                tl.debug_barrier()

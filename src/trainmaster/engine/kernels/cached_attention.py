"""One token of each running sequence attends to its earlier ones, which lie in pages of the cache.

A sequence is shared among several programs, so that a few long ones fill the card, too; `_join` adds up their parts.
The queries that share a key-value head are the rows of one product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16
"""The least number of rows of a product on tensor cores."""
_PROGRAMS = 512
"""Enough to fill the card; more would only add parts."""
_MOST_PARTS = 32


def store_tokens(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Put keys and values [n, heads, width] into pools [pages, block, heads, width], at these slots, int64 [n]."""
    size = key.shape[1] * key.shape[2]
    _store[(len(slots),)](
        key, value, keys, values, slots, key.stride(0), value.stride(0), size, SIZE=triton.next_power_of_2(size)
    )


def attend_to_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    rows: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attention of queries [n, heads, width], one at each position, int64 [n], of the sequences `rows`, int64 [n].

    Their keys and values [n, key-value heads, width] go to the pools first, [pages, block, key-value heads, width].
    `table`, int32 [sequences, blocks], has the pages of each sequence's blocks; the last sequence is a spare one, of
    which nothing is kept.
    """
    count, heads, width = query.shape
    kv_heads = keys.shape[2]
    shared = heads // kv_heads
    parts = max(1, min(_MOST_PARTS, triton.next_power_of_2(triton.cdiv(_PROGRAMS, count * kv_heads))))
    attended = torch.empty_like(query)
    if parts == 1:
        sums, weights = attended, attended
    else:
        sums = query.new_empty((count, heads, parts, width), dtype=torch.float32)
        weights = query.new_empty((count, heads, parts, 2), dtype=torch.float32)
    tile = 64 if query.element_size() == 2 and width <= 128 else 32
    _attend[(count, kv_heads, parts)](
        query, key, value, keys, values, table, rows, positions, sums, weights,
        query.stride(0), key.stride(0), value.stride(0), table.stride(0), len(table) - 1,
        scale, window or 0, softcap or 0.0,
        HEADS=heads, KV_HEADS=kv_heads, SHARED=shared, ROWS=max(_ROWS, triton.next_power_of_2(shared)), WIDTH=width,
        PADDED=max(16, triton.next_power_of_2(width)), BLOCK=keys.shape[1], TILE=tile, PARTS=parts,
        WINDOWED=window is not None, CAPPED=softcap is not None,
        num_warps=4, num_stages=3 if query.element_size() == 2 else 2,
    )  # fmt: skip
    if parts > 1:
        _join[(count, heads)](sums, weights, attended, WIDTH=width, PADDED=triton.next_power_of_2(width), PARTS=parts)
    return attended


@triton.jit
def _store(key, value, keys, values, slots, key_stride, value_stride, size, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, SIZE)
    inside = places < size
    into = tl.load(slots + row) * size + places
    tl.store(keys + into, tl.load(key + row * key_stride + places, mask=inside), mask=inside)
    tl.store(values + into, tl.load(value + row * value_stride + places, mask=inside), mask=inside)


@triton.jit
def _attend(
    query, key, value, keys, values, table, rows, positions, sums, weights,
    query_stride, key_stride, value_stride, table_stride, spare, scale, window, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(positions + row) + 1
    first = tl.zeros_like(length)
    if WINDOWED:
        first = tl.maximum(length - window, 0)
    tiles = (length - first + TILE - 1) // TILE
    each = (tiles + PARTS - 1) // PARTS
    start = first + part * each * TILE
    stop = tl.minimum(start + each * TILE, length)
    sequence = tl.load(rows + row)
    own_table = table + sequence * table_stride
    queries, wide = tl.arange(0, ROWS), tl.arange(0, PADDED)
    if (stop == length) & (start < length) & (sequence != spare):
        page = tl.load(own_table + (length - 1) // BLOCK).to(tl.int64)
        into = (page * BLOCK + (length - 1) % BLOCK) * (KV_HEADS * WIDTH) + head * WIDTH + wide
        own = head * WIDTH + wide
        tl.store(keys + into, tl.load(key + row * key_stride + own, mask=wide < WIDTH), mask=wide < WIDTH)
        tl.store(values + into, tl.load(value + row * value_stride + own, mask=wide < WIDTH), mask=wide < WIDTH)
    # What was stored is read again by other threads of the same program.
    tl.debug_barrier()

    real = (queries < SHARED)[:, None] & (wide < WIDTH)[None, :]
    asked = tl.load(
        query + row * query_stride + (head * SHARED + queries)[:, None] * WIDTH + wide[None, :], mask=real, other=0.0
    )
    top = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    found = tl.zeros((ROWS, PADDED), dtype=tl.float32)
    steps = tl.arange(0, TILE)
    for begin in range(start, stop, TILE):
        places = begin + steps
        seen = places < stop
        page = tl.load(own_table + places // BLOCK, mask=seen, other=0).to(tl.int64)
        slots = (page * BLOCK + places % BLOCK) * (KV_HEADS * WIDTH) + head * WIDTH
        there = seen[:, None] & (wide < WIDTH)[None, :]
        some_keys = tl.load(keys + slots[:, None] + wide[None, :], mask=there, other=0.0)
        scores = tl.dot(asked, tl.trans(some_keys), input_precision="ieee") * scale
        if CAPPED:
            bent = tl.exp(-2.0 * tl.abs(scores / softcap))
            scores = tl.where(scores < 0, -1.0, 1.0) * softcap * (1.0 - bent) / (1.0 + bent)
        scores = tl.where(seen[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        shrink = tl.exp(top - higher)
        shares = tl.exp(scores - higher[:, None])
        total = total * shrink + tl.sum(shares, axis=1)
        some_values = tl.load(values + slots[:, None] + wide[None, :], mask=there, other=0.0)
        found = found * shrink[:, None] + tl.dot(shares.to(some_values.dtype), some_values, input_precision="ieee")
        top = higher
    heads = head * SHARED + queries
    if PARTS == 1:
        into = sums + row * HEADS * WIDTH + heads[:, None] * WIDTH + wide[None, :]
        tl.store(into, (found / total[:, None]).to(sums.dtype.element_ty), mask=real)
    else:
        own = (row * HEADS + heads) * PARTS + part
        tl.store(sums + own[:, None] * WIDTH + wide[None, :], found, mask=real)
        tl.store(weights + own * 2, top, mask=queries < SHARED)
        tl.store(weights + own * 2 + 1, total, mask=queries < SHARED)


@triton.jit
def _join(sums, weights, attended, WIDTH: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr):
    own = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    parts, wide = tl.arange(0, PARTS), tl.arange(0, PADDED)
    tops = tl.load(weights + (own * PARTS + parts) * 2)
    # A part without tokens has -inf and 0: the first part always has some.
    factors = tl.exp(tops - tl.max(tops, axis=0))
    total = tl.sum(factors * tl.load(weights + (own * PARTS + parts) * 2 + 1), axis=0)
    inside = (parts >= 0)[:, None] & (wide < WIDTH)[None, :]
    each = tl.load(sums + (own * PARTS + parts)[:, None] * WIDTH + wide[None, :], mask=inside, other=0.0)
    joined = tl.sum(each * factors[:, None], axis=0) / total
    tl.store(attended + own * WIDTH + wide, joined.to(attended.dtype.element_ty), mask=wide < WIDTH)

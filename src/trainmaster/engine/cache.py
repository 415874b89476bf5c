"""Keys and values of the tokens that were seen, in blocks that requests hold while they run; and attention to them.

The cache is one pool for everything that is sampled with one shape of model. Its memory is bounded: who asks for more
blocks than are free waits. What a token attends to is computed in shapes that follow from its own sequence alone, so
that on the CPU its result does not depend on what else is in the batch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 16
"""Tokens in a block: a sequence wastes half of one on average, and an index moves a whole one."""
_NOTHING = 0
"""The block that is never given away and stays zero: what shorter sequences of a group are filled up with."""


def blocks_for(tokens: int) -> int:
    """How many blocks hold so many tokens."""
    return -(-tokens // BLOCK)


class Cache:
    """A pool of blocks.

    Args:
        layers: of the model.
        heads: of keys, and as many of values.
        width: of a head.
        blocks: how many can be taken; one more is made.
        device: where the model computes.
        dtype: in which it does.
    """

    def __init__(
        self, *, layers: int, heads: int, width: int, blocks: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        # Not cleared as a whole: memory that no request ever reached is never touched.
        shape = (layers, blocks + 1, BLOCK, heads, width)
        self.keys = torch.empty(shape, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)
        self.blocks = blocks
        self._free = list(range(blocks, 0, -1))
        self.clear([_NOTHING])

    @property
    def free(self) -> int:
        """How many blocks can be taken."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """So many blocks, with whatever was left in them; there must be as many."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks were asked for, and {len(self._free)} are free")
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: Sequence[int]) -> None:
        """Let others take these."""
        self._free.extend(reversed(blocks))

    def clear(self, blocks: Sequence[int]) -> None:
        """Let nothing be left in these: what is masked out still must be a number, and a model may have given none."""
        if blocks:
            index = torch.tensor(blocks, device=self.keys.device)
            self.keys.index_fill_(1, index, 0)
            self.values.index_fill_(1, index, 0)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Let the second block of each pair hold what the first holds."""
        if pairs:
            sources, targets = torch.tensor(pairs, device=self.keys.device).unbind(dim=1)
            for pool in (self.keys, self.values):
                pool.index_copy_(1, targets, pool.index_select(1, sources))


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Some tokens of one sequence that are computed together: one that was chosen, or a piece of a prompt."""

    blocks: Sequence[int]
    """The sequence's blocks in order, at least up to the last of these tokens."""
    start: int
    """The position of the first one."""
    count: int = 1

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.start + self.count


class CachedAttention:
    """Attention of a pack's spans to their own sequences, whose earlier tokens are in the cache.

    Each layer puts the pack's keys and values into the cache first. Spans of one shape are computed together; a
    shape is rounded up to a power of two, so that there are few.

    Args:
        cache: what the spans' blocks are of.
        spans: in the order of the pack's rows; the pack may have further rows at its end, which get zeros.
    """

    def __init__(self, cache: Cache, spans: Sequence[Span]) -> None:
        self._cache = cache
        device = cache.keys.device
        cache.clear([block for span in spans for block in _begun(span)])
        slots = np.concatenate([_slots(span) for span in spans])
        self._slots = torch.from_numpy(slots).to(device)
        self._groups = _groups(spans, device)

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """As the model calls it: `[rows, heads, width]` in and out."""
        rows = self._slots.numel()
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys.flatten(0, 1).index_copy_(0, self._slots, key[:rows])
        values.flatten(0, 1).index_copy_(0, self._slots, value[:rows])
        attended = torch.zeros_like(query)
        for group in self._groups:
            group.attend(attended, query, keys, values, scale=scale, window=window, softcap=softcap)
        return attended


def _begun(span: Span) -> Sequence[int]:
    """The blocks whose first token is one of these."""
    return span.blocks[blocks_for(span.start) : blocks_for(span.end)]


def _slots(span: Span) -> np.ndarray:
    """Where in the pool the span's tokens go."""
    if span.count == 1:
        return np.array([span.blocks[span.start // BLOCK] * BLOCK + span.start % BLOCK])
    positions = np.arange(span.start, span.end)
    return np.asarray(span.blocks)[positions // BLOCK] * BLOCK + positions % BLOCK


def _groups(spans: Sequence[Span], device: torch.device) -> list[_Group]:
    alike: dict[tuple[int, int], list[tuple[int, Span]]] = defaultdict(list)
    row = 0
    for span in spans:
        width = 1 if span.count == 1 else max(BLOCK, _power_of_two(span.count))
        alike[width, _power_of_two(blocks_for(span.end))].append((row, span))
        row += span.count
    return [_Group(members, width, blocks, device) for (width, blocks), members in alike.items()]


class _Group:
    """Spans that are computed in one shape.

    Args:
        members: spans, each with its first row in the pack.
        width: rows that each is filled up to, by repeating its last one.
        blocks: what each one's sequence is filled up to, by the block that is zero.
        device: where it is computed.
    """

    def __init__(self, members: Sequence[tuple[int, Span]], width: int, blocks: int, device: torch.device) -> None:
        tables = np.full((len(members), blocks), _NOTHING)
        for place, (_, span) in enumerate(members):
            held = blocks_for(span.end)
            tables[place, :held] = span.blocks[:held]
        first, start, count = np.array([(row, span.start, span.count) for row, span in members]).T[:, :, None]
        offsets = np.minimum(np.arange(width), count - 1)
        rows = (first + offsets).ravel()
        real = np.flatnonzero(np.arange(width) < count)
        self._shape = (len(members), width)
        self._length = blocks * BLOCK
        self._blocks = torch.from_numpy(tables.ravel()).to(device)
        self._rows = torch.from_numpy(rows).to(device)
        self._real = None if len(real) == len(rows) else torch.from_numpy(real).to(device)
        """Which of the rows fill nothing up; None: all."""
        self._positions = torch.from_numpy((start + offsets).astype(np.int32)).to(device)
        self._masks: dict[int | None, Tensor] = {}
        """By window."""
        self._past: tuple[Tensor, Tensor] | None = None
        """Keys and values of the spans' sequences; every layer writes its own over those of the one before."""

    def attend(
        self,
        attended: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        """Put into `attended` what these spans' rows of `query` attend to."""
        heads, width = keys.shape[-2:]
        if self._past is None:
            size = (self._blocks.numel(), BLOCK * heads * width)
            self._past = (keys.new_empty(size), values.new_empty(size))
        for pool, past in zip((keys, values), self._past, strict=True):
            torch.index_select(pool.flatten(1), 0, self._blocks, out=past)
        laid = [past.view(self._shape[0], self._length, heads, width).transpose(1, 2) for past in self._past]
        asked = query.index_select(0, self._rows).view(*self._shape, heads, -1, width)
        mask = self._mask(window, query.dtype)
        answer = _attend(asked, laid[0], laid[1], mask, scale, softcap).reshape(-1, *query.shape[1:])
        if self._real is None:
            attended.index_copy_(0, self._rows, answer)
        else:
            attended.index_copy_(0, self._rows[self._real], answer[self._real])

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """0 where a row sees a place and -inf where it does not: [spans, 1, width, length]."""
        if window not in self._masks:
            places = torch.arange(self._length, dtype=torch.int32, device=self._positions.device)
            behind = self._positions[:, None, :, None] - places
            unseen = behind < 0 if window is None else (behind < 0) | (behind >= window)
            mask = torch.zeros(unseen.shape, dtype=dtype, device=unseen.device)
            self._masks[window] = mask.masked_fill_(unseen, float("-inf"))
        return self._masks[window]


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    """`query` is [spans, width, key heads, queries a key, head width], the others [spans, key heads, length, width]."""
    shared = query.shape[3]
    if query.shape[1] > 1:
        each = [_weighed(rows.transpose(1, 2), key, value, mask, scale, softcap) for rows in query.unbind(dim=3)]
        return torch.stack(each, dim=-2).transpose(1, 2)
    # The heads that share a key are rows of one product. On the CPU, products of fewer than four rows are rounded in
    # another way than training's, and some by the size of the batch: so rows are repeated.
    rows = query.squeeze(1)
    copies = 4 // math.gcd(shared, 4) if query.device.type == "cpu" else 1
    rows = rows.repeat(1, 1, copies, 1) if copies > 1 else rows
    return _weighed(rows, key, value, mask, scale, softcap)[:, :, :shared].unsqueeze(1)


def _weighed(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    """The values of [spans, heads, length, width], weighed for [spans, heads, rows, width] of queries."""
    if softcap is None:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * (scale / softcap)) + mask
    wide = torch.promote_types(scores.dtype, torch.float32)
    return torch.softmax(scores, dim=-1, dtype=wide).to(value.dtype) @ value


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()

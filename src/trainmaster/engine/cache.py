"""The key-value cache of running requests.

Layers that see the whole sequence keep every block of it; layers with a window as many as it spans, and overwrite the
oldest. Both take pages from one bounded pool: layers are grouped into strata of equal depth, and a page holds one block
of one stratum.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

from trainmaster.engine.recurrent_states import RecurrentStates
from trainmaster.engine.transfers import on_device

BLOCK = 16
"""Tokens in a block: a sequence wastes half a block on average, and an index moves a whole block."""
NO_PAGE = 0
"""The page that is never given out and stays zero; it pads the shorter sequences of a group."""


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK)


class AttentionKind(IntEnum):
    FULL = 0
    SLIDING = 1


@dataclass(frozen=True, slots=True)
class LayerSlot:
    """Where a layer's keys and values are: its stratum among those of its kind, and its depth in the pages."""

    kind: AttentionKind
    stratum: int
    depth: int


@dataclass(frozen=True, slots=True)
class Layout:
    places: tuple[LayerSlot, ...]
    depth: int
    strata: tuple[int, int]
    window: int
    """The window of the layers that have one; 0: none has."""

    @classmethod
    def of(cls, windows: Sequence[int | None], longest: int) -> Layout:
        shorter = {window for window in windows if window is not None and window < longest}
        if len(shorter) > 1:
            raise ValueError(f"layers with windows of {sorted(shorter)} tokens cannot share a cache")
        kinds = [AttentionKind.SLIDING if window in shorter else AttentionKind.FULL for window in windows]
        counts = [kinds.count(kind) for kind in AttentionKind]
        # A stratum is filled by the layers of the kind that has fewer: what the last of the others has no layers for
        # is wasted.
        depth = min(count for count in counts if count)
        seen = [0, 0]
        places = []
        for kind in kinds:
            places.append(LayerSlot(kind, *divmod(seen[kind], depth)))
            seen[kind] += 1
        strata = -(-counts[0] // depth), -(-counts[1] // depth)
        return cls(tuple(places), depth, strata, window=max(shorter, default=0))

    def ring(self, tokens: int) -> int:
        """Blocks that layers with a window keep if this many tokens are computed at once."""
        return blocks_for(self.window - 1 + tokens) + 1

    def pages(self, blocks: int, ring: int) -> int:
        return self.strata[AttentionKind.FULL] * blocks + self.strata[AttentionKind.SLIDING] * min(blocks, ring)

    def blocks(self, pages: int, ring: int) -> int:
        everything, windowed = self.strata
        while_all_are_kept = pages // (everything + windowed)
        if while_all_are_kept < ring:
            return while_all_are_kept
        return (pages - windowed * ring) // everything if everything else sys.maxsize


@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """The pages of consecutive blocks of a sequence, from its block `first` on."""

    first: int
    tables: tuple[np.ndarray, np.ndarray]
    """By kind, int64 [blocks, strata]; with a window, the blocks are a ring."""

    def pages(self, kind: AttentionKind, start: int, stop: int) -> np.ndarray:
        table = self.tables[kind]
        if kind is AttentionKind.FULL:
            return table[start - self.first : stop - self.first]
        return table[np.arange(start - self.first, stop - self.first) % len(table)]


def pages_of(rooms: Sequence[PageTable], kind: AttentionKind, start: int, stop: int) -> np.ndarray:
    """Pages of a sequence's blocks from `start` to `stop`; each room has the blocks before the next room's."""
    ends = [*(room.first for room in rooms[1:]), stop]
    parts = [
        room.pages(kind, max(start, room.first), min(stop, end))
        for room, end in zip(rooms, ends, strict=True)
        if max(start, room.first) < min(stop, end)
    ]
    return np.concatenate(parts) if parts else rooms[0].tables[kind][:0]


class KeyValueCache:
    """A pool of pages, as many as can be taken and one more, for key-value heads of this width.

    Values have the width of keys, if they have none of their own.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        heads: int,
        width: int,
        value_width: int | None = None,
        pages: int,
        device: torch.device,
        dtype: torch.dtype,
        states: RecurrentStates | None = None,
    ) -> None:
        # Not cleared as a whole: memory that no request ever reached is never touched.
        shape = (layout.depth, pages + 1, BLOCK, heads)
        self.keys = torch.empty(*shape, width, device=device, dtype=dtype)
        self.values = torch.empty(*shape, width if value_width is None else value_width, device=device, dtype=dtype)
        self.layout = layout
        self.pages = pages
        self.states = states
        """Those of layers that have a state instead of keys and values."""
        self._free = list(range(pages, 0, -1))
        self.clear(np.array([NO_PAGE]))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, first: int, blocks: int, ring: int) -> PageTable:
        """Take pages for the blocks of a sequence from `first` on, without clearing them; enough must be free."""
        if self.layout.pages(blocks, ring) > len(self._free):
            raise ValueError(f"room for {blocks} blocks was asked for, and {len(self._free)} pages are free")
        counts = zip((blocks, min(blocks, ring)), self.layout.strata, strict=True)
        everything, windowed = (
            np.array([self._free.pop() for _ in range(count * strata)], dtype=np.int64).reshape(count, strata)
            for count, strata in counts
        )
        return PageTable(first, (everything, windowed))

    def give_back(self, room: PageTable) -> None:
        self.forget_state(room)
        for table in room.tables:
            self.give_back_pages(table)

    def give_back_pages(self, pages: np.ndarray) -> None:
        self._free.extend(reversed(pages.ravel().tolist()))

    def forget_state(self, room: PageTable) -> None:
        """Of the sequence that had this room."""
        if self.states is not None:
            self.states.give_back(room)

    def clear(self, pages: np.ndarray) -> None:
        """Zero these pages: masked values must still be finite, and a diverged model may have left NaN."""
        if pages.size:
            index = self._index(pages)
            self.keys.index_fill_(1, index, 0)
            self.values.index_fill_(1, index, 0)

    def copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        if sources.size:
            into, of = self._index(targets), self._index(sources)
            for pool in (self.keys, self.values):
                pool.index_copy_(1, into, pool.index_select(1, of))

    def _index(self, pages: np.ndarray) -> torch.Tensor:
        return on_device(pages, self.keys.device)

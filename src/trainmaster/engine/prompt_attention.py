"""Attention of pieces of prompts on the GPU: all pieces by one kernel, each also to what the cache has before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from trainmaster.engine.attention import CachedAttention, Scoring, Span, ends_of, varlen_attention, varlen_fits
from trainmaster.engine.cache import BLOCK, AttentionKind, KeyValueCache, blocks_for, pages_of
from trainmaster.engine.kernels.cached_attention import store_tokens
from trainmaster.engine.transfers import on_device


class PromptAttention:
    """As `CachedAttention`, which takes over what the kernel cannot compute."""

    def __init__(self, cache: KeyValueCache, spans: Sequence[Span]) -> None:
        self._cache = cache
        self._spans = spans
        device = cache.keys.device
        self._kinds = {kind: _KindRows(cache, spans, kind) for kind in AttentionKind if cache.layout.strata[kind]}
        self._counts = [span.count for span in spans]
        self._ends = ends_of(self._counts, device)
        self._other: CachedAttention | None = None

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        if not varlen_fits(query, scoring):
            self._other = self._other or CachedAttention(self._cache, self._spans)
            return self._other(layer, query, key, value, scoring)
        place = self._cache.layout.places[layer]
        rows = self._kinds[place.kind]
        keys, values = self._cache.keys[place.depth], self._cache.values[place.depth]
        store_tokens(key, value, keys, values, rows.slots[place.stratum])
        if rows.seen is None:
            return varlen_attention(query, key, value, self._ends, self._ends, max(self._counts), scoring)
        seen = rows.seen[place.stratum]
        past_keys, past_values = (each.flatten(0, 1).index_select(0, seen) for each in (keys, values))
        return varlen_attention(query, past_keys, past_values, self._ends, rows.seen_ends, rows.longest, scoring)


class _KindRows:
    def __init__(self, cache: KeyValueCache, spans: Sequence[Span], kind: AttentionKind) -> None:
        device = cache.keys.device
        self.slots = on_device(np.concatenate([span.slots(kind) for span in spans]).T, device)
        """Where the keys and values of the rows belong: [strata, rows]."""
        self.seen: Tensor | None = None
        """Where all that the spans see is, one span's after the other's: [strata, places]; None: in the pack itself."""
        if not any(span.start for span in spans):
            return
        seen = [_seen(cache, span, kind) for span in spans]
        lengths = [len(each) for each in seen]
        self.seen = on_device(np.concatenate(seen).T, device)
        self.seen_ends = ends_of(lengths, device)
        self.longest = max(lengths)


def _seen(cache: KeyValueCache, span: Span, kind: AttentionKind) -> np.ndarray:
    """The slots of the positions that a span sees, up to its last one: [places, strata]."""
    start = max(0, span.start - cache.layout.window + 1) if kind is AttentionKind.SLIDING else 0
    first = start // BLOCK
    pages = pages_of(span.rooms, kind, first, blocks_for(span.end))
    positions = np.arange(start, span.end)
    slots: np.ndarray = pages[positions // BLOCK - first] * BLOCK + (positions % BLOCK)[:, None]
    return slots

"""Causal attention within each sequence: over packed sequences in training, over the cache in sampling.

On the CPU the order of sums depends on the shape, and training and sampling compute a sequence in different shapes. So
the CPU computes in the next wider type: the differences vanish when the result is rounded back. What a token attends to
is computed in shapes of its own sequence alone, so on the CPU its result does not depend on the rest of the batch.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trainmaster.engine.cache import BLOCK, NO_PAGE, AttentionKind, KeyValueCache, PageTable, blocks_for, pages_of
from trainmaster.engine.dense_attention import dense_attention, is_faster
from trainmaster.engine.flash_attention import flash_attention, has_flash_attention
from trainmaster.engine.transfers import on_device

_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
_HEAD_DIMS = range(8, 257, 8)
"""The head widths that PyTorch's variable-length kernels support."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    scale: float
    window: int | None
    """How many of the last rows each row sees, including itself; None: all."""
    softcap: float | None
    sinks: Tensor | None = None
    """For each query head, the score of a place that has no value: [heads]."""

    @property
    def is_plain(self) -> bool:
        """Whether weights are the softmax of the scores alone, as kernels compute them."""
        return self.softcap is None and self.sinks is None


class Attention(Protocol):
    """Attention over the rows of a pack; an implementation decides which rows see which."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attend: queries are [rows, query heads, width], keys and values [rows, key-value heads, width].

        The result has as many heads as queries, of the width of values, which may be another one than that of keys.
        """


class PackedAttention:
    """Sequences of the given lengths, end to end; each row sees the earlier rows of its own sequence.

    The CPU computes them one by one, so that none depends on its neighbours. On a GPU, PyTorch's variable-length kernel
    computes all at once in 16 bits without softcap; other cases are computed one by one as well.
    """

    def __init__(self, lengths: Sequence[int], ends: Tensor | None = None) -> None:
        """`ends`: 0 and the cumulative lengths, int32, if the device has them: to copy them there waits for it."""
        self.lengths = list(lengths)
        self._rows = sum(lengths)
        self._ends = ends

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:  # noqa: ARG002
        if len(query) != self._rows:
            raise ValueError(f"sequences of {self._rows} rows in all cannot share {len(query)}")
        narrower = query.shape[2] - value.shape[2]
        if varlen_fits(query, scoring) and narrower >= 0:
            # Kernels take keys and values of one width.
            value = functional.pad(value, (0, narrower)) if narrower else value
            return self._by_kernel(query, key, value, scoring)[..., : value.shape[2] - narrower]
        queries, keys, values = (torch.split(each, self.lengths) for each in (query, key, value))
        return torch.cat([_attend_to_sequence(*each, scoring) for each in zip(queries, keys, values, strict=True)])

    def _by_kernel(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        if is_faster(query, self.lengths, scoring.window):
            return dense_attention(query, key, value, self.lengths, scoring.scale)
        if self._ends is None:
            self._ends = ends_of(self.lengths, query.device)
        longest = max(self.lengths)
        if has_flash_attention():
            return flash_attention(query, key, value, self._ends, longest, scoring.scale, scoring.window)
        return varlen_attention(query, key, value, self._ends, self._ends, longest, scoring)


def ends_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """0 and the running sums of the lengths of sequences end to end: int32."""
    return on_device(np.array([0, *itertools.accumulate(lengths)], dtype=np.int32), device)


def computed_in(query: Tensor) -> torch.dtype:
    return _WIDER.get(query.dtype, query.dtype) if query.device.type == "cpu" else query.dtype


def _attend_to_sequence(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    given, dtype = query.dtype, computed_in(query)
    query, key, value = (each.to(dtype).transpose(0, 1).unsqueeze(0) for each in (query, key, value))
    if groups > 1:
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    length = query.shape[2]
    if scoring.is_plain and (scoring.window is None or scoring.window >= length):
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scoring.scale)
    else:
        places = torch.arange(length, device=query.device)
        mask = _causal_mask(places[:, None] - places, scoring.window, dtype)
        sinks = None if scoring.sinks is None else scoring.sinks.unsqueeze(1)
        attended = _weighed(query, key, value, mask, scoring, sinks)
    return attended.squeeze(0).transpose(0, 1).to(given)


def _causal_mask(behind: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where a row sees a place and -inf where it does not. `behind`: how far the place is behind the row."""
    unseen = behind < 0 if window is None else (behind < 0) | (behind >= window)
    return torch.zeros(unseen.shape, dtype=dtype, device=unseen.device).masked_fill_(unseen, float("-inf"))


def _weighed(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scoring: Scoring, sinks: Tensor | None) -> Tensor:
    """Attention of queries [n, heads, rows, width] to [n, heads, length, width], with sinks [heads, rows or 1]."""
    scale, softcap = scoring.scale, scoring.softcap
    if scoring.is_plain:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = query @ key.transpose(2, 3) * (scale / softcap if softcap else scale)
    scores = (softcap * torch.tanh(scores) if softcap else scores) + mask
    wide = torch.promote_types(scores.dtype, torch.float32)
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=wide).to(value.dtype) @ value
    column = sinks.to(wide)[None, :, :, None].expand(*scores.shape[:3], 1)
    weights = torch.softmax(torch.cat([scores.to(wide), column], dim=-1), dim=-1)
    return weights[..., :-1].to(value.dtype) @ value


def varlen_fits(query: Tensor, scoring: Scoring) -> bool:
    """Whether `varlen_attention` can compute this."""
    fits = query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] in _HEAD_DIMS
    return query.is_cuda and scoring.is_plain and fits and _varlen_options() is not None


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor, key_ends: Tensor, longest: int, scoring: Scoring
) -> Tensor:
    """PyTorch's kernel for packed sequences; the queries of each are its last rows.

    `query_ends` and `key_ends` are the running sums of the sequences' lengths, from 0 on: int32. No sequence has more
    than `longest` rows.
    """
    from torch.nn.attention.varlen import varlen_attn

    options = dict(_varlen_options() or {})
    if not options:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    seen = (scoring.window - 1 if scoring.window else -1, 0)
    attended = varlen_attn(
        query, key, value, query_ends, key_ends, longest, longest, scale=scoring.scale, window_size=seen, **options
    )
    return cast(Tensor, attended)


@functools.cache
def _varlen_options() -> Mapping[str, Any] | None:
    """What PyTorch's kernel needs to be told about shared heads; None if this version has none with the options."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before 2.10
        return None
    known = inspect.signature(varlen_attn).parameters.keys()
    if not known >= {"scale", "window_size"}:  # the first that had it
        return None
    return {"enable_gqa": True} if "enable_gqa" in known else {}


# Attention of tokens to their own sequences, whose earlier tokens are in the cache.


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Tokens of one sequence that are computed together: a sampled one, or a piece of a prompt."""

    rooms: Sequence[PageTable]
    """The rooms of the sequence, at least up to the last of these tokens."""
    start: int
    count: int = 1

    @property
    def end(self) -> int:
        return self.start + self.count

    def first_pages(self, kind: AttentionKind) -> np.ndarray:
        """Pages of the blocks that start with one of these tokens."""
        return pages_of(self.rooms, kind, blocks_for(self.start), blocks_for(self.end)).ravel()

    def slots(self, kind: AttentionKind) -> np.ndarray:
        """The tokens' slots in the pool: [tokens, strata]."""
        first = self.start // BLOCK
        pages = pages_of(self.rooms, kind, first, blocks_for(self.end))
        positions = np.arange(self.start, self.end)
        return pages[positions // BLOCK - first] * BLOCK + (positions % BLOCK)[:, None]


class CachedAttention:
    """Attention of a pack's spans, in the order of its rows, to their sequences; further rows at the end get zeros.

    Each layer first puts its keys and values into the cache. Shapes are rounded up to powers of two: so there are few.
    """

    def __init__(self, cache: KeyValueCache, spans: Sequence[Span]) -> None:
        self.spans = spans
        states = self.states = cache.states
        self.places = [] if states is None else [states.place(span.rooms, span.start) for span in spans]
        """Of the states of the spans' sequences."""
        self._cache = cache
        present = [kind for kind in AttentionKind if cache.layout.strata[kind]]
        cache.clear(np.concatenate([span.first_pages(kind) for kind in present for span in spans]))
        self._sights = {kind: _KindSpans(cache, spans, kind) for kind in present}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        place = self._cache.layout.places[layer]
        of_kind = self._sights[place.kind]
        slots = of_kind.slots[place.stratum]
        keys, values = self._cache.keys[place.depth], self._cache.values[place.depth]
        keys.flatten(0, 1).index_copy_(0, slots, key[: len(slots)])
        values.flatten(0, 1).index_copy_(0, slots, value[: len(slots)])
        attended = query.new_zeros(*query.shape[:2], value.shape[2])
        for group in of_kind.groups:
            group.attend(attended, query, keys, values, place.stratum, scoring)
        return attended


class _KindSpans:
    """The slots of the spans' tokens, and the spans in groups, for the layers of one kind."""

    def __init__(self, cache: KeyValueCache, spans: Sequence[Span], kind: AttentionKind) -> None:
        device = cache.keys.device
        slots = np.concatenate([span.slots(kind) for span in spans])
        self.slots = torch.from_numpy(np.ascontiguousarray(slots.T)).to(device)
        """[strata, rows]."""
        alike: dict[tuple[int, int], list[_Member]] = defaultdict(list)
        row = 0
        for span in spans:
            width = 1 if span.count == 1 else max(BLOCK, _power_of_two(span.count))
            # Of a window, what is before the first token's is not there any more.
            first = max(0, span.start - cache.layout.window + 1) // BLOCK if kind is AttentionKind.SLIDING else 0
            pages = pages_of(span.rooms, kind, first, blocks_for(span.end))
            blocks = _power_of_two(len(pages))
            if kind is AttentionKind.SLIDING:
                blocks = min(blocks, cache.layout.ring(width))
            alike[width, blocks].append(_Member(span, row, first * BLOCK, pages))
            row += span.count
        self.groups = [_SpanGroup(members, width, blocks, device) for (width, blocks), members in alike.items()]


@dataclass(frozen=True, slots=True)
class _Member:
    span: Span
    row: int
    from_position: int
    """The first position of the sequence that the span sees."""
    pages: np.ndarray
    """The pages that it sees: [blocks, strata]."""


class _SpanGroup:
    """Spans that are computed in one shape: padded to `width` rows by the last one, to `blocks` by the zero page."""

    def __init__(self, members: Sequence[_Member], width: int, blocks: int, device: torch.device) -> None:
        tables = np.full((len(members), blocks, members[0].pages.shape[1]), NO_PAGE)
        for place, member in enumerate(members):
            tables[place, : len(member.pages)] = member.pages
        described = [(each.row, each.span.start - each.from_position, each.span.count) for each in members]
        first, start, count = np.array(described).T[:, :, None]
        offsets = np.minimum(np.arange(width), count - 1)
        rows = (first + offsets).ravel()
        real = np.flatnonzero(np.arange(width) < count)
        self._shape = (len(members), width)
        self._length = blocks * BLOCK
        self._tables = torch.from_numpy(np.ascontiguousarray(tables.reshape(-1, tables.shape[2]).T)).to(device)
        """[strata, spans x blocks]."""
        self._rows = torch.from_numpy(rows).to(device)
        self._real = None if len(real) == len(rows) else torch.from_numpy(real).to(device)
        self._positions = torch.from_numpy((start + offsets).astype(np.int32)).to(device)
        """Positions of the rows, counted from the first position that their span sees."""
        self._mask: Tensor | None = None
        """Of all layers of one kind: [spans, 1, width, length]."""
        self._past: tuple[Tensor, ...] | None = None
        """Keys and values of the spans' sequences; each layer overwrites those of the one before."""
        self._picked: tuple[Tensor, ...] | None = None
        """The same as read from the cache, if attention computes in another type."""

    def attend(
        self, attended: Tensor, query: Tensor, keys: Tensor, values: Tensor, stratum: int, scoring: Scoring
    ) -> None:
        heads = keys.shape[-2]
        dtype = computed_in(query)
        if self._past is None:
            pages = self._tables.shape[1]
            self._past = tuple(pool.new_empty((pages, pool[0].numel()), dtype=dtype) for pool in (keys, values))
            self._picked = None if keys.dtype == dtype else tuple(past.to(keys.dtype) for past in self._past)
        for pool, past, picked in zip((keys, values), self._past, self._picked or self._past, strict=True):
            torch.index_select(pool.flatten(1), 0, self._tables[stratum], out=picked)
            if picked is not past:
                past.copy_(picked)
        laid = [past.view(self._shape[0], self._length, heads, -1).transpose(1, 2) for past in self._past]
        asked = query.index_select(0, self._rows).to(dtype).view(*self._shape, heads, -1, query.shape[2])
        if self._mask is None:
            places = torch.arange(self._length, dtype=torch.int32, device=self._positions.device)
            self._mask = _causal_mask(self._positions[:, None, :, None] - places, scoring.window, dtype)
        answer = _attend_to_cache(asked, laid[0], laid[1], self._mask, scoring)
        answer = answer.reshape(-1, *attended.shape[1:]).to(attended.dtype)
        if self._real is None:
            attended.index_copy_(0, self._rows, answer)
        else:
            attended.index_copy_(0, self._rows[self._real], answer[self._real])


def _attend_to_cache(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    """`query` is [spans, width, key heads, queries a key, head width], the others [spans, key heads, length, width]."""
    shared, sinks = query.shape[3], scoring.sinks
    sinks = None if sinks is None else sinks.view(-1, shared)
    if query.shape[1] > 1:
        each = [
            _weighed(rows.transpose(1, 2), key, value, mask, scoring, None if sinks is None else sinks[:, head, None])
            for head, rows in enumerate(query.unbind(dim=3))
        ]
        return torch.stack(each, dim=-2).transpose(1, 2)
    # The heads that share a key are rows of one product. On the CPU, products of fewer than four rows are rounded by
    # the size of the batch: so rows are repeated.
    rows = query.squeeze(1)
    copies = 4 // math.gcd(shared, 4) if query.device.type == "cpu" else 1
    if copies > 1:
        rows = rows.repeat(1, 1, copies, 1)
        sinks = None if sinks is None else sinks.repeat(1, copies)
    return _weighed(rows, key, value, mask, scoring, sinks)[:, :, :shared].unsqueeze(1)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()

"""One token for each of many sequences, by a CUDA graph for each number of them; what changes lies on the GPU.

Every sequence has a slot: its last token, its position, its pages and its rule. A step is told the slots, and one draw
for each; it leaves the next tokens there, so that the step after it can be started before anyone has read them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from trainmaster.engine.adapter_stack import AdapterStack, PlacedRows
from trainmaster.engine.attention import Scoring
from trainmaster.engine.cache import AttentionKind, KeyValueCache, PageTable, blocks_for, pages_of
from trainmaster.engine.kernels.adapter_products import most_segments, segment_rows, segments_of
from trainmaster.engine.kernels.cached_attention import attend_to_pages
from trainmaster.engine.kernels.slots import advance_slots
from trainmaster.engine.kernels.token_choice import RowRules, choose_tokens
from trainmaster.engine.logprobs import Rule
from trainmaster.engine.model import Transformer, Unembedding
from trainmaster.engine.products import wide_product
from trainmaster.engine.transfers import on_device

_log = logging.getLogger(__name__)
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of sequences that have graphs; steps of fewer are filled with spare rows."""
_LEAST, _MOST = 1e-30, 1e30
"""Of temperatures and top-p, by which kernels divide and multiply in float32."""
_MOST_TOP_K = 2**31 - 1
"""Of 32 bits; as many as there are tokens leave none out."""
_USES_BEFORE = 2
"""Steps before a graph is made: they compile the kernels, and many weights are sampled from for a few steps only."""


@dataclass(frozen=True, slots=True, eq=False)
class Joining:
    """A sequence that is about to be decoded; its first token follows by `advance`."""

    slot: int
    rooms: Sequence[PageTable]
    length: int
    """Positions that it may have in all."""
    position: int
    """Of the last token of its prompt."""
    rule: Rule


class DecodeSlots:
    def __init__(self, cache: KeyValueCache, *, sequences: int, longest: int) -> None:
        device = cache.keys.device
        self.cache = cache
        self.spare = sequences
        self.free = list(range(sequences - 1, -1, -1))
        self.tokens = torch.zeros(sequences + 1, dtype=torch.int64, device=device)
        self.positions = torch.zeros(sequences + 1, dtype=torch.int64, device=device)
        self.temperatures = torch.zeros(sequences + 1, device=device)
        self.top_ks = torch.zeros(sequences + 1, dtype=torch.int32, device=device)
        self.top_ps = torch.ones(sequences + 1, device=device)
        self._first_strata = (0, cache.layout.strata[AttentionKind.FULL])
        blocks = blocks_for(longest) + 1
        self.tables = torch.zeros(sum(cache.layout.strata), sequences + 1, blocks, dtype=torch.int32, device=device)

    def join(self, joining: Sequence[Joining]) -> None:
        device = self.tables.device
        slots = on_device([each.slot for each in joining], device, torch.int64)
        for own, values in (
            (self.positions, [each.position for each in joining]),
            (self.temperatures, [_temperature(each.rule) for each in joining]),
            (self.top_ks, [min(max(each.rule.top_k, 0), _MOST_TOP_K) for each in joining]),
            (self.top_ps, [max(each.rule.top_p, _LEAST) for each in joining]),
        ):
            own.index_copy_(0, slots, on_device(values, device, own.dtype))
        blocks = max(blocks_for(each.length) for each in joining)
        for kind, first in zip(AttentionKind, self._first_strata, strict=True):
            strata = self.cache.layout.strata[kind]
            if not strata:
                continue
            pages = np.zeros((strata, len(joining), blocks), dtype=np.int32)
            for row, each in enumerate(joining):
                own_pages = pages_of(each.rooms, kind, 0, blocks_for(each.length))
                pages[:, row, : len(own_pages)] = own_pages.T
            fresh = on_device(pages, device)
            self.tables[first : first + strata, :, :blocks].index_copy_(1, slots, fresh)

    def advance(self, rows: Tensor, chosen: Tensor) -> None:
        """Make these the last tokens of the sequences in these slots."""
        advance_slots(rows, chosen, self.tokens, self.positions)

    def stratum(self, layer: int) -> int:
        place = self.cache.layout.places[layer]
        return self._first_strata[place.kind] + place.stratum

    def rules(self, rows: Tensor, draws: Tensor) -> RowRules:
        return RowRules(
            self.temperatures.index_select(0, rows),
            self.top_ks.index_select(0, rows),
            self.top_ps.index_select(0, rows),
            draws,
        )


class _SlotAttention:
    """Attention of one token of each sequence; its keys and values go to the cache first."""

    def __init__(self, slots: DecodeSlots, rows: Tensor, positions: Tensor) -> None:
        self._slots, self._rows, self._positions = slots, rows, positions

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        cache = self._slots.cache
        depth = cache.layout.places[layer].depth
        return attend_to_pages(
            query,
            key,
            value,
            cache.keys[depth],
            cache.values[depth],
            self._slots.tables[self._slots.stratum(layer)],
            self._rows,
            self._positions,
            scale=scoring.scale,
            window=scoring.window,
            softcap=scoring.softcap,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    tokens: Tensor
    logprobs: Tensor
    logits: Tensor


def logits_of(hidden: Tensor, unembedding: Unembedding, adapters: PlacedRows | None) -> Tensor:
    """Float32 [n, vocabulary]."""
    logits = wide_product(hidden, unembedding.weight)
    if adapters is not None:
        adapters.stack.add((unembedding.target,), hidden, logits, adapters.segments)
    if cap := unembedding.logit_softcap:
        logits.div_(cap).tanh_().mul_(cap)
    return logits


class Decoder:
    """Steps of one set of base weights."""

    def __init__(self, slots: DecodeSlots, *, tempered_logprobs: bool) -> None:
        self._slots = slots
        self._tempered = tempered_logprobs
        self._steps: dict[tuple[int, bool, bool], _Step] = {}
        """By the number of rows, whether there are adapters, and whether rules leave tokens out."""
        self._stack: AdapterStack | None = None

    def step(
        self,
        transformer: Transformer,
        rows: Sequence[int],
        draws: Sequence[float],
        places: Sequence[int],
        *,
        stack: AdapterStack | None,
        filtered: bool,
    ) -> Chosen:
        """The next tokens of the sequences in these slots; results are valid until the next step."""
        if stack is not None and stack is not self._stack:
            self._stack = stack
            self._steps = {key: step for key, step in self._steps.items() if not key[1]}
        size = next((size for size in _SIZES if size >= len(rows)), -(-len(rows) // _SIZES[-1]) * _SIZES[-1])
        key = (size, stack is not None, filtered)
        if key not in self._steps:
            self._steps[key] = _Step(self._slots, size, stack, filtered=filtered, tempered=self._tempered)
        return self._steps[key].run(transformer, rows, draws, places)


class _Step:
    """A step of so many rows: by a graph, once it has been used a few times."""

    def __init__(
        self, slots: DecodeSlots, size: int, stack: AdapterStack | None, *, filtered: bool, tempered: bool
    ) -> None:
        device = slots.tables.device
        self._slots, self._size, self._stack = slots, size, stack
        self._filtered, self._tempered = filtered, tempered
        self._segments = 0 if stack is None else most_segments(size, stack.places)
        self._inputs = torch.zeros(2 * size + 3 * self._segments, dtype=torch.float64, device=device)
        """Rows, draws, and the segments of rows with adapters: one copy brings all."""
        self._uses = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._chosen: Chosen | None = None

    def run(
        self, transformer: Transformer, rows: Sequence[int], draws: Sequence[float], places: Sequence[int]
    ) -> Chosen:
        given = np.zeros(len(self._inputs))
        given[: self._size] = self._slots.spare
        given[: len(rows)], given[self._size : self._size + len(rows)] = rows, draws
        if self._segments:
            segments = segments_of(np.array(places), segment_rows(self._size))
            given[2 * self._size : 2 * self._size + segments.size] = segments.ravel()
        self._inputs.copy_(on_device(given, self._inputs.device))
        if self._uses == _USES_BEFORE and self._inputs.is_cuda:
            self._capture(transformer)
        self._uses += 1
        if self._graph is None:
            return self._computed(transformer)
        self._graph.replay()
        assert self._chosen is not None
        return self._chosen

    def _capture(self, transformer: Transformer) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                _no_garbage_collection(),
                torch.cuda.graph(graph, pool=cast(Any, _pool().id), capture_error_mode="thread_local"),
            ):
                self._chosen = self._computed(transformer)
        except torch.OutOfMemoryError:
            _log.warning("a step of %d sequences has no memory for a graph: it runs kernel by kernel", self._size)
            return
        self._graph = graph

    def _computed(self, transformer: Transformer) -> Chosen:
        slots = self._slots
        size = self._size
        rows, draws = self._inputs[:size].to(torch.int64), self._inputs[size : 2 * size].to(torch.float32)
        adapters = None
        if self._stack is not None:
            adapters = PlacedRows(self._stack, self._inputs[2 * size :].to(torch.int32).view(-1, 3), size)
        tokens, positions = slots.tokens.index_select(0, rows), slots.positions.index_select(0, rows)
        hidden = transformer.hidden(tokens, positions, _SlotAttention(slots, rows, positions), adapters)
        logits = logits_of(hidden, transformer.unembedding, adapters)
        rules = slots.rules(rows, draws)
        chosen, logprobs = choose_tokens(logits, rules, filtered=self._filtered, tempered=self._tempered)
        slots.advance(rows, chosen)
        return Chosen(chosen, logprobs, logits)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """CUDA graphs that nobody uses any more must not be destroyed while another one is captured: that would fail."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _temperature(rule: Rule) -> float:
    return 0.0 if rule.is_greedy else min(max(rule.temperature, _LEAST), _MOST)


@functools.cache
def _pool() -> torch.cuda.MemPool:
    """Memory that all graphs share: they run one after the other."""
    return torch.cuda.MemPool()

"""Steps of sampling on the GPU: one token of each continuation by a CUDA graph, and prompts in packs beside them.

Nobody waits for a token: a step is started while the results of the one before are on their way to the host. So a
continuation that a stop token ends has been computed one token further; that one is dropped.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from trainmaster.engine.adapter_stack import AdapterStack, PlacedRows
from trainmaster.engine.adapters import Adapter
from trainmaster.engine.cache import AttentionKind
from trainmaster.engine.continuations import PIECE, Continuation, Generation
from trainmaster.engine.decoding import Chosen, Decoder, DecodeSlots, Joining, logits_of
from trainmaster.engine.kernels.adapter_products import segment_rows, segments_of
from trainmaster.engine.kernels.token_choice import choose_tokens
from trainmaster.engine.logprobs import likeliest
from trainmaster.engine.memory import free_bytes
from trainmaster.engine.model import Transformer
from trainmaster.engine.prompt_attention import PromptAttention
from trainmaster.engine.prompts import Piece, lay_out, note_read, prompt_pieces
from trainmaster.engine.running_requests import RunningRequests
from trainmaster.engine.transfers import Fetched, on_device

_PROMPT_TOKENS = 2048
"""Prompt tokens in one step: running continuations wait for them, some 50 ms with 8 billion weights."""
_STACK_SHARE = 0.25
"""Of the free memory, for adapters that the next step does not need."""
MOST_ADAPTERS = 32
"""Adapters of one step; the rows of more are computed in several."""


@dataclass(slots=True, eq=False)
class _Running:
    """A continuation that has a slot."""

    generation: Generation
    continuation: Continuation
    slot: int
    started: int = 1
    """Tokens that are chosen, or being chosen."""

    @property
    def wants_more(self) -> bool:
        return not self.continuation.is_over and self.started < self.generation.new_tokens


@dataclass(frozen=True, slots=True, eq=False)
class _Results:
    owners: Sequence[_Running]
    wanting: Sequence[Sequence[int]]
    """The rows that want their likeliest tokens; those of a group want as many."""
    fetched: Fetched
    """Tokens, logprobs, and of each group the likeliest tokens and their logprobs."""


class GraphSteps:
    def __init__(self, requests: RunningRequests, *, longest: int, max_sequences: int, tempered_logprobs: bool) -> None:
        self._requests = requests
        self._longest, self._max_sequences = longest, max_sequences
        self._tempered = tempered_logprobs
        self._decoders: WeakKeyDictionary[Transformer, Decoder] = WeakKeyDictionary()
        self._stacks: WeakKeyDictionary[Transformer, AdapterStack] = WeakKeyDictionary()
        self._running: dict[Continuation, _Running] = {}
        self._results: list[_Results] = []

    def advance(self, by_weights: Mapping[Transformer, Sequence[Generation]]) -> None:
        self._free_slots()
        before, self._results = self._results, []
        piece = PIECE if self._requests.cache.layout.strata[AttentionKind.SLIDING] else None
        for transformer, generations in by_weights.items():
            pieces = prompt_pieces(generations, piece=piece, at_once=_PROMPT_TOKENS)
            with self._requests.blaming([piece.generation for piece in pieces]):
                self._read_prompts(transformer, pieces)
            read = [each for each in generations if each.is_read]
            with self._requests.blaming(read):
                self._begin(read)
                self._decode(transformer, read)
        for results in before:
            self._take(results)
        self._free_slots()

    def _free_slots(self) -> None:
        """Take back the slots of what has ended; what was cancelled since the last step must not keep its own."""
        for running in [each for each in self._running.values() if each.continuation.is_over]:
            del self._running[running.continuation]
            self._slots.free.append(running.slot)

    @functools.cached_property
    def _slots(self) -> DecodeSlots:
        return DecodeSlots(self._requests.cache, sequences=self._max_sequences, longest=self._longest)

    def _read_prompts(self, transformer: Transformer, pieces: list[Piece]) -> None:
        if not pieces:
            return
        device = transformer.device
        lay_out(pieces)
        own_adapters = [piece.adapter for piece in pieces]
        counts = [piece.span.count for piece in pieces]
        tokens = np.concatenate([piece.tokens for piece in pieces])
        positions = np.concatenate([np.arange(piece.span.start, piece.span.end) for piece in pieces])
        hidden = transformer.hidden(
            on_device(tokens, device, torch.int64),
            on_device(positions, device, torch.int64),
            PromptAttention(self._requests.cache, [piece.span for piece in pieces]),
            self._adapters(transformer, own_adapters, counts),
        )
        note_read(transformer, pieces, hidden)
        if ending := [piece for piece in pieces if piece.chooses]:
            last = hidden.index_select(0, on_device([piece.last_row for piece in ending], device, torch.int64))
            adapters = self._adapters(transformer, [piece.adapter for piece in ending], [1] * len(ending))
            for each, logits in zip(ending, logits_of(last, transformer.unembedding, adapters), strict=True):
                each.generation.logits = logits

    def _begin(self, generations: Sequence[Generation]) -> None:
        """Choose the first tokens of continuations whose prompts have been read, and give them slots."""
        fresh: list[_Running] = []
        logits: list[Tensor] = []
        copies: list[tuple[np.ndarray, np.ndarray]] = []
        for generation in generations:
            if generation.logits is None:
                continue
            if not generation.new_tokens:
                self._requests.end_without_tokens(generation)
            for continuation in generation.running:
                if continuation in self._running:
                    continue
                running = _Running(generation, continuation, self._slots.free.pop())
                self._running[continuation] = running
                fresh.append(running)
                logits.append(generation.logits)
                if generation.new_tokens > 1:
                    copies += generation.fork(continuation)
            if generation.started == generation.request.num_samples:
                generation.logits = None
        if not fresh:
            return
        if copies:
            sources, targets = (np.concatenate(each) for each in zip(*copies, strict=True))
            self._requests.cache.copy(sources, targets)
        self._slots.join([_joining(running) for running in fresh])
        together = torch.stack(logits)
        rows = on_device([running.slot for running in fresh], together.device, torch.int64)
        draws = on_device([running.continuation.draw() for running in fresh], together.device, torch.float32)
        tokens, logprobs = choose_tokens(
            together, self._slots.rules(rows, draws), filtered=_filtered(fresh), tempered=self._tempered
        )
        self._slots.advance(rows, tokens)
        self._send(fresh, Chosen(tokens, logprobs, together))

    def _decode(self, transformer: Transformer, generations: Sequence[Generation]) -> None:
        running = [
            self._running[each] for generation in generations for each in generation.running if each in self._running
        ]
        running = [each for each in running if each.wants_more]
        numbers: dict[Adapter | None, int] = {}
        for each in running:
            numbers.setdefault(each.generation.snapshot.adapter, len(numbers))
        running.sort(key=lambda each: numbers[each.generation.snapshot.adapter])
        for _, together in itertools.groupby(
            running, key=lambda each: numbers[each.generation.snapshot.adapter] // MOST_ADAPTERS
        ):
            self._decode_together(transformer, list(together))

    def _decode_together(self, transformer: Transformer, running: Sequence[_Running]) -> None:
        if transformer not in self._decoders:
            self._decoders[transformer] = Decoder(self._slots, tempered_logprobs=self._tempered)
        stack, places = self._places(transformer, [each.generation.snapshot.adapter for each in running])
        rows = [each.slot for each in running]
        draws = [each.continuation.draw() for each in running]
        filtered = _filtered(running)
        chosen = self._decoders[transformer].step(transformer, rows, draws, places, stack=stack, filtered=filtered)
        for each in running:
            each.started += 1
        self._send(running, chosen)

    def _adapters(
        self, transformer: Transformer, adapters: Sequence[Adapter | None], counts: Sequence[int]
    ) -> PlacedRows | None:
        """The adapters of parts of so many rows."""
        stack, places = self._places(transformer, adapters)
        if stack is None:
            return None
        total = sum(counts)
        segments = segments_of(np.repeat(places, counts), segment_rows(total))
        return PlacedRows(stack, on_device(segments, transformer.device), total)

    def _places(
        self, transformer: Transformer, adapters: Sequence[Adapter | None]
    ) -> tuple[AdapterStack | None, list[int]]:
        """A stack that holds the adapters, and the place of each in it, -1 for None; None if all are None."""
        distinct = list(dict.fromkeys(adapter for adapter in adapters if adapter is not None))
        if not distinct:
            return None, [-1] * len(adapters)
        stack = self._stacks.get(transformer)
        if stack is None or not stack.holds(distinct):
            known = [] if stack is None else [each for each in stack.owners if each not in distinct]
            together = _that_may_be_held([*distinct, *known], len(distinct), transformer)
            stack = AdapterStack(together, transformer.device, transformer.dtype)
            self._stacks[transformer] = stack
        found = stack.place(distinct)
        return stack, [-1 if adapter is None else found[adapter] for adapter in adapters]

    def _send(self, owners: Sequence[_Running], chosen: Chosen) -> None:
        """Start the copies of results to the host."""
        count = len(owners)
        by_count: dict[int, list[int]] = defaultdict(list)
        for row, owner in enumerate(owners):
            if wanted := owner.generation.request.topk_sample_logprobs:
                by_count[wanted].append(row)
        found = [chosen.tokens[:count], chosen.logprobs[:count]]
        for wanted, rows in by_count.items():
            own = on_device(rows, chosen.logits.device, torch.int64)
            found += likeliest(chosen.logits.index_select(0, own), wanted)
        # Of one type, which holds tokens and logprobs exactly, for one copy.
        fetched = Fetched([each.to(torch.float64) for each in found])
        self._results.append(_Results(owners, list(by_count.values()), fetched))

    def _take(self, results: _Results) -> None:
        tokens, logprobs, *found = results.fetched.arrays()
        topk = {
            row: (ids[place].astype(np.int32), own[place].astype(np.float32))
            for rows, ids, own in zip(results.wanting, found[::2], found[1::2], strict=True)
            for place, row in enumerate(rows)
        }
        for row, owner in enumerate(results.owners):
            if owner.continuation.is_over:
                continue
            with self._requests.blaming([owner.generation]):
                if row in topk:
                    owner.continuation.topk.append(topk[row])
                self._requests.accept(owner.generation, owner.continuation, int(tokens[row]), float(logprobs[row]))


def _joining(running: _Running) -> Joining:
    generation = running.generation
    assert generation.room is not None
    length = len(generation.request.prompt)
    return Joining(
        slot=running.slot,
        rooms=running.continuation.rooms or (generation.room,),
        length=length + max(generation.new_tokens - 1, 0),
        position=length - 1,
        rule=generation.rule,
    )


def _that_may_be_held(adapters: Sequence[Adapter], needed: int, transformer: Transformer) -> Sequence[Adapter]:
    """The first ones, which are needed, and the others, unless a stack of all takes much of the free memory.

    A stack has places of the highest rank for all of them. Those that are left out are copied again when they come.
    """
    held = adapters[: max(needed, MOST_ADAPTERS)]
    fits = AdapterStack.bytes_of(held, transformer.dtype) <= _room_for_stack(transformer.device)
    return held if fits else adapters[:needed]


def _room_for_stack(device: torch.device) -> float:
    return _STACK_SHARE * free_bytes(device) if device.type == "cuda" else math.inf


def _filtered(running: Iterable[_Running]) -> bool:
    return any(each.generation.rule.is_filtered and not each.generation.rule.is_greedy for each in running)

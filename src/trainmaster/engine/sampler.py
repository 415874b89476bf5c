"""Continuous batching: requests join and leave at any step, and use the very weights that are trained.

A step computes one token for every running continuation, together with a piece of each new prompt. All adapters of one
base model share the step; each set of full weights has its own.

The cache is given out in order of arrival, for all that a continuation may need, so that one that started can also
finish. A result follows from its snapshot and its seed: prompts are split by their own length alone, and on the CPU no
row depends on the others.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from trainmaster.engine.adapters import Adapter, AdapterRows
from trainmaster.engine.attention import CachedAttention, Span
from trainmaster.engine.cache import BLOCK, KeyValueCache, Layout, blocks_for
from trainmaster.engine.continuations import PIECE, Continuation, Generation, check, end_tokens, read_tokenizer
from trainmaster.engine.logprobs import (
    all_logits,
    choose,
    likeliest,
    logprobs_of,
    target_logprobs,
    tempered_logprobs_of,
    top_logprobs,
)
from trainmaster.engine.model import Transformer
from trainmaster.engine.products import ROWS
from trainmaster.engine.trained_model import WeightsSnapshot
from trainmaster.engine.types import Blame, EngineError, SampleRequest, SampleResult, StopReason

MAX_SEQUENCES = 256
"""Continuations that run at once; with more, each would wait longer for a token."""
_PIECES_TOKENS = 1024
"""Prompt tokens in one step: running continuations wait for them."""
_CPU_CACHE_BYTES = 2 << 30
"""Unused pages are never touched, and so take no memory."""

_log = logging.getLogger(__name__)


class Sampler:
    """Takes requests, and returns results as they finish. For one thread.

    `checkpoint` has the tokenizer and the end-of-text tokens. `cache_bytes` None: a quarter of what is free on the GPU,
    2 GiB on the CPU; never more than `max_sequences` of the longest could use. With `tempered_logprobs`, tokens get the
    logprobs of the distribution that they were drawn from instead of the model's own, which training computes.
    """

    def __init__(
        self,
        transformer: Transformer,
        checkpoint: Path,
        *,
        context_length: int | None = None,
        cache_bytes: int | None = None,
        max_sequences: int = MAX_SEQUENCES,
        tempered_logprobs: bool = False,
    ) -> None:
        self._transformer = transformer
        self._checkpoint = checkpoint
        self._context = context_length or transformer.config.max_positions
        self._cache_bytes = cache_bytes
        self._max_sequences = max_sequences
        self._tempered = tempered_logprobs
        self._end_tokens = end_tokens(checkpoint)
        self._tokenizer: Tokenizer | None = None
        self._cache_or_none: KeyValueCache | None = None
        self._generations: dict[str, Generation] = {}
        """By request id, in order of arrival."""
        self._ended: list[tuple[str, SampleResult | EngineError]] = []

    @property
    def pending(self) -> int:
        return len(self._generations)

    @property
    def load(self) -> float:
        """The share of pages or sequences that unfinished requests would use; above 1, some wait."""
        if not self._generations:
            return 0.0
        generations = self._generations.values()
        pages = sum(
            self._prompt_pages(generation) + self._own_pages(generation) * generation.wanted_sequences
            for generation in generations
        )
        sequences = sum(generation.wanted_sequences for generation in generations)
        return max(pages / self._cache.pages, sequences / self._max_sequences)

    def submit(self, request: SampleRequest, snapshot: WeightsSnapshot) -> None:
        if request.request_id in self._generations:
            raise EngineError(f"request {request.request_id} is under way; give each an id of its own")
        vocabulary = self._transformer.config.vocab_size
        new_tokens = check(request, self._cache, vocabulary=vocabulary, context=self._context)
        if request.stop_strings and self._tokenizer is None:
            self._tokenizer = read_tokenizer(self._checkpoint)
        self._generations[request.request_id] = Generation(
            request,
            snapshot,
            new_tokens=new_tokens,
            ends=self._end_tokens if request.stop_tokens is None else frozenset(request.stop_tokens),
            tokenizer=self._tokenizer if request.stop_strings else None,
        )

    def cancel(self, request_id: str) -> bool:
        """Drop a request; returns whether there was one. It gets no result."""
        generation = self._generations.pop(request_id, None)
        if generation is None:
            return False
        self._release(generation)
        return True

    @torch.no_grad()
    def step(self) -> list[tuple[str, SampleResult | EngineError]]:
        """Compute one token of every running continuation; returns the results of requests that ended."""
        by_weights: dict[Transformer, list[Generation]] = defaultdict(list)
        for generation in self._admitted():
            by_weights[generation.snapshot.transformer].append(generation)
        for transformer, generations in by_weights.items():
            try:
                self._advance(transformer, generations)
            except Exception as error:  # whatever it is, it is about these requests and no others
                _log.exception("a step of sampling failed")
                for generation in generations:
                    self._end(generation, EngineError(f"sampling failed: {error}", Blame.SERVER))
        ended, self._ended = self._ended, []
        return ended

    @property
    def _cache(self) -> KeyValueCache:
        """Allocated on first use: many processes train and never sample."""
        if self._cache_or_none is None:
            self._cache_or_none = _new_cache(
                self._transformer, self._cache_bytes, longest=self._context, sequences=self._max_sequences
            )
        return self._cache_or_none

    def _prompt_pages(self, generation: Generation) -> int:
        layout = self._cache.layout
        return layout.pages(generation.prompt_blocks, layout.ring(PIECE))

    def _own_pages(self, generation: Generation) -> int:
        layout = self._cache.layout
        return layout.pages(generation.own_blocks, layout.ring(1))

    def _admitted(self) -> list[Generation]:
        """Give out pages in order of arrival; returns the requests that have some."""
        running = sum(len(generation.running) for generation in self._generations.values())
        admitted: list[Generation] = []
        cache, layout = self._cache, self._cache.layout
        for generation in self._generations.values():
            while generation.started < generation.request.num_samples:
                needed = self._own_pages(generation) + (0 if generation.room else self._prompt_pages(generation))
                if running >= self._max_sequences or needed > cache.free:
                    return [*admitted, generation] if generation.room else admitted
                if not generation.room:
                    generation.room = cache.take(0, generation.prompt_blocks, layout.ring(PIECE))
                blocks = generation.own_blocks
                generation.begin(cache.take(generation.first_own_block, blocks, layout.ring(1)) if blocks else None)
                running += 1
            admitted.append(generation)
        return admitted

    def _advance(self, transformer: Transformer, generations: Sequence[Generation]) -> None:
        choices: list[_Choice] = []
        if pieces := _pieces(generations):
            hidden = _hidden(transformer, self._cache, pieces)
            _read_prompts(transformer, pieces, hidden)
            ending = [piece for piece in pieces if piece.chooses]
            if ending:
                last = hidden[[piece.row + piece.span.count - 1 for piece in ending]]
                adapters = _adapter_rows((piece, 1) for piece in ending)
                computed = all_logits(last, transformer.unembedding, adapters)
                for piece, logits in zip(ending, computed, strict=True):
                    if piece.continuation is None:
                        piece.generation.logits = logits.clone()
                    else:
                        choices.append(_Choice(piece.generation, piece.continuation, logits))
        for generation in generations:
            if generation.logits is not None and generation.new_tokens:
                choices += [_Choice(generation, each, generation.logits) for each in generation.fresh]
            elif generation.logits is not None:  # no tokens are asked for, or the prompt fills the context
                for continuation in generation.fresh:
                    generation.end(continuation, StopReason.LENGTH)
                if generation.is_done:
                    self._end(generation, generation.result())
            if generation.started == generation.request.num_samples:
                generation.logits = None
        if choices:
            self._choose(choices)

    def _choose(self, choices: Sequence[_Choice]) -> None:
        logits = torch.stack([choice.logits for choice in choices])
        rules = [choice.generation.rule for choice in choices]
        tokens = choose(logits, rules, [choice.continuation.draw() for choice in choices])
        logprobs = tempered_logprobs_of(logits, rules, tokens) if self._tempered else logprobs_of(logits, tokens)
        _note_likeliest(choices, logits)
        copies: list[tuple[np.ndarray, np.ndarray]] = []
        for choice, token, logprob in zip(choices, tokens.tolist(), logprobs.tolist(), strict=True):
            generation, continuation = choice.generation, choice.continuation
            if continuation not in generation.running:
                continue  # another one of its request failed
            if not math.isfinite(logprob):
                self._end(generation, EngineError("the model gives no probabilities but NaN: its weights diverged"))
            elif generation.accept(continuation, token, logprob):
                self._give_back(continuation)
                if generation.is_done:
                    self._end(generation, generation.result())
            elif not continuation.rooms:
                copies += generation.fork(continuation)
        if copies:
            sources, targets = (np.concatenate(each) for each in zip(*copies, strict=True))
            self._cache.copy(sources, targets)

    def _end(self, generation: Generation, outcome: SampleResult | EngineError) -> None:
        if self._generations.pop(generation.request.request_id, None) is not None:
            self._release(generation)
            self._ended.append((generation.request.request_id, outcome))

    def _release(self, generation: Generation) -> None:
        for continuation in generation.running:
            self._give_back(continuation)
        if generation.room:
            self._cache.give_back(generation.room)
        generation.running, generation.room = [], None

    def _give_back(self, continuation: Continuation) -> None:
        if continuation.room:
            self._cache.give_back(continuation.room)


@dataclass(frozen=True, slots=True)
class _Choice:
    generation: Generation
    continuation: Continuation
    logits: Tensor


@dataclass(slots=True, kw_only=True)
class _Piece:
    """Tokens that are computed in a step: the last one of a continuation, or some of a prompt."""

    generation: Generation
    continuation: Continuation | None
    tokens: Sequence[int]
    span: Span
    row: int = 0

    @property
    def adapter(self) -> Adapter | None:
        return self.generation.snapshot.adapter

    @property
    def chooses(self) -> bool:
        return self.continuation is not None or self.span.end == len(self.generation.request.prompt)


def _pieces(generations: Sequence[Generation]) -> list[_Piece]:
    """What to compute, each adapter's rows together."""
    pieces: list[_Piece] = []
    room = _PIECES_TOKENS
    for generation in generations:
        prompt, seen = generation.request.prompt, generation.seen
        if not generation.is_read:
            tokens = prompt[seen : seen + PIECE]
            if len(tokens) <= room and generation.room:
                room -= len(tokens)
                span = Span(rooms=(generation.room,), start=seen, count=len(tokens))
                pieces.append(_Piece(generation=generation, continuation=None, tokens=tokens, span=span))
            continue
        for each in generation.running:
            if each.tokens:
                span = Span(rooms=each.rooms, start=len(prompt) + len(each.tokens) - 1)
                pieces.append(_Piece(generation=generation, continuation=each, tokens=each.tokens[-1:], span=span))
    places: dict[Adapter | None, int] = {}
    pieces.sort(key=lambda piece: places.setdefault(piece.adapter, len(places)))
    row = 0
    for piece in pieces:
        piece.row = row
        row += piece.span.count
    return pieces


def _hidden(transformer: Transformer, cache: KeyValueCache, pieces: Sequence[_Piece]) -> Tensor:
    """Hidden states of all pieces; on the CPU padded with spare rows, so that no product needs to pad."""
    rows = pieces[-1].row + pieces[-1].span.count
    device = transformer.device
    spare = -rows % ROWS if device.type == "cpu" else 0
    tokens, positions = np.zeros(rows + spare, dtype=np.int64), np.zeros(rows + spare, dtype=np.int64)
    for piece in pieces:
        own = slice(piece.row, piece.row + piece.span.count)
        tokens[own] = piece.tokens
        positions[own] = np.arange(piece.span.start, piece.span.end)
    return transformer.hidden(
        torch.from_numpy(tokens).to(device),
        torch.from_numpy(positions).to(device),
        CachedAttention(cache, [piece.span for piece in pieces]),
        _adapter_rows(((piece, piece.span.count) for piece in pieces), spare),
    )


def _adapter_rows(pieces: Iterable[tuple[_Piece, int]], spare: int = 0) -> AdapterRows | None:
    runs = itertools.groupby(pieces, key=lambda pair: pair[0].adapter)
    parts = [(adapter, sum(rows for _, rows in run)) for adapter, run in runs]
    return AdapterRows([*parts, (None, spare)]) if any(adapter for adapter, _ in parts) else None


def _read_prompts(transformer: Transformer, pieces: Sequence[_Piece], hidden: Tensor) -> None:
    """Record that these prompt tokens are in the cache, and the logprobs of the tokens that follow them."""
    for piece in pieces:
        generation, span = piece.generation, piece.span
        if piece.continuation is not None:
            continue
        generation.seen = span.end
        following = generation.request.prompt[span.start + 1 : span.end + 1]
        if not (generation.scores_prompt and following):
            continue
        rows = hidden[piece.row : piece.row + len(following)]
        adapters = AdapterRows([(piece.adapter, len(following))])
        logprobs = target_logprobs(rows, torch.tensor(following, device=rows.device), transformer.unembedding, adapters)
        k = generation.request.topk_prompt_logprobs
        topk = top_logprobs(rows, k, transformer.unembedding, adapters) if k else None
        generation.note_prompt(span.start + 1, logprobs, topk)


def _note_likeliest(choices: Sequence[_Choice], logits: Tensor) -> None:
    by_count: dict[int, list[int]] = defaultdict(list)
    for row, choice in enumerate(choices):
        if count := choice.generation.request.topk_sample_logprobs:
            by_count[count].append(row)
    for count, rows in by_count.items():
        tokens, logprobs = (each.cpu().numpy() for each in likeliest(logits[rows], count))
        for place, row in enumerate(rows):
            choices[row].continuation.topk.append((tokens[place], logprobs[place]))


def _new_cache(transformer: Transformer, memory_bytes: int | None, *, longest: int, sequences: int) -> KeyValueCache:
    config, weight = transformer.config, transformer.unembedding.weight
    if memory_bytes is None:
        memory_bytes = _free_bytes(weight.device) // 4 if weight.device.type == "cuda" else _CPU_CACHE_BYTES
    heads, width = config.num_key_value_heads, config.head_dim
    layout = Layout.of(config.windows, longest)
    page_bytes = 2 * layout.depth * BLOCK * heads * width * weight.element_size()
    most = sequences * layout.pages(blocks_for(longest) + 1, layout.ring(PIECE) + layout.ring(1))
    return KeyValueCache(
        layout,
        heads=heads,
        width=width,
        pages=max(sum(layout.strata), min(memory_bytes // page_bytes, most)),
        device=weight.device,
        dtype=weight.dtype,
    )


def _free_bytes(device: torch.device) -> int:
    """A GPU's free memory, including what PyTorch has reserved without using it."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused

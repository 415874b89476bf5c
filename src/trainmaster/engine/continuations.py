"""A sampling request in progress: what it needs, its continuations and its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer
from torch import Tensor

from trainmaster.engine.cache import BLOCK, Layout, Room, Sight, blocks_for
from trainmaster.engine.decoding import Rule, StringWatch, draws_of
from trainmaster.engine.trained_model import WeightsSnapshot
from trainmaster.engine.types import EngineError, SampledSequence, SampleRequest, SampleResult, StopReason

MAX_TOPK = 1024
"""The most top logprobs per token."""
PIECE = 256
"""Tokens of a prompt that are computed at once."""
NO_LOGPROB = -99999.0
"""The top logprobs of the first token, which has no predecessor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLimits:
    """Limits of one request."""

    vocabulary: int
    context: int
    """Tokens of prompt and continuation together."""
    layout: Layout
    pages: int
    """Pages in the cache."""


def check(request: SampleRequest, limits: SampleLimits) -> int:
    """Check a request; returns the most tokens that each continuation may have."""
    prompt = np.asarray(request.prompt)
    if not prompt.size:
        raise EngineError("the prompt is empty; begin it with the model's first token")
    if not np.issubdtype(prompt.dtype, np.integer):
        raise EngineError("the prompt has something that is no token id")
    if prompt.min() < 0 or prompt.max() >= limits.vocabulary:
        wrong = prompt[(prompt < 0) | (prompt >= limits.vocabulary)][0]
        raise EngineError(f"the prompt has token {wrong}; the model has tokens 0 to {limits.vocabulary - 1}")
    if prompt.size > limits.context:
        raise EngineError(f"the prompt has {prompt.size} tokens, and the context {limits.context}; make it shorter")
    if request.num_samples < 1:
        raise EngineError(f"num_samples is {request.num_samples}; ask for one or more")
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        raise EngineError(f"temperature is {request.temperature}; it is 0 or above")
    if not 0 < request.top_p <= 1:
        raise EngineError(f"top_p is {request.top_p}; it is above 0 and at most 1")
    if request.top_k < -1:
        raise EngineError(f"top_k is {request.top_k}; it is 1 or above, or -1 for all tokens")
    if request.max_tokens is not None and request.max_tokens < 0:
        raise EngineError(f"max_tokens is {request.max_tokens}; it is 0 or above")
    if "" in request.stop_strings:
        raise EngineError("a stop string is empty; leave it out")
    for name, asked in (("prompt", request.topk_prompt_logprobs), ("sample", request.topk_sample_logprobs)):
        if not 0 <= asked <= min(MAX_TOPK, limits.vocabulary):
            most = min(MAX_TOPK, limits.vocabulary)
            raise EngineError(f"topk_{name}_logprobs is {asked}; it is at most {most}")
    return _new_tokens(request, limits)


def _new_tokens(request: SampleRequest, limits: SampleLimits) -> int:
    layout, length = limits.layout, len(request.prompt)
    room = limits.context - length
    asked = room if request.max_tokens is None else min(request.max_tokens, room)
    left = limits.pages - layout.pages(blocks_for(length), layout.ring(PIECE))
    # The last token that is chosen is not computed with, and needs no place.
    fitting = (layout.blocks(max(left, 0), layout.ring(1)) + length // BLOCK) * BLOCK - length + 1
    if left < 0 or (request.max_tokens is not None and asked > max(fitting, 1)):
        holds = layout.blocks(limits.pages, layout.ring(PIECE)) * BLOCK
        raise EngineError(
            f"the request needs room for {length + asked} tokens, and the sampler's memory holds {holds}; shorten the "
            "prompt, or lower max_tokens"
        )
    return min(asked, max(fitting, 1))


@dataclass(slots=True, eq=False)
class Continuation:
    index: int
    room: Room | None
    """For the blocks from the end of the prompt on; None: it needs none."""
    draw: Callable[[], float]
    watch: StringWatch | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    rooms: tuple[Room, ...] = ()
    """The prompt's room, for its full blocks, and its own; set with the first token."""

    def sequence(self, reason: StopReason, topk: int) -> SampledSequence:
        return SampledSequence(
            tokens=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            stop_reason=reason,
            topk=_stacked(self.topk, topk) if topk else None,
        )


class Generation:
    """A request in progress.

    Args:
        request: The request.
        snapshot: The model's weights.
        new_tokens: The most tokens of a continuation.
        ends: Tokens that end a continuation.
        tokenizer: The model's, if there are stop strings.
    """

    def __init__(
        self,
        request: SampleRequest,
        snapshot: WeightsSnapshot,
        *,
        new_tokens: int,
        ends: frozenset[int],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request = request
        self.snapshot = snapshot
        self.new_tokens = new_tokens
        self.ends = ends
        self.rule = Rule(temperature=request.temperature, top_k=request.top_k, top_p=request.top_p)
        self.room: Room | None = None
        """For the prompt."""
        self.seen = 0
        """Tokens of the prompt that are in the cache."""
        self.logits: Tensor | None = None
        """float32 [vocabulary] after the prompt, until all continuations have started."""
        self.running: list[Continuation] = []
        self.started = 0
        """Continuations that are running or have ended."""
        self._tokenizer = tokenizer
        self._sequences: dict[int, SampledSequence] = {}
        length, k = len(request.prompt), request.topk_prompt_logprobs
        self._prompt_logprobs = np.full(length, np.nan, dtype=np.float32)
        self._topk_ids = np.zeros((length, k), dtype=np.int32)
        self._topk_logprobs = np.full((length, k), NO_LOGPROB, dtype=np.float32)

    @property
    def prompt_blocks(self) -> int:
        return blocks_for(len(self.request.prompt))

    @property
    def own_blocks(self) -> int:
        """Blocks of each continuation beside the prompt's."""
        length = len(self.request.prompt)
        return blocks_for(length + self.new_tokens - 1) - self.first_own_block if self.new_tokens > 1 else 0

    @property
    def first_own_block(self) -> int:
        """The block in which the prompt ends, or the one after it."""
        return len(self.request.prompt) // BLOCK

    @property
    def wanted_sequences(self) -> int:
        """Continuations that have not ended."""
        return self.request.num_samples - len(self._sequences)

    @property
    def is_read(self) -> bool:
        return self.seen == len(self.request.prompt)

    @property
    def fresh(self) -> list[Continuation]:
        return [each for each in self.running if not each.tokens]

    @property
    def scores_prompt(self) -> bool:
        return self.request.prompt_logprobs or self.request.topk_prompt_logprobs > 0

    @property
    def is_done(self) -> bool:
        return not self.wanted_sequences

    def begin(self, room: Room | None) -> None:
        """Start the next continuation."""
        request, index = self.request, self.started
        watch = StringWatch(self._tokenizer, request.stop_strings, request.prompt) if self._tokenizer else None
        self.running.append(Continuation(index, room, draws_of(request.seed, index), watch))
        self.started += 1

    def fork(self, continuation: Continuation) -> list[tuple[np.ndarray, np.ndarray]]:
        """Let a continuation share the prompt's full blocks; returns the pages to copy, and to where.

        The block in which the prompt ends gets other tokens in each continuation, so it is copied.
        """
        assert self.room is not None
        assert continuation.room is not None
        continuation.rooms = (self.room, continuation.room)
        if not len(self.request.prompt) % BLOCK:
            return []
        block = self.first_own_block, self.first_own_block + 1
        return [(self.room.pages(sight, *block)[0], continuation.room.pages(sight, *block)[0]) for sight in Sight]

    def note_prompt(self, start: int, logprobs: Tensor, topk: tuple[Tensor, Tensor] | None) -> None:
        """Record the logprobs of the prompt's tokens from `start` on."""
        where = slice(start, start + logprobs.numel())
        self._prompt_logprobs[where] = logprobs.cpu().numpy()
        if topk:
            self._topk_ids[where], self._topk_logprobs[where] = (each.cpu().numpy() for each in topk)

    def accept(self, continuation: Continuation, token: int, logprob: float) -> bool:
        """Append the token that was chosen; returns whether it ended the continuation."""
        continuation.tokens.append(token)
        continuation.logprobs.append(logprob)
        found = continuation.watch is not None and continuation.watch.finds_with(token)
        if found or token in self.ends:
            self.end(continuation, StopReason.STOP)
        elif len(continuation.tokens) >= self.new_tokens:
            self.end(continuation, StopReason.LENGTH)
        else:
            return False
        return True

    def end(self, continuation: Continuation, reason: StopReason) -> None:
        self.running.remove(continuation)
        self._sequences[continuation.index] = continuation.sequence(reason, self.request.topk_sample_logprobs)

    def result(self) -> SampleResult:
        request = self.request
        return SampleResult(
            sequences=tuple(self._sequences[index] for index in range(request.num_samples)),
            prompt_logprobs=self._prompt_logprobs if request.prompt_logprobs else None,
            topk_prompt_logprobs=(self._topk_ids, self._topk_logprobs) if request.topk_prompt_logprobs else None,
        )


def _stacked(rows: Sequence[tuple[np.ndarray, np.ndarray]], k: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.zeros((len(rows), k), dtype=np.int32)
    logprobs = np.zeros((len(rows), k), dtype=np.float32)
    for place, (row_ids, row_logprobs) in enumerate(rows):
        ids[place], logprobs[place] = row_ids, row_logprobs
    return ids, logprobs

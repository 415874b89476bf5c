"""A sampling request in progress: what it needs, its continuations, where they end, and its result."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from torch import Tensor

from trainmaster.engine.cache import BLOCK, AttentionKind, KeyValueCache, PageTable, blocks_for
from trainmaster.engine.logprobs import Rule, draws_of
from trainmaster.engine.trained_model import WeightsSnapshot
from trainmaster.engine.types import (
    EngineError,
    SampledSequence,
    SampleRequest,
    SampleResult,
    StopReason,
    check_ranges,
    check_tokens,
)

MAX_TOPK = 1024
PIECE = 256
NO_LOGPROB = -99999.0
"""The top logprobs of the first token, which has no predecessor."""


def check(request: SampleRequest, cache: KeyValueCache, *, vocabulary: int, context: int) -> int:
    """Check a request; returns the most tokens that each continuation may have."""
    check_tokens("the prompt", np.asarray(request.prompt), vocabulary=vocabulary, context=context)
    topk = min(MAX_TOPK, vocabulary)
    check_ranges(
        request,
        [
            ("num_samples", request.num_samples >= 1, "1 or more"),
            ("temperature", request.temperature >= 0, "0 or more"),
            ("top_p", 0 < request.top_p <= 1, "above 0 and at most 1"),
            ("top_k", request.top_k >= -1, "1 or more, or -1 for all tokens"),
            ("max_tokens", request.max_tokens is None or request.max_tokens >= 0, "0 or more"),
            ("topk_prompt_logprobs", 0 <= request.topk_prompt_logprobs <= topk, f"between 0 and {topk}"),
            ("topk_sample_logprobs", 0 <= request.topk_sample_logprobs <= topk, f"between 0 and {topk}"),
        ],
    )
    if "" in request.stop_strings:
        raise EngineError("a stop string is empty; leave it out")
    layout, length = cache.layout, len(request.prompt)
    room = context - length
    asked = room if request.max_tokens is None else min(request.max_tokens, room)
    left = cache.pages - layout.pages(blocks_for(length), layout.ring(PIECE))
    # The last token that is chosen is not computed with, and needs no place.
    fitting = (layout.blocks(max(left, 0), layout.ring(1)) + length // BLOCK) * BLOCK - length + 1
    if left < 0 or (request.max_tokens is not None and asked > max(fitting, 1)):
        holds = layout.blocks(cache.pages, layout.ring(PIECE)) * BLOCK
        raise EngineError(
            f"the request needs room for {length + asked} tokens, and the sampler's memory holds {holds}; shorten the "
            "prompt, or lower max_tokens"
        )
    return min(asked, max(fitting, 1))


@dataclass(slots=True, eq=False)
class Continuation:
    index: int
    room: PageTable | None
    """For the blocks from the end of the prompt on; None: it needs none."""
    draw: Callable[[], float]
    watch: StringWatch | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    rooms: tuple[PageTable, ...] = ()
    """The prompt's room, for its full blocks, and its own; set with the first token."""
    is_over: bool = False
    """Whether it has ended, or its request has."""

    def sequence(self, reason: StopReason, topk: int) -> SampledSequence:
        return SampledSequence(
            tokens=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            stop_reason=reason,
            topk=_stacked(self.topk, topk) if topk else None,
        )


class Generation:
    """A request in progress. It has a tokenizer if there are stop strings."""

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
        self.room: PageTable | None = None
        self.seen = 0
        """Tokens of the prompt that are in the cache."""
        self.waits = False
        """Whether others are computing what comes next in its prompt."""
        self.prefix_keys: list[bytes] | None = None
        """What the parts of its prompt are found by; None until it is looked for."""
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

    def begin(self, room: PageTable | None) -> None:
        request, index = self.request, self.started
        watch = StringWatch(self._tokenizer, request.stop_strings, request.prompt) if self._tokenizer else None
        self.running.append(Continuation(index, room, draws_of(request.seed, index), watch))
        self.started += 1

    def fork(self, continuation: Continuation) -> list[tuple[np.ndarray, np.ndarray]]:
        """Let a continuation share the prompt's full blocks; returns what to copy where: the block in which it ends."""
        assert self.room is not None
        assert continuation.room is not None
        continuation.rooms = (self.room, continuation.room)
        if not len(self.request.prompt) % BLOCK:
            return []
        block = self.first_own_block, self.first_own_block + 1
        return [(self.room.pages(kind, *block)[0], continuation.room.pages(kind, *block)[0]) for kind in AttentionKind]

    def note_prompt(self, start: int, logprobs: Tensor, topk: tuple[Tensor, Tensor] | None) -> None:
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
        continuation.is_over = True
        self._sequences[continuation.index] = continuation.sequence(reason, self.request.topk_sample_logprobs)

    def result(self) -> SampleResult:
        request = self.request
        return SampleResult(
            sequences=tuple(self._sequences[index] for index in range(request.num_samples)),
            prompt_logprobs=self._prompt_logprobs if request.prompt_logprobs else None,
            topk_prompt_logprobs=(self._topk_ids, self._topk_logprobs) if request.topk_prompt_logprobs else None,
        )


def _stacked(rows: Sequence[tuple[np.ndarray, np.ndarray]], k: int) -> tuple[np.ndarray, np.ndarray]:
    ids, logprobs = ([row[part] for row in rows] for part in (0, 1))
    return np.array(ids, np.int32).reshape(-1, k), np.array(logprobs, np.float32).reshape(-1, k)


# A continuation ends at a token, or at a string in its text, wherever the borders of tokens lie.

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for bytes that are no character, or not a complete one yet."""
_CONTEXT_TOKENS = 4
"""Tokens of the prompt to decode with: some tokenizers drop the space before the first token."""
_UNFINISHED_TOKENS = 3
"""A character has at most 4 bytes and a token at least one: so many tokens may wait for the last byte."""


def end_tokens(directory: Path) -> frozenset[int]:
    for path in (directory / "generation_config.json", directory / "config.json"):
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        if not isinstance(settings, dict):
            continue
        ids = settings.get("eos_token_id")
        if ids is None:
            ids = (settings.get("text_config") or {}).get("eos_token_id")
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()


def read_tokenizer(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise EngineError(f"stop strings need the model's tokenizer.json, and {directory} has none; stop at token ids")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise EngineError(f"stop strings need the model's tokenizer, and {path} cannot be read: {error}") from error


class StringWatch:
    """Looks for strings in the text of a stream of tokens; one that starts in the prompt's text is not found.

    A character may span several tokens, and a decoding may depend on the token before: so they are decoded together.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str], prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._kept_chars = max(map(len, strings)) - 1
        self._text = ""
        """The end of the settled text, long enough to hold the start of a string."""
        self._window = list(prompt[-_CONTEXT_TOKENS:])
        """The last settled tokens, and those that are not settled."""
        self._settled = len(self._window)
        self._known = self._decoded(self._window).rstrip(UNFINISHED)

    def finds_with(self, token: int) -> bool:
        self._window.append(token)
        text = self._decoded(self._window)
        waits = text.endswith(UNFINISHED)
        fresh = self._text + text[len(self._known) :]
        if any(string in (fresh.rstrip(UNFINISHED) if waits else fresh) for string in self._strings):
            return True
        if not waits:
            self._settle(len(self._window), text)
        elif len(self._window) - self._settled > _UNFINISHED_TOKENS:
            upto = len(self._window) - _UNFINISHED_TOKENS
            self._settle(upto, self._decoded(self._window[:upto]))
        return False

    def _settle(self, upto: int, text: str) -> None:
        grown = self._text + text[len(self._known) :]
        self._text = grown[-self._kept_chars :] if self._kept_chars else ""
        self._window = self._window[self._settled :]
        self._settled = upto - self._settled
        self._known = self._decoded(self._window[: self._settled])

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

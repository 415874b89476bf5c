"""The sampling requests that wait or run, and the cache that is given out to them, in order of arrival."""

from __future__ import annotations

import functools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from trainmaster.engine.cache import KeyValueCache, PageTable
from trainmaster.engine.continuations import Continuation, Generation
from trainmaster.engine.model import Transformer
from trainmaster.engine.prompt_pages import PromptPages
from trainmaster.engine.types import Blame, EngineError, SampleResult, StopReason

_log = logging.getLogger(__name__)


class RunningRequests:
    """A request gets pages for all that it may need: so one that started can also finish."""

    def __init__(self, new_cache: Callable[[], KeyValueCache], max_sequences: int, shared_part: int) -> None:
        self._new_cache = new_cache
        self._shared_part = shared_part
        self._max_sequences = max_sequences
        self._generations: dict[str, Generation] = {}
        """By request id, in order of arrival."""
        self._ended: list[tuple[str, SampleResult | EngineError]] = []

    @functools.cached_property
    def cache(self) -> KeyValueCache:
        """Allocated on first use: many processes train and never sample."""
        return self._new_cache()

    @functools.cached_property
    def prompt_pages(self) -> PromptPages:
        return PromptPages(self.cache, self._shared_part)

    def __len__(self) -> int:
        return len(self._generations)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._generations

    @property
    def load(self) -> float:
        """The share of pages or sequences that unfinished requests would use; above 1, some wait."""
        if not self._generations:
            return 0.0
        generations = self._generations.values()
        pages = sum(
            self.prompt_pages.most(generation) + self._own_pages(generation) * generation.wanted_sequences
            for generation in generations
        )
        sequences = sum(generation.wanted_sequences for generation in generations)
        return max(pages / self.cache.pages, sequences / self._max_sequences)

    def add(self, generation: Generation) -> None:
        self._generations[generation.request.request_id] = generation

    def cancel(self, request_id: str) -> bool:
        generation = self._generations.pop(request_id, None)
        if generation is None:
            return False
        self._release(generation)
        return True

    def admit(self) -> dict[Transformer, list[Generation]]:
        """Give out pages in order of arrival; returns the requests that have some, by their weights."""
        running = sum(len(generation.running) for generation in self._generations.values())
        admitted: dict[Transformer, list[Generation]] = defaultdict(list)
        cache, layout, prompts = self.cache, self.cache.layout, self.prompt_pages
        for generation in self._generations.values():
            of_weights = admitted[generation.snapshot.transformer]
            while generation.started < generation.request.num_samples:
                own = self._own_pages(generation)
                needed = own + (0 if generation.room else prompts.needed(generation))
                if running >= self._max_sequences or needed > prompts.free:
                    if generation.room:
                        prompts.settle(generation)
                        of_weights.append(generation)
                    return admitted
                if not generation.room:
                    prompts.take(generation)
                prompts.free_up(own)
                blocks = generation.own_blocks
                generation.begin(cache.take(generation.first_own_block, blocks, layout.ring(1)) if blocks else None)
                running += 1
            prompts.settle(generation)
            of_weights.append(generation)
        return admitted

    @contextmanager
    def blaming(self, generations: Sequence[Generation]) -> Iterator[None]:
        """End these requests, and no others, with the error that is raised."""
        try:
            yield
        except Exception as error:  # whatever it is, it is about these requests
            _log.exception("a step of sampling failed")
            for generation in generations:
                self.end(generation, EngineError(f"sampling failed: {error}", Blame.SERVER))

    def accept(self, generation: Generation, continuation: Continuation, token: int, logprob: float) -> None:
        """Append the token that was chosen for a continuation; ends what it ends."""
        if not math.isfinite(logprob):
            self.end(generation, EngineError("the model gives no probabilities but NaN: its weights diverged"))
        elif generation.accept(continuation, token, logprob):
            self._give_back(continuation.room)
            self._end_if_done(generation)

    def end_without_tokens(self, generation: Generation) -> None:
        """No tokens are asked for, or the prompt fills the context."""
        for continuation in generation.fresh:
            generation.end(continuation, StopReason.LENGTH)
            self._give_back(continuation.room)
        self._end_if_done(generation)

    def end(self, generation: Generation, outcome: SampleResult | EngineError) -> None:
        if self._generations.pop(generation.request.request_id, None) is not None:
            self._release(generation)
            self._ended.append((generation.request.request_id, outcome))

    def take_ended(self) -> list[tuple[str, SampleResult | EngineError]]:
        ended, self._ended = self._ended, []
        return ended

    def _end_if_done(self, generation: Generation) -> None:
        if generation.is_done:
            self.end(generation, generation.result())

    def _own_pages(self, generation: Generation) -> int:
        layout = self.cache.layout
        return layout.pages(generation.own_blocks, layout.ring(1))

    def _release(self, generation: Generation) -> None:
        for continuation in generation.running:
            continuation.is_over = True
            self._give_back(continuation.room)
        self.prompt_pages.give_back(generation)
        generation.running = []

    def _give_back(self, room: PageTable | None) -> None:
        if room:
            self.cache.give_back(room)

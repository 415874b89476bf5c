"""Continuous batching: requests join and leave at any step, and use the very weights that are trained.

A step computes one token for every running continuation, together with a piece of each new prompt. All adapters of one
base model share the step; each set of full weights has its own.

The cache is given out in order of arrival, for all that a continuation may need, so that one that started can also
finish. A result follows from its snapshot and its seed: on the CPU to the last bit, whatever else runs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from tokenizers import Tokenizer

from trainmaster.engine.cache import BLOCK, KeyValueCache, Layout, blocks_for
from trainmaster.engine.continuations import PIECE, Generation, check, end_tokens, read_tokenizer
from trainmaster.engine.model import Transformer
from trainmaster.engine.plain_steps import PlainSteps
from trainmaster.engine.recurrent_states import RecurrentStates
from trainmaster.engine.running_requests import RunningRequests
from trainmaster.engine.trained_model import WeightsSnapshot
from trainmaster.engine.types import EngineError, SampleRequest, SampleResult

MAX_SEQUENCES = 256
"""Continuations that run at once; with more, each would wait longer for a token."""
_CPU_CACHE_BYTES = 2 << 30
"""Unused pages are never touched, and so take no memory."""


class Steps(Protocol):
    """Computes the next tokens of admitted requests, by their weights, and ends those that are done."""

    def advance(self, by_weights: Mapping[Transformer, Sequence[Generation]]) -> None: ...


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
        self._end_tokens = end_tokens(checkpoint)
        self._tokenizer: Tokenizer | None = None
        on_gpu = transformer.device.type == "cuda"
        max_sequences = _most_sequences(transformer, max_sequences)
        self._requests = RunningRequests(
            lambda: _new_cache(transformer, cache_bytes, longest=self._context, sequences=max_sequences),
            max_sequences,
            # On the CPU, the pieces of a prompt, and so their roundings, stay as they are without what is shared.
            shared_part=BLOCK if on_gpu else PIECE,
        )
        self._steps: Steps
        if _has_graphs(transformer):
            from trainmaster.engine.graph_steps import GraphSteps

            self._steps = GraphSteps(
                self._requests,
                longest=self._context,
                max_sequences=max_sequences,
                tempered_logprobs=tempered_logprobs,
            )
        else:
            self._steps = PlainSteps(self._requests, tempered_logprobs=tempered_logprobs)

    @property
    def pending(self) -> int:
        return len(self._requests)

    @property
    def load(self) -> float:
        """The share of pages or sequences that unfinished requests would use; above 1, some wait."""
        return self._requests.load

    def submit(self, request: SampleRequest, snapshot: WeightsSnapshot) -> None:
        if request.request_id in self._requests:
            raise EngineError(f"request {request.request_id} is under way; give each an id of its own")
        vocabulary = self._transformer.config.vocab_size
        new_tokens = check(request, self._requests.cache, vocabulary=vocabulary, context=self._context)
        if request.stop_strings and self._tokenizer is None:
            self._tokenizer = read_tokenizer(self._checkpoint)
        self._requests.add(
            Generation(
                request,
                snapshot,
                new_tokens=new_tokens,
                ends=self._end_tokens if request.stop_tokens is None else frozenset(request.stop_tokens),
                tokenizer=self._tokenizer if request.stop_strings else None,
            )
        )

    def cancel(self, request_id: str) -> bool:
        """Drop a request; returns whether there was one. It gets no result."""
        return self._requests.cancel(request_id)

    @torch.no_grad()
    def step(self) -> list[tuple[str, SampleResult | EngineError]]:
        """Compute one token of every running continuation; returns the results of requests that ended."""
        self._steps.advance(self._requests.admit())
        return self._requests.take_ended()


def _has_graphs(transformer: Transformer) -> bool:
    """Whether steps can be CUDA graphs.

    Shapes of a mixture's products depend on what its router chooses, and the kernel of graphs that reads the cache
    wants keys and values of one width, and knows no sinks.
    """
    on_gpu = transformer.device.type == "cuda" and importlib.util.find_spec("triton") is not None
    config = transformer.config
    plain = config.mixture is None and config.linear is None and config.latent is None and not config.attention_sinks
    return on_gpu and plain


def _most_sequences(transformer: Transformer, wanted: int) -> int:
    """As many as have room for their states in a quarter of the memory: prompts have states of their own."""
    linear, weight = transformer.config.linear, transformer.unembedding.weight
    if linear is None:
        return wanted
    memory = _free_bytes(weight.device) // 4 if weight.device.type == "cuda" else _CPU_CACHE_BYTES
    return max(1, min(wanted, memory // (2 * RecurrentStates.like(linear, weight).bytes_each)))


def _new_cache(transformer: Transformer, memory_bytes: int | None, *, longest: int, sequences: int) -> KeyValueCache:
    config, weight = transformer.config, transformer.unembedding.weight
    if memory_bytes is None:
        memory_bytes = _free_bytes(weight.device) // 4 if weight.device.type == "cuda" else _CPU_CACHE_BYTES
    heads = config.num_key_value_heads
    layout = Layout.of(config.cached_windows, longest)
    page_bytes = layout.depth * BLOCK * heads * (config.key_width + config.value_width) * weight.element_size()
    most = sequences * layout.pages(blocks_for(longest) + 1, layout.ring(PIECE) + layout.ring(1))
    return KeyValueCache(
        layout,
        heads=heads,
        width=config.key_width,
        value_width=config.value_width,
        pages=max(sum(layout.strata), min(memory_bytes // page_bytes, most)),
        device=weight.device,
        dtype=weight.dtype,
        states=None if config.linear is None else RecurrentStates.like(config.linear, weight),
    )


def _free_bytes(device: torch.device) -> int:
    """A GPU's free memory, including what PyTorch has reserved without using it."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused

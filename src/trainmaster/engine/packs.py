"""The computation of one pack: a forward and a backward pass over the sequences of one model or of many."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from trainmaster.engine import kernels, losses
from trainmaster.engine.adapters import AdapterRows
from trainmaster.engine.attention import PackedAttention
from trainmaster.engine.factor_stacks import FactorStacks
from trainmaster.engine.logprobs import target_logprobs
from trainmaster.engine.losses import TokenLosses, Tokens
from trainmaster.engine.memory import free_bytes, memory_of
from trainmaster.engine.model import Unembedding
from trainmaster.engine.passes import Chunk, ChunkResult
from trainmaster.engine.transfers import Fetched, on_device
from trainmaster.engine.types import EngineError


class Launched:
    """A pack that may still be computed, on a GPU; its models have no gradients of it any more."""

    def __init__(self, chunks: Sequence[Chunk], losses_of: Sequence[_ChunkLosses]) -> None:
        self._chunks = chunks
        self._has_ratios = [each.ratios is not None for each in losses_of]
        self._fetched = Fetched([tensor for each in losses_of for tensor in each.tensors])
        self._gradients = [chunk.of.model.take_gradients() if chunk.of.request.backward else {} for chunk in chunks]

    @property
    def is_done(self) -> bool:
        return self._fetched.is_here

    def parts(self) -> list[ChunkResult | EngineError]:
        """What came of each chunk."""
        arrays = iter(self._fetched.arrays())
        return [
            _part(chunk, gradients, next(arrays), next(arrays), next(arrays) if has_ratios else None)
            for chunk, gradients, has_ratios in zip(self._chunks, self._gradients, self._has_ratios, strict=True)
        ]


def compute(chunks: Sequence[Chunk], *, recompute: float | None = None, stacks: FactorStacks | None = None) -> Launched:
    """Compute one pack: chunks of one kind, at most one of a model.

    `recompute`: the share of the layers that are computed again, which takes less memory and more time; None: on a GPU,
    as few as there is memory for the others, and else none.
    """
    transformer, backward = chunks[0].of.model.transformer, chunks[0].of.request.backward
    device = transformer.device
    data = [chunk.of.request.data[index].tokens for chunk in chunks for index in chunk.data]
    rows = AdapterRows([(chunk.of.model.adapter, chunk.rows) for chunk in chunks], stacks or FactorStacks())
    if recompute is None:
        recompute = _recomputed_share(chunks, device) if backward and device.type == "cuda" else 0.0
    with torch.set_grad_enabled(backward):
        hidden = transformer.hidden(
            on_device(np.concatenate(data).astype(np.int64, copy=False), device),
            on_device(np.concatenate([np.arange(len(tokens)) for tokens in data]), device),
            PackedAttention([len(tokens) for tokens in data]),
            rows,
            recompute=recompute,
        )
    targets = on_device(np.concatenate([chunk.joined(losses.TARGETS) for chunk in chunks]), device)
    ends = itertools.accumulate(chunk.rows for chunk in chunks)
    losses_of = [_ChunkLosses(chunk, end - chunk.rows, device) for chunk, end in zip(chunks, ends, strict=True)]
    unembedding = transformer.unembedding
    if kernels.serve(hidden) and all(chunk.of.loss.token_wise for chunk in chunks):
        _in_one_pass(hidden, targets, unembedding, rows, losses_of, backward=backward)
    else:
        _in_two_passes(hidden, targets, unembedding, rows, losses_of, backward=backward)
    return Launched(chunks, losses_of)


def _recomputed_share(chunks: Sequence[Chunk], device: torch.device) -> float:
    memory = memory_of([chunk.of.model for chunk in chunks])
    lengths = [length for chunk in chunks for length in chunk.lengths]
    return memory.recomputed(lengths, free_bytes(device)) / memory.layers


class _ChunkLosses:
    """The losses of one chunk's tokens, which come all at once or part by part."""

    def __init__(self, chunk: Chunk, start: int, device: torch.device) -> None:
        self.start, self.end = start, start + chunk.rows
        self._chunk = chunk
        self._inputs: Mapping[str, Tensor] = {name: on_device(chunk.joined(name), device) for name in chunk.names}
        self._lengths = on_device(np.array(chunk.lengths), device)
        self._found: list[tuple[Tensor, TokenLosses]] = []

    def pull(self, logprobs: Tensor, first: int) -> Tensor:
        """The gradients of the loss by the logprobs of the pack's rows from `first` on; without a backward pass, 0."""
        own = slice(first - self.start, first - self.start + len(logprobs))
        backward = self._chunk.of.request.backward
        logprobs = logprobs.detach().requires_grad_(backward)
        with torch.set_grad_enabled(backward):
            of_tokens = self._chunk.of.loss.formula(
                Tokens(
                    logprobs=logprobs,
                    inputs={name: each[own] for name, each in self._inputs.items()},
                    options=self._chunk.of.options,
                    lengths=self._lengths,
                )
            )
            pulled = torch.autograd.grad(of_tokens.values.sum(), logprobs)[0] if backward else logprobs.new_zeros(())
        self._found.append((logprobs.detach(), of_tokens))
        return pulled

    @property
    def ratios(self) -> Tensor | None:
        ratios = [each.ratios for _, each in self._found if each.ratios is not None]
        return torch.cat(ratios) if ratios else None

    @property
    def tensors(self) -> list[Tensor]:
        """Logprobs, losses and, if there are any, ratios of all tokens."""
        ratios = self.ratios
        logprobs = torch.cat([each for each, _ in self._found])
        values = torch.cat([each.values.detach() for _, each in self._found])
        return [logprobs, values, *([] if ratios is None else [ratios])]


def _in_one_pass(
    hidden: Tensor,
    targets: Tensor,
    unembedding: Unembedding,
    rows: AdapterRows,
    losses_of: Sequence[_ChunkLosses],
    *,
    backward: bool,
) -> None:
    from trainmaster.engine.loss_head import pulled_logprobs

    def pull(own: slice, logprobs: Tensor) -> Tensor:
        cuts = [(each, max(own.start, each.start), min(own.stop, each.end)) for each in losses_of]
        pulled = [
            each.pull(logprobs[first - own.start : end - own.start], first) for each, first, end in cuts if first < end
        ]
        return torch.cat(pulled)

    logprobs, grad_hidden = pulled_logprobs(hidden.detach(), targets, unembedding, rows, pull if backward else None)
    if not backward:
        for each in losses_of:
            each.pull(logprobs[each.start : each.end], each.start)
        return
    if hidden.requires_grad:
        hidden.backward(grad_hidden)  # type: ignore[no-untyped-call]
    rows.hand_out_gradients()


def _in_two_passes(
    hidden: Tensor,
    targets: Tensor,
    unembedding: Unembedding,
    rows: AdapterRows,
    losses_of: Sequence[_ChunkLosses],
    *,
    backward: bool,
) -> None:
    with torch.set_grad_enabled(backward):
        logprobs = target_logprobs(hidden, targets, unembedding, rows)
    given = logprobs.detach()
    pulled = [each.pull(given[each.start : each.end], each.start) for each in losses_of]
    if backward:
        logprobs.backward(torch.cat(pulled))  # type: ignore[no-untyped-call]


def _part(
    chunk: Chunk, gradients: dict[str, Tensor], logprobs: np.ndarray, values: np.ndarray, ratios: np.ndarray | None
) -> ChunkResult | EngineError:
    ends = np.cumsum(chunk.lengths)
    strange = np.flatnonzero(~np.isfinite(logprobs + values).reshape(len(logprobs), -1).all(axis=1))
    if strange.size:
        index = chunk.data[int(np.searchsorted(ends, strange[0], side="right"))]
        return EngineError(f"the loss of datum {index} is not finite; the request added nothing to the gradients")
    inputs = {name: chunk.joined(name) for name in (losses.TARGETS, *chunk.names)}
    return ChunkResult(
        outputs=[{"logprobs": each} for each in np.split(logprobs, ends[:-1])],
        metrics=losses.measure(chunk.of.loss, values, ratios, logprobs, inputs, chunk.lengths),
        gradients=gradients,
    )

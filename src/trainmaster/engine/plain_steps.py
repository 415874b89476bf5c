"""Steps of sampling by the operations that training uses: on the CPU, no row depends on the others to the last bit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainmaster.engine.attention import CachedAttention, Span
from trainmaster.engine.continuations import PIECE, Continuation, Generation
from trainmaster.engine.logprobs import all_logits, choose, likeliest, logprobs_of, tempered_logprobs_of
from trainmaster.engine.model import Transformer
from trainmaster.engine.products import ROWS
from trainmaster.engine.prompts import Piece, adapter_rows, lay_out, note_read, prompt_pieces
from trainmaster.engine.running_requests import RunningRequests

_PROMPT_TOKENS = 1024
"""Prompt tokens in one step: running continuations wait for them."""


class PlainSteps:
    """A step computes one token of every running continuation, together with a piece of each new prompt."""

    def __init__(self, requests: RunningRequests, *, tempered_logprobs: bool) -> None:
        self._requests = requests
        self._tempered = tempered_logprobs

    def advance(self, by_weights: Mapping[Transformer, Sequence[Generation]]) -> None:
        for transformer, generations in by_weights.items():
            with self._requests.blaming(generations):
                self._advance(transformer, generations)

    def _advance(self, transformer: Transformer, generations: Sequence[Generation]) -> None:
        choices: list[_Choice] = []
        unread = [generation for generation in generations if not generation.is_read]
        pieces = prompt_pieces(unread, piece=PIECE, at_once=_PROMPT_TOKENS)
        pieces += [_last_token(each, own) for each in generations if each.is_read for own in each.running if own.tokens]
        if pieces:
            lay_out(pieces)
            hidden = self._hidden(transformer, pieces)
            note_read(transformer, pieces, hidden)
            if ending := [piece for piece in pieces if piece.chooses]:
                last = hidden[[piece.last_row for piece in ending]]
                adapters = adapter_rows((piece, 1) for piece in ending)
                computed = all_logits(last, transformer.unembedding, adapters)
                for piece, logits in zip(ending, computed, strict=True):
                    if piece.continuation is None:
                        piece.generation.logits = logits.clone()
                    else:
                        choices.append(_Choice(piece.generation, piece.continuation, logits))
        for generation in generations:
            if generation.logits is not None and generation.new_tokens:
                choices += [_Choice(generation, each, generation.logits) for each in generation.fresh]
            elif generation.logits is not None:
                self._requests.end_without_tokens(generation)
            if generation.started == generation.request.num_samples:
                generation.logits = None
        if choices:
            self._choose(choices)

    def _hidden(self, transformer: Transformer, pieces: Sequence[Piece]) -> Tensor:
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
            CachedAttention(self._requests.cache, [piece.span for piece in pieces]),
            adapter_rows(((piece, piece.span.count) for piece in pieces), spare),
        )

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
            self._requests.accept(generation, continuation, token, logprob)
            if continuation in generation.running and not continuation.rooms:
                copies += generation.fork(continuation)
        if copies:
            sources, targets = (np.concatenate(each) for each in zip(*copies, strict=True))
            self._requests.cache.copy(sources, targets)


@dataclass(frozen=True, slots=True)
class _Choice:
    generation: Generation
    continuation: Continuation
    logits: Tensor


def _last_token(generation: Generation, own: Continuation) -> Piece:
    span = Span(rooms=own.rooms, start=len(generation.request.prompt) + len(own.tokens) - 1)
    return Piece(generation=generation, continuation=own, tokens=own.tokens[-1:], span=span)


def _note_likeliest(choices: Sequence[_Choice], logits: Tensor) -> None:
    by_count: dict[int, list[int]] = defaultdict(list)
    for row, choice in enumerate(choices):
        if count := choice.generation.request.topk_sample_logprobs:
            by_count[count].append(row)
    for count, rows in by_count.items():
        tokens, logprobs = (each.cpu().numpy() for each in likeliest(logits[rows], count))
        for place, row in enumerate(rows):
            choices[row].continuation.topk.append((tokens[place], logprobs[place]))

"""Prompts are computed piece by piece, those of several requests in one pack, beside the tokens of those that run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainmaster.engine.adapters import Adapter, AdapterRows
from trainmaster.engine.attention import Span
from trainmaster.engine.continuations import Continuation, Generation
from trainmaster.engine.logprobs import target_logprobs, top_logprobs
from trainmaster.engine.model import Transformer


@dataclass(slots=True, kw_only=True)
class Piece:
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

    @property
    def last_row(self) -> int:
        return self.row + self.span.count - 1


def prompt_pieces(generations: Iterable[Generation], *, piece: int | None, at_once: int) -> list[Piece]:
    """The next pieces of prompts, `at_once` tokens in all.

    Each has `piece` tokens or what is left of its prompt, whatever the others have; None: as many as there is room for.
    """
    pieces: list[Piece] = []
    for generation in generations:
        if generation.waits:
            continue
        seen, room = generation.seen, generation.room
        tokens = generation.request.prompt[seen : seen + (at_once if piece is None else piece)]
        if tokens and len(tokens) <= at_once and room:
            at_once -= len(tokens)
            span = Span(rooms=(room,), start=seen, count=len(tokens))
            pieces.append(Piece(generation=generation, continuation=None, tokens=tokens, span=span))
    return pieces


def lay_out(pieces: list[Piece]) -> None:
    """Give the pieces their rows, each adapter's together."""
    places: dict[Adapter | None, int] = {}
    pieces.sort(key=lambda piece: places.setdefault(piece.adapter, len(places)))
    row = 0
    for piece in pieces:
        piece.row = row
        row += piece.span.count


def adapter_rows(pieces: Iterable[tuple[Piece, int]], spare: int = 0) -> AdapterRows | None:
    """The adapters of pieces with so many rows each, and of spare rows at the end; None if there are none."""
    runs = itertools.groupby(pieces, key=lambda pair: pair[0].adapter)
    parts = [(adapter, sum(rows for _, rows in run)) for adapter, run in runs]
    return AdapterRows([*parts, (None, spare)]) if any(adapter for adapter, _ in parts) else None


def note_read(transformer: Transformer, pieces: Iterable[Piece], hidden: Tensor) -> None:
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

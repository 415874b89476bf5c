"""Recurrent layers over the rows of a pack: each sequence has a state of its own.

On the CPU sequences are computed one by one and in the next wider type, so that neither the rest of the pack nor the
shape matters: see `attention`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trainmaster.engine.architectures.linear import LinearAttention
from trainmaster.engine.attention import Attention, CachedAttention, PackedAttention, computed_in
from trainmaster.engine.delta_rule import Past, RecurrentRows, convolve_and_recur


class Recurrence(Protocol):
    def __call__(self, linear: LinearAttention, layer: int, given: RecurrentRows, taps: Tensor) -> Tensor:
        """The outputs of the rows of a pack, [rows, value heads, value width]; `layer` counts the recurrent ones."""


def recurrence_of(attention: Attention) -> Recurrence:
    """What computes recurrent layers over the rows that a kind of attention knows."""
    if isinstance(attention, PackedAttention):
        return PackedRecurrence(attention.lengths)
    if isinstance(attention, CachedAttention):
        return CachedRecurrence(attention)
    raise TypeError(f"{type(attention).__name__} has no recurrent layers")


def _all_at_once(rows: Tensor) -> bool:
    return rows.is_cuda


class PackedRecurrence:
    """Sequences of the given lengths, end to end, from their first rows on."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)

    def __call__(self, linear: LinearAttention, layer: int, given: RecurrentRows, taps: Tensor) -> Tensor:  # noqa: ARG002
        mixed, lengths = given.mixed, self._lengths
        dtype = torch.promote_types(computed_in(mixed), torch.float32)
        parts = [torch.split(each, lengths) for each in given]
        if _all_at_once(mixed):
            padded = RecurrentRows(*(pad_sequence(list(part), batch_first=True) for part in parts))
            none = Past.none(linear, len(lengths), mixed.device, dtype)
            outputs, _ = convolve_and_recur(linear, padded, taps, none)
            return torch.cat([own[:length] for own, length in zip(outputs, lengths, strict=True)]).to(mixed.dtype)
        none = Past.none(linear, 1, mixed.device, dtype)
        alone = [RecurrentRows(*(part[None] for part in own)) for own in zip(*parts, strict=True)]
        return torch.cat([convolve_and_recur(linear, own, taps, none)[0][0] for own in alone]).to(mixed.dtype)


class CachedRecurrence:
    """The spans of a cache, each from the state that its sequence has there; further rows at the end get zeros."""

    def __init__(self, attention: CachedAttention) -> None:
        if attention.states is None:
            raise ValueError("this cache has no recurrent states")
        self._spans = attention.spans
        self._states, self._places = attention.states, attention.places

    def __call__(self, linear: LinearAttention, layer: int, given: RecurrentRows, taps: Tensor) -> Tensor:
        outputs = given.mixed.new_zeros(len(given.mixed), linear.value_heads, linear.value_width)
        for rows, places in self._together(_all_at_once(given.mixed)):
            own = RecurrentRows(*(each[rows] for each in given))
            computed, past = convolve_and_recur(linear, own, taps, self._states.past(layer, places))
            outputs[rows] = computed.to(outputs.dtype)
            self._states.keep(layer, places, past)
        return outputs

    def _together(self, at_once: bool) -> Iterator[tuple[Tensor, list[int]]]:
        """Rows [sequences, length] that are computed together, and the places of their states."""
        row = 0
        single: list[tuple[int, int]] = []
        for span, place in zip(self._spans, self._places, strict=True):
            if span.count == 1 and at_once:
                single.append((row, place))
            else:
                yield torch.arange(row, row + span.count)[None], [place]
            row += span.count
        if single:
            yield torch.tensor([[row] for row, _ in single]), [place for _, place in single]

"""How positions turn queries and keys: by angles that depend on the kind of rope that a checkpoint names."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainmaster.engine.config import Rope

Turn = tuple[Tensor, Tensor]
"""Cosines and sines of the angles by which positions turn the halves of a head: [n, 1, width / 2] each."""


def turn_of(positions: Tensor, rope: Rope, width: int, dtype: torch.dtype) -> Turn:
    """The angles of some positions, computed in float32 at least and rounded then."""
    wide = torch.promote_types(dtype, torch.float32)
    angles = positions.to(wide)[:, None, None] * _frequencies(rope, width, positions.device).to(wide)
    turn = angles.cos(), angles.sin()
    if rope.magnitude != 1.0:
        turn = turn[0] * rope.magnitude, turn[1] * rope.magnitude
    return turn[0].to(dtype), turn[1].to(dtype)


def turned(heads: Tensor, turn: Turn) -> Tensor:
    """Heads [n, heads, width], each turned by its row's angles."""
    cosines, sines = turn
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


def _frequencies(rope: Rope, width: int, device: torch.device) -> Tensor:
    """Of the pairs of a head, float32 [width / 2]: how far one position turns each."""
    places = torch.arange(0, width, 2, device=device).to(torch.float32)
    frequencies = 1.0 / rope.theta ** (places / width)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _blended(frequencies, _llama3_share(frequencies, rope), rope)
    if rope.kind == "yarn":
        return _blended(frequencies, _yarn_share(places / 2, rope, width), rope)
    return frequencies


def _blended(frequencies: Tensor, kept: Tensor, rope: Rope) -> Tensor:
    """Slow turns are slowed by the factor, fast ones stay, and of those between a share stays."""
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _llama3_share(frequencies: Tensor, rope: Rope) -> Tensor:
    turns = rope.original_positions * frequencies / (2 * math.pi)
    return ((turns - rope.slow_turns) / (rope.fast_turns - rope.slow_turns)).clamp(0.0, 1.0)


def _yarn_share(pairs: Tensor, rope: Rope, width: int) -> Tensor:
    """Linear in the number of the pair, where Llama 3's is linear in how often it turns."""

    def pair_that_turns(times: float) -> float:
        """So often within the original context."""
        return width * math.log(rope.original_positions / (2 * math.pi * times)) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(rope.fast_turns), pair_that_turns(rope.slow_turns)
    if rope.whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    # Bounds, and what is added where they meet, are as models were trained with.
    first, last = max(first, 0), min(last, width - 1)
    return 1 - ((pairs - first) / ((last - first) or 0.001)).clamp(0.0, 1.0)

"""Rotary positions: the angles depend on the kind of rope that a checkpoint names."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from trainmaster.engine.ropes import Rope

RotaryAngles = tuple[Tensor, Tensor]
"""Cosines and sines of the angles by which positions rotate the pairs of a head: [n, 1, pairs] each."""


def rotary_angles(positions: Tensor, rope: Rope, width: int, dtype: torch.dtype) -> RotaryAngles:
    """The angles of positions for heads of a width, computed at least in float32 and then rounded."""
    wide = torch.promote_types(dtype, torch.float32)
    turned = int(width * rope.share)
    angles = positions.to(wide)[:, None, None] * _frequencies(rope, turned, positions.device).to(wide)
    return (angles.cos() * rope.magnitude).to(dtype), (angles.sin() * rope.magnitude).to(dtype)


def apply_rotary(heads: Tensor, angles: RotaryAngles, *, interleaved: bool = False) -> Tensor:
    """Rotate heads [n, heads, width] by the angles of their rows; what is beyond their pairs stays."""
    cosines, sines = angles
    turned = 2 * cosines.shape[-1]
    rest = heads[..., turned:]
    if interleaved:
        first, second = heads[..., 0:turned:2], heads[..., 1:turned:2]
        pairs = torch.stack([first * cosines - second * sines, second * cosines + first * sines], dim=-1).flatten(-2)
        return torch.cat([pairs, rest], dim=-1)
    first, second = heads[..., : turned // 2], heads[..., turned // 2 : turned]
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines, rest], dim=-1)


@functools.cache
def _frequencies(rope: Rope, width: int, device: torch.device) -> Tensor:
    """The angle per position of each pair of a head, float32 [width / 2]."""
    places = torch.arange(0, width, 2, device=device).to(torch.float32)
    frequencies = 1.0 / rope.theta ** (places / width)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "divided":
        divisors = torch.tensor(rope.divisors, dtype=torch.float32, device=device)
        return 1.0 / (divisors * rope.theta ** (places / width))
    if rope.kind == "llama3":
        turns = rope.original_positions * frequencies / (2 * math.pi)
        share = ((turns - rope.slow_turns) / (rope.fast_turns - rope.slow_turns)).clamp(0.0, 1.0)
        return _blended(frequencies, share, rope)
    if rope.kind == "yarn":
        return _blended(frequencies, _yarn_share(places / 2, rope, width), rope)
    return frequencies


def _blended(frequencies: Tensor, kept: Tensor, rope: Rope) -> Tensor:
    """Slow rotations are divided by the factor, fast ones stay, and those between are interpolated."""
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn_share(pairs: Tensor, rope: Rope, width: int) -> Tensor:
    """Linear in the index of the pair; Llama 3's is linear in the number of turns."""

    def pair_that_turns(times: float) -> float:
        """The pair with this many turns within the original context."""
        return width * math.log(rope.original_positions / (2 * math.pi * times)) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(rope.fast_turns), pair_that_turns(rope.slow_turns)
    if rope.whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    # Bounds, and what is added where they meet, are as models were trained with.
    first, last = max(first, 0), min(last, width - 1)
    return 1 - ((pairs - first) / ((last - first) or 0.001)).clamp(0.0, 1.0)

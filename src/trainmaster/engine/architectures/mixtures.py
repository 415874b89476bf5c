"""Mixtures of experts: MLPs of which a router chooses a few for each token."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Scores(Enum):
    """How a router's logits become the weights of experts."""

    SOFTMAX = 0


class Stored(Enum):
    """How checkpoints store the experts of a layer."""

    EACH = 0
    """Each expert has weights of its own; transformers' modules have them together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    layers: tuple[bool, ...]
    """For each layer, whether it has experts; others have a plain MLP."""
    experts: int
    chosen: int
    """Experts for each token."""
    width: int
    """Of the hidden layer of each expert."""
    scores: Scores = Scores.SOFTMAX
    normalized: bool = True
    """Whether the weights of a token's experts add up to 1."""
    stored: Stored = Stored.EACH
    module: str = "mlp"
    """How files call the mixture."""
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """How files call an expert's weights."""

"""Mixtures of experts: MLPs of which a router chooses a few for each token."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Stored(Enum):
    """How published checkpoints store the experts of a layer."""

    EACH = 0
    """Each expert has weights of its own; transformers' modules have them together."""
    TOGETHER = 1
    """As transformers' modules have them, or as MXFP4."""
    TRANSPOSED = 2
    """Together, with the matrices the other way round."""


class Scores(Enum):
    """How a router's numbers become the scores of experts."""

    SOFTMAX = 0
    SIGMOID = 1
    """Each for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroups:
    """A token first chooses groups of experts, and then experts of these groups alone."""

    count: int
    chosen: int
    best: int
    """A group is as good as the sum of the scores of this many of its experts, its best ones."""


@dataclass(frozen=True, slots=True)
class Clamp:
    """`(up + 1) * gate * sigmoid(steepness * gate)`, of gates up to a limit and ups between both limits."""

    steepness: float
    limit: float


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
    corrected: bool = False
    """Whether the choice, and nothing else, adds a number to the score of each expert: one that balances experts."""
    groups: ExpertGroups | None = None
    normalized: bool = True
    """Whether the weights of a token's experts add up to 1."""
    scale: float = 1.0
    """Multiplies these weights."""
    exact: bool = False
    """Whether the router computes with at least 32 bits, whatever the type of its weights."""
    shared: str = "shared_expert"
    """How the expert of all tokens is called."""
    shared_width: int = 0
    """Of its hidden layer; 0: there is none."""
    shared_gate: bool = False
    """Whether each token decides how much of it is added."""
    router: str = "gate"
    """How the router is called."""
    router_bias: bool = False
    bias: bool = False
    """Whether the products of experts have biases."""
    interleaved: bool = False
    """Whether weights are [experts, in, out], and gate and up take turns in the outputs of their product."""
    clamp: Clamp | None = None
    stored: Stored = Stored.EACH
    module: str = "mlp"
    """How files call the mixture."""
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """How files call an expert's weights."""

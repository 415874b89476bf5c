"""Requests to the engine, results and errors. NumPy is not imported: the server reads configurations without it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


class Blame(StrEnum):
    USER = "user"
    SERVER = "server"


class EngineError(Exception):
    """A request cannot be done; the message says why and what to do instead."""

    def __init__(self, message: str, blame: Blame = Blame.USER) -> None:
        super().__init__(message)
        self.blame = blame


class Trained(StrEnum):
    ADAPTER = "adapter"
    ALL = "all"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    rank: int
    alpha: float = 32.0
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    init: str = "kaiming"
    """`kaiming` or `nora`: the initialization of the factor that is not zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    tokens: np.ndarray
    """int64 [length]."""
    inputs: Mapping[str, np.ndarray]
    """By name, such as `target_tokens` int64 and `weights` float32: [length], or [length, k]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    model_id: str
    data: tuple[Datum, ...]
    loss: str
    options: Mapping[str, float | str] = field(default_factory=dict)
    backward: bool = True


def check_tokens(what: str, tokens: np.ndarray, *, vocabulary: int, context: int) -> None:
    if not tokens.size:
        raise EngineError(f"{what} has no tokens")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise EngineError(f"{what}: its tokens are not a sequence of whole numbers")
    if len(tokens) > context:
        raise EngineError(f"{what} has {len(tokens)} tokens; the context length is {context}")
    check_vocabulary(f"the tokens of {what}", tokens, vocabulary)


def check_vocabulary(what: str, tokens: np.ndarray, vocabulary: int) -> None:
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        strange = next(int(token) for token in tokens.flat if not 0 <= token < vocabulary)
        raise EngineError(f"{what} have a token {strange}; the model's vocabulary has {vocabulary}, from 0 on")


def check_ranges(options: object, ranges: Iterable[tuple[str, bool, str]]) -> None:
    """Refuse an option that is out of its range. Each row: the option, whether it fits, and the range in words."""
    for name, fits, range_ in ranges:
        value = getattr(options, name)
        if not fits or (isinstance(value, float) and not math.isfinite(value)):
            raise EngineError(f"{name} is {value!r}; it has to be {range_}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    outputs: tuple[Mapping[str, np.ndarray], ...]
    """For each datum in order: `logprobs`, float32, in the shape of its `target_tokens`."""
    metrics: Mapping[str, float]
    """Each name is `name:reduction`; `loss:sum` is among them."""


class Normalization(StrEnum):
    NONE = "none"
    NUM_LOSS_TOKENS = "num_loss_tokens"
    NUM_SEQUENCES = "num_sequences"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamOptions:
    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """0: gradients are not clipped."""
    normalization: Normalization = Normalization.NONE
    grad_norm_metrics: str = "off"
    """`off`, `basic` or `detailed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    request_id: str
    prompt: tuple[int, ...]
    num_samples: int = 1
    max_tokens: int | None = None
    """None: as many as fit into the context."""
    seed: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop_tokens: tuple[int, ...] | None = None
    """None: the model's end-of-text tokens; empty: none."""
    stop_strings: tuple[str, ...] = ()
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0


class StopReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """One continuation. Its last tokens are the stop token, or those that contain the stop string."""

    tokens: np.ndarray
    """int32."""
    logprobs: np.ndarray
    """float32, by the model's distribution at temperature 1, as training computes it."""
    stop_reason: StopReason
    topk: tuple[np.ndarray, np.ndarray] | None = None
    """Token ids int32 [length, k] and their logprobs float32 [length, k]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: np.ndarray | None = None
    """float32 [prompt]; NaN at 0."""
    topk_prompt_logprobs: tuple[np.ndarray, np.ndarray] | None = None
    """Token ids int32 [prompt, k] and their logprobs float32 [prompt, k]; the first row has id 0 and -99999."""

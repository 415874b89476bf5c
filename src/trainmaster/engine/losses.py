"""The loss functions of the log-probabilities of target tokens; the formulas are in docs/reference/losses.md.

Every loss is a sum over tokens, never a mean; the optimizer step decides what to divide by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from trainmaster.engine.types import Datum, EngineError

TARGETS = "target_tokens"
WEIGHTS = "weights"
LOGPROBS = "logprobs"
ADVANTAGES = "advantages"
OUTPUT = "output"
"""The option by which clients ask for embeddings or projections."""
CLIP_LOW = "clip_low_threshold"
CLIP_HIGH = "clip_high_threshold"
RATIO_MASK = "sequence_ratio_mask"


Options = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The inputs of a loss: consecutive sequences of a request, end to end. A request may be computed in parts."""

    logprobs: Tensor
    """Of the target tokens, by the current weights: float32 [tokens], or [tokens, k]."""
    inputs: Mapping[str, Tensor]
    """By name, float32, in the shape of the log-probabilities."""
    options: Options
    lengths: Tensor


@dataclass(frozen=True, slots=True)
class TokenLosses:
    values: Tensor
    """In the shape of the log-probabilities; their sum is the loss."""
    ratios: Tensor | None = None
    """The probability of each token now over its probability when it was sampled (`logprobs`), before clipping."""


@dataclass(frozen=True, slots=True)
class LossOption:
    default: float
    _: KW_ONLY
    least: float = -math.inf
    most: float | str = math.inf
    """A number, or the name of another option that must not be smaller."""


Default = Callable[[Options, Mapping[str, np.ndarray]], np.ndarray | float]
"""Computes an optional input from the options and the other inputs: one value for each target, or one for all."""


Formula = Callable[[Tokens], TokenLosses]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFunction:
    formula: Formula
    required: tuple[str, ...] = ()
    optional: Mapping[str, Default] = field(default_factory=dict)
    options: Mapping[str, LossOption] = field(default_factory=dict)
    loss_tokens: str | None = None
    """The input that is nonzero at the tokens that count as loss tokens; None: all tokens count."""
    wide: bool = False
    """Whether a position may have several target tokens."""
    token_wise: bool = False
    """Whether a token's loss depends on its own values alone. Then a GPU computes the loss and its gradients for some
    rows at a time, of parts of sequences: the formula must not look at the lengths."""


def _cross_entropy(tokens: Tokens) -> TokenLosses:
    return TokenLosses(-tokens.logprobs * tokens.inputs[WEIGHTS])


def _importance_sampling(tokens: Tokens) -> TokenLosses:
    ratios = _ratios(tokens)
    return TokenLosses(-ratios * tokens.inputs[ADVANTAGES], ratios.detach())


def _ppo(tokens: Tokens) -> TokenLosses:
    return _clipped(_ratios(tokens), tokens.inputs)


def _gspo(tokens: Tokens) -> TokenLosses:
    now, marked = tokens.logprobs.detach(), tokens.inputs[RATIO_MASK] != 0
    log_ratios = torch.where(marked, now - tokens.inputs[LOGPROBS], 0.0)
    total = torch.segment_reduce(log_ratios, "sum", lengths=tokens.lengths)
    count = torch.segment_reduce(marked.to(now.dtype), "sum", lengths=tokens.lengths)
    of_sequence = (total / count.clamp(min=1)).repeat_interleave(tokens.lengths)
    # The value is the sequence's, the gradient that of the token's own log-probability.
    per_token = torch.where(tokens.inputs[ADVANTAGES] != 0, of_sequence, 0.0) + (tokens.logprobs - now)
    return _clipped(per_token.exp(), tokens.inputs)


def _cispo(tokens: Tokens) -> TokenLosses:
    ratios = _ratios(tokens).detach()
    weights = ratios.clamp(tokens.inputs[CLIP_LOW], tokens.inputs[CLIP_HIGH])
    return TokenLosses(-weights * tokens.logprobs * tokens.inputs[ADVANTAGES], ratios)


def _dro(tokens: Tokens) -> TokenLosses:
    distance = tokens.logprobs - tokens.inputs[LOGPROBS]
    values = 0.5 * tokens.options["beta"] * distance.square() - tokens.logprobs * tokens.inputs[ADVANTAGES]
    return TokenLosses(values, _ratios(tokens).detach())


def _reinforce(tokens: Tokens) -> TokenLosses:
    return TokenLosses(-tokens.logprobs * tokens.inputs[ADVANTAGES])


def _ratios(tokens: Tokens) -> Tensor:
    """1 where the advantage is 0: a huge ratio would give NaN there."""
    return torch.where(tokens.inputs[ADVANTAGES] != 0, tokens.logprobs - tokens.inputs[LOGPROBS], 0.0).exp()


def _clipped(ratios: Tensor, inputs: Mapping[str, Tensor]) -> TokenLosses:
    """The lesser of both objectives, so that no token gains by a ratio beyond the thresholds."""
    advantages = inputs[ADVANTAGES]
    clipped = ratios.clamp(inputs[CLIP_LOW], inputs[CLIP_HIGH])
    return TokenLosses(-torch.minimum(ratios * advantages, clipped * advantages), ratios.detach())


def _constant(value: float) -> Default:
    return lambda _options, _inputs: value


def _option(name: str) -> Default:
    return lambda options, _inputs: options[name]


def _has_advantage(_options: Options, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    return inputs[ADVANTAGES].astype(bool)


def _policy(formula: Formula, **options: LossOption) -> LossFunction:
    return LossFunction(
        formula=formula,
        required=(LOGPROBS, ADVANTAGES),
        options=options,
        loss_tokens=ADVANTAGES,
        token_wise=formula is not _gspo,
    )


def _clipping(formula: Formula, low: float, high: float, **optional: Default) -> LossFunction:
    """A policy loss that clips ratios, by default to these thresholds; a datum may have other ones for each token."""
    options = {CLIP_LOW: LossOption(low, most=CLIP_HIGH), CLIP_HIGH: LossOption(high)}
    thresholds = {CLIP_LOW: _option(CLIP_LOW), CLIP_HIGH: _option(CLIP_HIGH)}
    return replace(_policy(formula, **options), optional=thresholds | optional)


LOSSES: Mapping[str, LossFunction] = {
    "cross_entropy": LossFunction(
        formula=_cross_entropy,
        optional={WEIGHTS: _constant(1.0)},
        loss_tokens=WEIGHTS,
        wide=True,
        token_wise=True,
    ),
    "importance_sampling": _policy(_importance_sampling),
    "ppo": _clipping(_ppo, 0.8, 1.2),
    "cispo": _clipping(_cispo, 0.8, 1.2),
    "dro": _policy(_dro, beta=LossOption(0.05, least=0.0)),
    "gspo": _clipping(_gspo, 1 - 3e-4, 1 + 4e-4, sequence_ratio_mask=_has_advantage),
    "dapo": _clipping(_ppo, 0.8, 1.28),
    "reinforce": LossFunction(
        formula=_reinforce,
        required=(ADVANTAGES,),
        optional={LOGPROBS: _constant(0.0)},
        loss_tokens=ADVANTAGES,
        token_wise=True,
    ),
}


def find(name: str) -> LossFunction:
    if loss := LOSSES.get(name):
        return loss
    raise EngineError(f"unknown loss function {name!r}; there are {', '.join(LOSSES)}")


def options_of(name: str, given: Mapping[str, float | str]) -> dict[str, float]:
    known = find(name).options
    options = {option: each.default for option, each in known.items()}
    for option, value in given.items():
        if option == OUTPUT and option not in options:
            raise EngineError(f"the option {option!r} is {value!r}: a pass gives log-probabilities here, no embeddings")
        if option not in options:
            which = f"it knows {', '.join(options)}" if options else "it has none"
            raise EngineError(f"unknown option {option!r} of the loss function {name}; {which}")
        if isinstance(value, str) or not math.isfinite(value):
            raise EngineError(f"the option {option!r} of the loss function {name} is {value!r}; it has to be a number")
        options[option] = float(value)
    for option, each in known.items():
        value, shown = options[option], f"the option {option!r} of the loss function {name} is {options[option]:g}"
        if value < each.least:
            raise EngineError(f"{shown}; it cannot be below {each.least:g}")
        most, which = (options[each.most], f"{each.most} ") if isinstance(each.most, str) else (each.most, "")
        if value > most:
            raise EngineError(f"{shown}; it cannot be above {which}{most:g}")
    return options


def inputs_of(name: str, options: Options, index: int, datum: Datum) -> dict[str, np.ndarray]:
    """The inputs of one datum: `target_tokens` int64, the others float32, with defaults for optional ones."""
    loss, where = find(name), f"datum {index}"
    known = (TARGETS, *loss.required, *loss.optional)
    listed = ", ".join(known)
    for unknown in datum.inputs.keys() - set(known):
        raise EngineError(f"{where} has an input {unknown!r} that {name} does not know; it knows {listed}")
    for needed in (TARGETS, *loss.required):
        if needed not in datum.inputs:
            raise EngineError(f"{where} lacks the input {needed!r}, which {name} needs; it knows {listed}")
    targets = datum.inputs[TARGETS]
    if targets.dtype.kind not in "iu":
        raise EngineError(f"{TARGETS} of {where} are of type {targets.dtype}; they have to be whole numbers")
    wide = targets.ndim == 2 and loss.wide and targets.shape[1] > 0
    if len(targets.shape) not in (1, 2) or targets.shape[0] != len(datum.tokens) or not (targets.ndim == 1 or wide):
        allowed = f"[{len(datum.tokens)}] or [{len(datum.tokens)}, k]" if loss.wide else f"[{len(datum.tokens)}]"
        raise EngineError(
            f"{TARGETS} of {where} have the shape {list(targets.shape)}; {name} takes {allowed}, as the datum has "
            f"{len(datum.tokens)} tokens"
        )
    inputs = {TARGETS: targets.astype(np.int64, copy=False)}
    for key in (*loss.required, *loss.optional):
        if key in datum.inputs:
            inputs[key] = _numbers(key, datum.inputs[key], targets.shape, where)
    defaults = {key: default for key, default in loss.optional.items() if key not in inputs}
    return inputs | {
        key: np.full(targets.shape, default(options, inputs), np.float32) for key, default in defaults.items()
    }


def count_loss_tokens(loss: LossFunction, inputs: Mapping[str, np.ndarray]) -> int:
    return int(np.count_nonzero(_loss_tokens(loss, inputs)))


def measure(
    loss: LossFunction,
    values: np.ndarray,
    ratios: np.ndarray | None,
    logprobs: np.ndarray,
    inputs: Mapping[str, np.ndarray],
    lengths: Sequence[int],
) -> dict[str, float]:
    """The metrics of sequences end to end; one without loss tokens counts as unchanged by the policy.

    A mean is over tokens, then over sequences, so that parts merge by their numbers of sequences, here and in clients.
    """
    starts = np.concatenate([[0], np.cumsum(lengths[:-1])]).astype(np.int64)
    counted = _loss_tokens(loss, inputs)
    metrics = {"loss:sum": float(values.sum(dtype=np.float64)), "loss_tokens:sum": float(np.count_nonzero(counted))}
    if ratios is None:
        return metrics
    share = counted / np.maximum(np.add.reduceat(counted.astype(np.float64), starts), 1).repeat(lengths)

    def mean(per_token: np.ndarray) -> float:
        return float(np.add.reduceat(np.where(counted, per_token, 0.0) * share, starts).mean())

    wide_ratios = ratios.astype(np.float64)
    log_ratios = np.where(counted, logprobs.astype(np.float64) - inputs[LOGPROBS], 0.0)
    with np.errstate(over="ignore"):
        metrics["kl:mean"] = mean(np.expm1(log_ratios) - log_ratios)
    learned = wide_ratios[counted]
    metrics["ratio:mean"] = 1.0 + mean(wide_ratios - 1.0)
    metrics["ratio:max"] = float(learned.max(initial=-math.inf)) if learned.size else 1.0
    metrics["ratio:min"] = float(learned.min(initial=math.inf)) if learned.size else 1.0
    if CLIP_LOW in inputs:
        metrics["clip_fraction:mean"] = mean((ratios < inputs[CLIP_LOW]) | (ratios > inputs[CLIP_HIGH]))
    return metrics


def merge(parts: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Merge the metrics of all parts of a request, each with its number of sequences."""
    return {name: _REDUCTIONS[name.partition(":")[2]]([(n, part[name]) for n, part in parts]) for name in parts[0][1]}


_REDUCTIONS: Mapping[str, Callable[[list[tuple[int, float]]], float]] = {
    "sum": lambda parts: math.fsum(value for _, value in parts),
    "mean": lambda parts: math.fsum(n * value for n, value in parts) / sum(n for n, _ in parts),
    "max": lambda parts: max(value for _, value in parts),
    "min": lambda parts: min(value for _, value in parts),
}


def _loss_tokens(loss: LossFunction, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    if loss.loss_tokens is None:
        return np.ones(len(inputs[TARGETS]), bool)
    values = inputs[loss.loss_tokens]
    return values.astype(bool) if values.ndim == 1 else np.any(values, axis=1)


def _numbers(key: str, given: np.ndarray, shape: tuple[int, ...], where: str) -> np.ndarray:
    if given.shape != shape:
        raise EngineError(
            f"the input {key!r} of {where} has the shape {list(given.shape)}; it must have that of its {TARGETS}, "
            f"{list(shape)}"
        )
    if given.dtype.kind not in "iufb":
        raise EngineError(f"the input {key!r} of {where} is of type {given.dtype}; it has to be numbers")
    numbers = given.astype(np.float32, copy=False)
    if not np.isfinite(numbers).all():
        raise EngineError(f"the input {key!r} of {where} has values that are not finite")
    return numbers

"""What requests say, as the engine's own values; a field that is wrong is the client's error, and named."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from trainmaster.engine.types import AdamOptions, EngineError, LoraOptions, Normalization

DEFAULT_LEARNING_RATE = 1e-4
"""Of the public clients, for a job that names none."""
MAX_RANK = 1024
MAX_METADATA_BYTES = 32 << 10
"""The server keeps so much with a checkpoint, and some room beside it."""
GRAD_NORM_METRICS = ("off", "basic", "detailed")
LORA_INITS = ("kaiming", "nora")

_METRICS = "emit_grad_norm_metrics"
_CALIBRATION = "decision_calibration"


def number(fields: Mapping[str, Any], name: str, default: float) -> float:
    """A finite number of a request; the default where it is not there."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise EngineError(f"{name}: {value!r} is no number")
    return float(value)


def whole(fields: Mapping[str, Any], name: str, default: int | None, *, low: int, high: int) -> int | None:
    """A whole number of a request, from `low` to `high`; the default where it is not there."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise EngineError(f"{name}: {value!r} is no whole number")
    if not low <= value <= high:
        raise EngineError(f"{name}: {value} is not between {low} and {high}")
    return value


def flag(fields: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """Yes or no."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise EngineError(f"{name}: {value!r} is neither true nor false")
    return value


def choice(fields: Mapping[str, Any], name: str, default: str, choices: tuple[str, ...]) -> str:
    """One of several words."""
    value = fields.get(name)
    if value is None:
        return default
    if value not in choices:
        raise EngineError(f"{name}: {value!r} is not among {', '.join(choices)}")
    return str(value)


def metadata(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a client notes down with a model or a checkpoint; None where it says nothing."""
    return _small_object(fields, "user_metadata")


def decision_calibration(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the `metadata` of a sampler checkpoint hold; None where they say nothing."""
    given = _small_object(fields, "metadata") or {}
    if others := sorted(given.keys() - {_CALIBRATION}):
        raise EngineError(f"metadata: {_CALIBRATION} is kept with a checkpoint, and not {others[0]!r}")
    return _small_object(given, _CALIBRATION)


def _small_object(fields: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    given = fields.get(name)
    if given is None:
        return None
    try:
        size = len(json.dumps(given, allow_nan=False))
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{name}: {error}") from error
    if not isinstance(given, Mapping) or size > MAX_METADATA_BYTES:
        raise EngineError(f"{name}: an object of at most {MAX_METADATA_BYTES >> 10} KiB is wanted")
    return dict(given)


def lora_options(config: Mapping[str, Any], *, rank: int) -> LoraOptions:
    """The adapter that `lora_config` asks for, of a rank that was settled already."""
    return LoraOptions(
        rank=rank,
        alpha=number(config, "alpha", 32.0),
        seed=whole(config, "seed", None, low=-(2**63), high=2**64 - 1),
        train_attn=flag(config, "train_attn", default=True),
        train_mlp=flag(config, "train_mlp", default=True),
        train_unembed=flag(config, "train_unembed", default=True),
        init=choice(config, "init_method", "kaiming", LORA_INITS),
    )


def adam_options(fields: Mapping[str, Any], *, learning_rate: float | None) -> AdamOptions:
    """The step that an optim_step asks for; `learning_rate` is the job's, for one that names none.

    Raises:
        EngineError: it asks for another optimizer, or a field is wrong.
    """
    other = fields.get("optimizer_params")
    if other is not None:
        named = other.get("type") if isinstance(other, Mapping) else other
        raise EngineError(f"the optimizer {named!r} is not built here; this service steps with AdamW (adam_params)")
    params = fields.get("adam_params") or {}
    if not isinstance(params, Mapping):
        raise EngineError(f"adam_params: {params!r} is no object")
    metrics = params.get(_METRICS)
    if isinstance(metrics, bool):
        metrics = "basic" if metrics else "off"
    fallback = learning_rate if learning_rate is not None else DEFAULT_LEARNING_RATE
    return AdamOptions(
        learning_rate=number(params, "learning_rate", fallback),
        beta1=number(params, "beta1", 0.9),
        beta2=number(params, "beta2", 0.95),
        eps=number(params, "eps", 1e-12),
        weight_decay=number(params, "weight_decay", 0.0),
        grad_clip_norm=number(params, "grad_clip_norm", 0.0),
        normalization=Normalization(
            choice(fields, "grad_accumulation_normalization", Normalization.NONE, tuple(Normalization))
        ),
        grad_norm_metrics=choice(
            {"emit_grad_norm_metrics": metrics}, "emit_grad_norm_metrics", "off", GRAD_NORM_METRICS
        ),
    )

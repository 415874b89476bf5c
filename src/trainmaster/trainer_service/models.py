"""The models that are loaded: what may be created, who owns it, and what became of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainmaster.engine.engine import Engine
from trainmaster.engine.types import AdamOptions, Blame, EngineError, LoraOptions, Normalization, Trained
from trainmaster.protocol.trainer_requests import ModelMode
from trainmaster.trainer_service.configuration import Configuration
from trainmaster.trainer_service.schema import number, shown, whole

# What requests say, as the engine's own values; a field that is wrong is the client's error, and named.

DEFAULT_LEARNING_RATE = 1e-4
"""Of the public clients, for a job that names none."""
MAX_RANK = 1024
MAX_METADATA_BYTES = 32 << 10
"""The server keeps so much with a checkpoint, and some room beside it."""
GRAD_NORM_METRICS = ("off", "basic", "detailed")
LORA_INITS = ("kaiming", "nora")

_METRICS = "emit_grad_norm_metrics"
_CALIBRATION = "decision_calibration"


def flag(fields: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise EngineError(f"{name} must be true or false, not {shown(value)}")
    return value


def choice(fields: Mapping[str, Any], name: str, default: str, choices: tuple[str, ...]) -> str:
    value = fields.get(name)
    if value is None:
        return default
    if value not in choices:
        raise EngineError(f"{name} must be one of {', '.join(choices)}, not {shown(value)}")
    return str(value)


def metadata(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    return _small_object(fields, "user_metadata")


def decision_calibration(fields: Mapping[str, Any]) -> dict[str, Any] | None:
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
    """`learning_rate` is the job's. Raises EngineError for another optimizer, and where a field is wrong."""
    other = fields.get("optimizer_params")
    if other is not None:
        named = other.get("type") if isinstance(other, Mapping) else other
        raise EngineError(f"the optimizer {named!r} is not supported; this service steps with AdamW (adam_params)")
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
        grad_norm_metrics=choice({_METRICS: metrics}, _METRICS, "off", GRAD_NORM_METRICS),
    )


NO_TRAINING = "this trainer only runs models forward (forward_only): train on another one"


@dataclass(slots=True, kw_only=True)
class LoadedModel:
    model_id: str
    session_id: str
    door: str
    trained: Trained
    lora: LoraOptions | None = None
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    loaded: bool = False
    saved_path: str | None = None
    """Of the last training checkpoint, as its client knows it."""
    changes: int = 0
    """How often it was trained or loaded."""
    saved_changes: int = 0
    whole_export: str | None = None
    """Where its last sampler checkpoint with whole weights lies: what a delta refers to."""
    broken: str | None = None
    """Why it cannot be used any more: an operation failed half-way."""

    @property
    def unsaved(self) -> bool:
        return self.changes > self.saved_changes and not self.broken


class LoadedModels:
    def __init__(self, configuration: Configuration, engine: Engine) -> None:
        self._configuration = configuration
        self._engine = engine
        self._models: dict[str, LoadedModel] = {}

    def __len__(self) -> int:
        return len(self._models)

    def __iter__(self) -> Iterator[LoadedModel]:
        return iter(list(self._models.values()))

    def create(self, model_id: str, fields: Mapping[str, Any], *, door: str) -> LoadedModel:
        configuration = self._configuration
        base_model = fields.get("base_model")
        if base_model is not None and not (isinstance(base_model, str) and base_model in configuration.names):
            raise EngineError(f"this trainer holds {configuration.base_model}, and not {base_model!r}")
        optimizer = fields.get("optimizer_config") or {}
        if not isinstance(optimizer, dict) or optimizer.get("type", "adamw") != "adamw":
            raise EngineError(f"the optimizer {optimizer!r} is not supported; this service has AdamW")
        if fields.get("projection_head_dim"):
            raise EngineError("projection_head_dim: projection heads are not supported")
        if model_id in self._models:
            raise EngineError(f"there is a model {model_id} already")
        base_only = flag(fields, "base_only", default=False)
        lora = None if base_only else self._lora(fields)
        if lora is not None:
            trained = Trained.ADAPTER
        else:
            trained = Trained.NOTHING if base_only or configuration.mode is ModelMode.FORWARD_ONLY else Trained.ALL
        self._require_room(trained)
        model = LoadedModel(
            model_id=model_id,
            session_id=str(fields.get("session_id") or model_id.partition(":train:")[0]),
            door=door,
            trained=trained,
            lora=lora,
            user_metadata=metadata(fields) or {},
        )
        self._engine.create_model(model_id, trained, lora)
        self._models[model_id] = model
        return model

    def get(self, model_id: str) -> LoadedModel:
        if (model := self._models.get(model_id)) is None:
            raise EngineError(f"there is no model {model_id} here: it was unloaded, or never created")
        if model_id not in self._engine.models:
            # It failed in some ranks alone, and the engine has dropped it.
            raise EngineError(f"{model_id} was given up: make a new model from saved weights", Blame.SERVER)
        return model

    def require_trained(self, model_id: str) -> LoadedModel:
        model = self.get(model_id)
        if self._configuration.mode is ModelMode.FORWARD_ONLY:
            raise EngineError(NO_TRAINING)
        if model.trained is Trained.NOTHING:
            raise EngineError(f"{model_id} is the base model itself (base_only), of which nothing is trained")
        return model

    def unload(self, model_id: str) -> None:
        if self._models.pop(model_id, None) is not None and model_id in self._engine.models:
            self._engine.unload(model_id)

    def steps(self, model_id: str) -> int:
        """With those before a load."""
        return self._engine.models[model_id].optimizer.steps

    def _lora(self, fields: Mapping[str, Any]) -> LoraOptions | None:
        configuration, config = self._configuration, fields.get("lora_config")
        if config is not None and not isinstance(config, Mapping):
            raise EngineError(f"lora_config: {config!r} is no object")
        asked = whole(config or {}, "rank", None, low=0, high=MAX_RANK)
        default = configuration.lora_rank if configuration.mode is ModelMode.LORA else 0
        rank = default if asked is None else asked
        if 0 < configuration.lora_rank < rank:
            raise EngineError(
                f"lora_config.rank: {rank} is more than this trainer's lora_rank of {configuration.lora_rank}"
            )
        if rank == 0 and configuration.mode is ModelMode.LORA:
            raise EngineError(
                "this trainer trains adapters: name a lora_config.rank of 1 or more, or train the full parameters "
                "in a job with lora_rank 0"
            )
        if rank > 0 and configuration.mode is ModelMode.FULL:
            raise EngineError(
                f"this trainer trains the full parameters (lora_rank 0), and no adapter of rank {rank}: name the rank "
                "when the job is created"
            )
        return lora_options(config or {}, rank=rank) if rank > 0 else None

    def _require_room(self, trained: Trained) -> None:
        held = sum(1 for model in self._models.values() if model.trained is not Trained.NOTHING)
        if trained is not Trained.NOTHING and held >= self._configuration.max_adapters:
            raise EngineError(
                f"{held} models are loaded, and this trainer holds no more (max_adapters): "
                "unload one that is no longer needed, or end its session"
            )

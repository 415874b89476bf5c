"""The models that are loaded: what may be created, who owns it, and what became of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainmaster.engine.engine import Engine
from trainmaster.engine.types import Blame, EngineError, LoraOptions, Trained
from trainmaster.trainer_service.configuration import Configuration, Mode
from trainmaster.trainer_service.options import MAX_RANK, flag, lora_options, metadata, whole

NO_TRAINING = "this trainer only runs models forward (forward_only): train on another one"


@dataclass(slots=True, kw_only=True)
class Model:
    """One model of one client."""

    model_id: str
    session_id: str
    door: str
    trained: Trained
    lora: LoraOptions | None = None
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    loaded: bool = False
    """Whether its weights came from a checkpoint."""
    saved_path: str | None = None
    """Of the last training checkpoint, as its client knows it."""
    changes: int = 0
    """How often it was trained or loaded."""
    saved_changes: int = 0
    """How many of these its last training checkpoint has."""
    whole_export: str | None = None
    """Where its last sampler checkpoint with whole weights lies: what a delta refers to."""
    broken: str | None = None
    """Why nobody may go on with it: an operation failed half-way."""

    @property
    def unsaved(self) -> bool:
        """Whether something that can be gone on with would be lost with it."""
        return self.changes > self.saved_changes and not self.broken


class Models:
    """All models that are loaded now."""

    def __init__(self, configuration: Configuration, engine: Engine) -> None:
        self._configuration = configuration
        self._engine = engine
        self._models: dict[str, Model] = {}

    def __len__(self) -> int:
        return len(self._models)

    def __iter__(self) -> Iterator[Model]:
        return iter(list(self._models.values()))

    def create(self, model_id: str, fields: Mapping[str, Any], *, door: str) -> Model:
        """Make what a create_model asks for.

        Raises:
            EngineError: this trainer does not hold that base model, or makes no such model.
        """
        configuration = self._configuration
        base_model = fields.get("base_model")
        if base_model is not None and not (isinstance(base_model, str) and base_model in configuration.names):
            raise EngineError(f"this trainer holds {configuration.base_model}, and not {base_model!r}")
        optimizer = fields.get("optimizer_config") or {}
        if not isinstance(optimizer, dict) or optimizer.get("type", "adamw") != "adamw":
            raise EngineError(f"the optimizer {optimizer!r} is not built here; this service has AdamW")
        if fields.get("projection_head_dim"):
            raise EngineError("projection_head_dim: projection heads are not built here")
        if model_id in self._models:
            raise EngineError(f"there is a model {model_id} already")
        lora = self._lora(fields)
        trained = self._trained(fields, lora)
        self._require_room(trained)
        model = Model(
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

    def get(self, model_id: str) -> Model:
        """The model of this id.

        Raises:
            EngineError: there is none, or none any more.
        """
        try:
            model = self._models[model_id]
        except KeyError:
            raise EngineError(f"there is no model {model_id} here: it was unloaded, or never created") from None
        if model_id not in self._engine.models:
            # It failed in some ranks alone, and the engine has dropped it.
            raise EngineError(f"{model_id} was given up: make a new model from saved weights", Blame.SERVER)
        return model

    def require_trained(self, model_id: str) -> Model:
        """The model of this id, which may be trained.

        Raises:
            EngineError: there is none, or it is not for training.
        """
        model = self.get(model_id)
        if self._configuration.mode is Mode.FORWARD_ONLY:
            raise EngineError(NO_TRAINING)
        if model.trained is Trained.NOTHING:
            raise EngineError(f"{model_id} is the base model itself (base_only), of which nothing is trained")
        return model

    def unload(self, model_id: str) -> None:
        """Forget a model and free what it holds; nothing happens when there is none."""
        if self._models.pop(model_id, None) is not None and model_id in self._engine.models:
            self._engine.unload(model_id)

    def steps(self, model_id: str) -> int:
        """How many steps its optimizer has made, with those before a load."""
        return self._engine.models[model_id].optimizer.steps

    def _lora(self, fields: Mapping[str, Any]) -> LoraOptions | None:
        """The adapter that is asked for; None where none is."""
        if flag(fields, "base_only", default=False):
            return None
        configuration, config = self._configuration, fields.get("lora_config")
        if config is not None and not isinstance(config, Mapping):
            raise EngineError(f"lora_config: {config!r} is no object")
        asked = whole(config or {}, "rank", None, low=0, high=MAX_RANK)
        default = configuration.lora_rank if configuration.mode is Mode.LORA else 0
        rank = default if asked is None else asked
        if 0 < configuration.lora_rank < rank:
            raise EngineError(
                f"lora_config.rank: {rank} is more than this trainer's lora_rank of {configuration.lora_rank}"
            )
        if rank == 0 and configuration.mode is Mode.LORA:
            raise EngineError(
                "this trainer trains adapters: name a lora_config.rank of 1 or more, or train the full parameters "
                "in a job with lora_rank 0"
            )
        if rank > 0 and configuration.mode is Mode.FULL:
            raise EngineError(
                f"this trainer trains the full parameters (lora_rank 0), and no adapter of rank {rank}: name the rank "
                "when the job is created"
            )
        return lora_options(config or {}, rank=rank) if rank > 0 else None

    def _trained(self, fields: Mapping[str, Any], lora: LoraOptions | None) -> Trained:
        if lora is not None:
            return Trained.ADAPTER
        if flag(fields, "base_only", default=False) or self._configuration.mode is Mode.FORWARD_ONLY:
            return Trained.NOTHING
        return Trained.ALL

    def _require_room(self, trained: Trained) -> None:
        held = sum(1 for model in self._models.values() if model.trained is not Trained.NOTHING)
        if trained is not Trained.NOTHING and held >= self._configuration.max_adapters:
            raise EngineError(
                f"{held} models are loaded, and this trainer holds no more (max_adapters): "
                "unload one that is no longer needed, or end its session"
            )

"""What a trainer is asked to do, as typed values: reads `training.json` and `prepared.json`.

Both were made by our own code, and the first was checked at submission. What cannot be read here is a fault
between our own parts, or a file that somebody changed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self, TypeVar

_T = TypeVar("_T")


class DocumentError(ValueError):
    """The job asks for something that its trainer cannot do; the message says what, and what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """The model to start from."""

    model_id: str
    revision: str | None = None
    dtype: str = "auto"
    trust_remote_code: bool = False
    model_kwargs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """What does the training, and how it is spread over ranks."""

    type: str = "HF_TRAINER"
    config: Mapping[str, str] = field(default_factory=dict)
    backend: str = "nccl"
    strategy: str | None = None
    distributed_config: Mapping[str, str] = field(default_factory=dict)

    @property
    def sharded(self) -> bool:
        """Whether weights and optimizer are parted over the ranks."""
        return self.type == "FSDP"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters:
    """The values of `training_config.hyperparameters`, typed. The server fills in a training type's own defaults."""

    learning_rate: float = 2e-5
    num_train_epochs: float = 3.0
    max_steps: int = -1
    warmup_steps: float = 0
    """Steps, or below 1 a share of all steps."""
    lr_scheduler_type: str = "linear"
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    optim: str | None = None
    logging_steps: float = 10
    eval_strategy: str | None = None
    eval_steps: int | None = None
    gradient_checkpointing: bool = False
    mixed_precision: str = "auto"
    attn_implementation: str | None = None
    torch_compile: bool = False
    neftune_noise_alpha: float | None = None
    padding_free: bool = False
    use_liger_kernel: bool = False
    tracker: str = "none"
    tracker_project: str | None = None
    completion_only_loss: bool | None = None
    assistant_only_loss: bool | None = None
    lora_r: int = 16
    lora_alpha: float = 32
    lora_dropout: float = 0.0
    lora_target_modules: str | None = "all-linear"
    lora_bias: str = "none"
    use_rslora: bool = False
    use_dora: bool = False
    modules_to_save: str | None = None
    lora_init: bool | str = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """How rows become batches."""

    batch_size: int = 1
    gradient_accumulation_steps: int = 1
    num_workers: int = 0
    pin_memory: bool | None = None
    seed: int = 0
    padding: str | None = None
    packing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """When checkpoints are saved, and what is exported."""

    save_strategy: str = "steps"
    save_steps: int = 500
    save_total_limit: int = 3
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    save_on_each_node: bool = False
    output_model_name: str | None = None
    output_path: str | None = None
    export_format: str = "safetensors"
    merge_lora: bool = False

    @property
    def best_is_greater(self) -> bool:
        """Whether a greater value of the metric is better."""
        if self.greater_is_better is not None:
            return self.greater_is_better
        return "loss" not in (self.metric_for_best_model or "").lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One training: the content of `training.json`."""

    name: str
    training_type: str
    base_model: BaseModel
    framework: Framework
    hyperparameters: Hyperparameters
    data: Data
    output: Output
    text: str = field(repr=False, default="")
    """As it was read: it is kept in every checkpoint."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """The document in a file.

        Raises:
            DocumentError: it is no such document.
        """
        text = path.read_text()
        try:
            return cls._from_json(json.loads(text), text)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DocumentError(f"{path} is no training document: {type(error).__name__}: {error}") from error

    @classmethod
    def _from_json(cls, document: Mapping[str, Any], text: str) -> Self:
        training, data, output = document["training_config"], document["data_config"], document["output_config"]
        framework = training.get("framework") or {}
        distributed = framework.get("distributed") or {}
        preprocess = data.get("preprocess") or {}
        packing = preprocess.get("packing")
        return cls(
            name=document["name"],
            training_type=training["training_type"],
            base_model=_known(BaseModel, training["base_model"]),
            framework=Framework(
                type=framework.get("type", "HF_TRAINER"),
                config=framework.get("config") or {},
                backend=distributed.get("backend", "nccl"),
                strategy=distributed.get("strategy"),
                distributed_config=distributed.get("config") or {},
            ),
            hyperparameters=Hyperparameters(**_present(training.get("hyperparameters") or {})),
            data=_known(
                Data,
                {
                    **data,
                    "padding": preprocess.get("padding"),
                    "packing": training["training_type"] == "CONTINUED_PRETRAIN" if packing is None else packing,
                },
            ),
            output=_known(Output, {**output, **(output.get("checkpoint") or {})}),
            text=text,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What the preparing step left for the ranks of its node: the content of `prepared.json`."""

    model_path: str
    tokenizer_path: str
    train_path: str
    eval_path: str | None
    train_rows: int
    train_tokens: int
    max_seq_length: int
    rows_key: str = ""
    """Another where the rows are others."""
    model_key: str = ""
    """Another where the base model is another."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """The description in a file.

        Raises:
            DocumentError: it is no such description.
        """
        try:
            document = json.loads(path.read_bytes())
            return cls(**{name: document[name] for name in cls.__slots__ if name in document})
        except (KeyError, TypeError, ValueError) as error:
            raise DocumentError(f"{path} does not say what was prepared: {type(error).__name__}: {error}") from error


def _present(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is null: that leaves it to us."""
    return {name: value for name, value in values.items() if value is not None}


def _known(kind: type[_T], values: Mapping[str, Any]) -> _T:
    names = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in _present(values).items() if name in names})


_WORDS = {"true": True, "false": False, "none": None, "null": None}


def parsed(text: str) -> Any:
    """A number, truth value, list, object or null where the text is one; else the text itself."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        value = json.loads(text)
    except ValueError:
        return _number(text)
    return value if not isinstance(value, float) or math.isfinite(value) else text


def _number(text: str) -> Any:
    # JSON has no `1.` and no `.5`, which people write.
    try:
        value = float(text)
    except ValueError:
        return text
    return value if math.isfinite(value) else text

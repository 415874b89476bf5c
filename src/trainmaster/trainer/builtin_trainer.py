"""A `BuiltinTrainer` as a training: what `training_config` and `data_config` of a job say.

A field without a counterpart is refused by its name; none is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainmaster.trainer.constants import INITIALIZER_DEFAULT_IGNORE_PATTERNS
from trainmaster.trainer.resources import Nodes, nodes_from
from trainmaster.trainer.runtimes.document import TrainingRuntime
from trainmaster.trainer.types import (
    DataFormat,
    DataType,
    HuggingFaceDatasetInitializer,
    HuggingFaceModelInitializer,
    Initializer,
    LoraConfig,
    Loss,
    S3DatasetInitializer,
    S3ModelInitializer,
    TorchTuneConfig,
    TorchTuneInstructDataset,
)

_Place = HuggingFaceDatasetInitializer | HuggingFaceModelInitializer | S3DatasetInitializer | S3ModelInitializer
_LORA, _SFT = "LORA", "SFT"
_DTYPES = {DataType.BF16: "bfloat16", DataType.FP32: "float32"}
_FORMATS = frozenset({DataFormat.JSON, DataFormat.CSV, DataFormat.PARQUET, DataFormat.ARROW, DataFormat.TEXT})
_ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
"""What torchtune calls the layers of attention, and what checkpoints of the Hub do."""
_MLP = ("gate_proj", "up_proj", "down_proj")
_OUTPUT = "lm_head"
_COLUMNS = {"input": "prompt", "output": "completion"}
"""The columns of an instruct dataset, and the fields of a row that they are."""
_S3_VARIABLES = {
    "endpoint": "AWS_ENDPOINT_URL",
    "access_key_id": "AWS_ACCESS_KEY_ID",
    "secret_access_key": "AWS_SECRET_ACCESS_KEY",
    "region": "AWS_REGION",
}


def training_from(
    config: object, runtime: TrainingRuntime, initializer: Initializer | None, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The part of a job document that a built-in trainer stands for; `env` are variables of its own.

    Raises ValueError if something is missing, cannot be read, or has no counterpart.
    """
    if not isinstance(config, TorchTuneConfig):
        raise ValueError(f"a BuiltinTrainer takes a TorchTuneConfig, not a {type(config).__name__}")
    nodes = nodes_from(
        runtime.num_nodes if config.num_nodes is None else config.num_nodes,
        config.resources_per_node or runtime.resources or None,
    )
    environment = dict(env or {})
    hyperparameters: dict[str, Any] = {}
    if config.epochs is not None:
        hyperparameters["num_train_epochs"] = config.epochs
    if config.loss is not None and not isinstance(config.loss, Loss):
        raise ValueError(f"loss must be a Loss, not {config.loss!r}")
    base_model: dict[str, Any] = {"model_id": _model(runtime, initializer, environment)}
    if config.dtype is not None:
        if not isinstance(config.dtype, DataType):
            raise ValueError(f"dtype must be a DataType, not {config.dtype!r}")
        base_model["dtype"] = _DTYPES[config.dtype]
        if config.dtype is DataType.FP32:
            hyperparameters["mixed_precision"] = "no"
    source: dict[str, Any] = {"path": _dataset(runtime, initializer, environment)}
    preprocess = _preprocessing(config.dataset_preprocess_config, source, hyperparameters)
    if config.peft_config is not None:
        hyperparameters |= dict(_adapter(config.peft_config))
    kind = _training_type(config, runtime)
    training: dict[str, Any] = {"training_type": kind, "base_model": base_model}
    if framework := _framework(kind, runtime, nodes):
        training["framework"] = framework
    data: dict[str, Any] = {"sources": [source]}
    if config.batch_size is not None:
        data["batch_size"] = config.batch_size
    if preprocess:
        data["preprocess"] = preprocess
    if hyperparameters:
        training["hyperparameters"] = hyperparameters
    if environment := {**runtime.environment, **environment}:
        training["environment"] = environment
    return {"training_config": training, "data_config": data, "resource_config": nodes.resource_config}


def default_runtime(config: object) -> str:
    """The runtime of a built-in trainer that names none."""
    return "trainmaster-lora" if isinstance(config, TorchTuneConfig) and config.peft_config else "trainmaster-sft"


def _training_type(config: TorchTuneConfig, runtime: TrainingRuntime) -> str:
    named = runtime.training_type
    if config.peft_config is None:
        return named or _SFT
    if named not in (None, _LORA):
        raise ValueError(f"the runtime {runtime.name} trains all weights ({named}), not an adapter as peft_config asks")
    return _LORA


def _framework(kind: str, runtime: TrainingRuntime, nodes: Nodes) -> dict[str, Any]:
    framework: dict[str, Any] = {}
    if kind != _LORA and (nodes.gpus_per_node or 0) * nodes.count > 1:
        framework["type"] = "FSDP"  # whole models may not fit one GPU with their optimizer
    if runtime.ranks_per_node is not None and not nodes.gpus_per_node:
        framework["distributed"] = {"world_size": runtime.ranks_per_node * nodes.count}
    return framework


def _model(runtime: TrainingRuntime, initializer: Initializer | None, environment: dict[str, str]) -> str:
    model = initializer.model if initializer else None
    if model is None and not runtime.pretrained_model:
        raise ValueError(
            f"which model? The runtime {runtime.name} has none of its own: give an Initializer with a model, such as "
            "HuggingFaceModelInitializer('hf://org/model')"
        )
    if model is None:
        return str(runtime.pretrained_model)
    if not isinstance(model, HuggingFaceModelInitializer | S3ModelInitializer):
        raise ValueError(f"a built-in trainer cannot take its model from a {type(model).__name__}")
    return _fetched("model", model, environment, ignored=INITIALIZER_DEFAULT_IGNORE_PATTERNS)


def _dataset(runtime: TrainingRuntime, initializer: Initializer | None, environment: dict[str, str]) -> str:
    dataset = initializer.dataset if initializer else None
    if dataset is None:
        if runtime.dataset:
            return runtime.dataset
        raise ValueError(
            "which data? Give an Initializer with a dataset, such as HuggingFaceDatasetInitializer('hf://org/dataset')"
        )
    if not isinstance(dataset, HuggingFaceDatasetInitializer | S3DatasetInitializer):
        raise ValueError(f"a built-in trainer cannot take its data from a {type(dataset).__name__}")
    return _fetched("dataset", dataset, environment, ignored=None)


def _fetched(what: str, place: _Place, environment: dict[str, str], *, ignored: list[str] | None) -> str:
    """The URI of a place; its credentials go into the variables of the training, whose values are encrypted."""
    if place.ignore_patterns not in (None, ignored):
        raise ValueError(f"the {what}'s ignore_patterns have no counterpart in a built-in trainer; leave them out")
    if getattr(place, "role_arn", None) is not None:
        raise ValueError(f"the {what}'s role_arn has no counterpart in a built-in trainer; give access keys")
    named = {variable: getattr(place, field, None) for field, variable in _S3_VARIABLES.items()}
    for variable, value in {**named, "HF_TOKEN": getattr(place, "access_token", None)}.items():
        if value is None:
            continue
        if environment.setdefault(variable, value) != value:
            raise ValueError(
                f"the {what} has another value for {variable} than env, or than the model; a training has one for all"
            )
    return place.storage_uri


def _adapter(lora: object) -> Iterator[tuple[str, Any]]:
    if not isinstance(lora, LoraConfig):
        raise ValueError(f"peft_config must be a LoraConfig, not a {type(lora).__name__}")
    if lora.quantize_base:
        raise ValueError("peft_config.quantize_base: there is no trainer for quantized models in this version")
    numbers = {"lora_r": lora.lora_rank, "lora_alpha": lora.lora_alpha, "lora_dropout": lora.lora_dropout}
    yield from ((name, value) for name, value in {**numbers, "use_dora": lora.use_dora}.items() if value is not None)
    if unknown := [module for module in lora.lora_attn_modules or () if module not in _ATTENTION]:
        known = ", ".join(_ATTENTION)
        raise ValueError(f"peft_config.lora_attn_modules: {', '.join(map(str, unknown))} is none of {known}")
    modules = [_ATTENTION[module] for module in lora.lora_attn_modules or ()]
    modules += _MLP if lora.apply_lora_to_mlp else ()
    modules += (_OUTPUT,) if lora.apply_lora_to_output else ()
    if not modules:
        raise ValueError("peft_config names no layers to adapt; give lora_attn_modules")
    yield "lora_target_modules", ",".join(modules)


def _preprocessing(config: object, source: dict[str, Any], hyperparameters: dict[str, Any]) -> Mapping[str, Any]:
    """What is done to rows; the source and the hyperparameters take what is theirs."""
    if config is None:
        return {}
    if not isinstance(config, TorchTuneInstructDataset):
        raise ValueError(f"dataset_preprocess_config must be a TorchTuneInstructDataset, not a {type(config).__name__}")
    if config.new_system_prompt is not None:
        raise ValueError(
            "dataset_preprocess_config.new_system_prompt has no counterpart in a built-in trainer; write it into the "
            "rows, as the first of their messages"
        )
    if config.source is not None:
        if config.source not in _FORMATS:
            raise ValueError(f"dataset_preprocess_config.source: rows cannot be read from {config.source!s}")
        source["format"] = config.source.value
    if config.split is not None:
        source["split"] = config.split
    if config.train_on_input is not None:
        hyperparameters["completion_only_loss"] = not config.train_on_input
    columns = config.column_map or {}
    if unknown := sorted(str(name) for name in columns if name not in _COLUMNS):
        raise ValueError(f"dataset_preprocess_config.column_map: {', '.join(unknown)} is none of {', '.join(_COLUMNS)}")
    return {"field_mapping": {field: columns.get(name, name) for name, field in _COLUMNS.items()}}

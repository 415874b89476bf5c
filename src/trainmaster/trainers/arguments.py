"""From a training's document to the arguments of TRL's trainers. Nothing of the document is dropped silently."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from trl import SFTConfig

from trainmaster.trainers.document import Document, DocumentError, Prepared
from trainmaster.trainers.values import parsed, refuse_unknown

FRAMEWORK_OPTIONS = frozenset(
    {
        "activation_offloading",
        "average_tokens_across_devices",
        "bf16_full_eval",
        "dataloader_drop_last",
        "dataloader_persistent_workers",
        "dataloader_prefetch_factor",
        "eval_accumulation_steps",
        "eval_delay",
        "eval_on_start",
        "eval_packing",
        "fp16_full_eval",
        "full_determinism",
        "gradient_checkpointing_kwargs",
        "label_smoothing_factor",
        "liger_kernel_config",
        "logging_first_step",
        "logging_nan_inf_filter",
        "loss_type",
        "lr_scheduler_kwargs",
        "optim_args",
        "optim_target_modules",
        "packing_strategy",
        "pad_to_multiple_of",
        "per_device_eval_batch_size",
        "router_aux_loss_coef",
        "shuffle_dataset",
        "tf32",
        "torch_compile_backend",
        "torch_compile_mode",
        "torch_empty_cache_steps",
        "use_cpu",
    }
)
"""What `framework.config` may set: arguments of TRL that no other field sets, and that leave a resume exact."""
_SET_ELSEWHERE: Mapping[str, str] = {
    "bf16": "hyperparameters.mixed_precision",
    "fp16": "hyperparameters.mixed_precision",
    "dataloader_num_workers": "data_config.num_workers",
    "dataloader_pin_memory": "data_config.pin_memory",
    "data_seed": "data_config.seed",
    "fsdp": "framework.type FSDP",
    "fsdp_config": "framework.distributed.config",
    "gradient_accumulation_steps": "data_config.gradient_accumulation_steps",
    "max_length": "data_config.max_seq_length",
    "packing": "data_config.preprocess.packing",
    "per_device_train_batch_size": "data_config.batch_size",
    "report_to": "hyperparameters.tracker",
    "save_steps": "output_config.checkpoint.save_steps",
    "save_strategy": "output_config.checkpoint.save_strategy",
    "save_total_limit": "output_config.checkpoint.save_total_limit",
    "seed": "data_config.seed",
}
_SHARDING_OPTIONS = frozenset(
    {
        "activation_checkpointing",
        "auto_wrap_policy",
        "cpu_offload",
        "cpu_ram_efficient_loading",
        "min_num_params",
        "reshard_after_forward",
        "transformer_layer_cls_to_wrap",
    }
)
"""Of accelerate's FSDP2; `framework.distributed.config` of a framework of type FSDP."""
_DDP_OPTIONS = ("ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_timeout")
_SHARED = (
    "learning_rate",
    "num_train_epochs",
    "max_steps",
    "warmup_steps",
    "lr_scheduler_type",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "logging_steps",
    "gradient_checkpointing",
    "torch_compile",
    "neftune_noise_alpha",
    "padding_free",
    "use_liger_kernel",
)
"""Hyperparameters that TRL knows under the same name."""


def sft_arguments(document: Document, prepared: Prepared, *, scratch: Path, world_size: int) -> SFTConfig:
    """The arguments of TRL's trainer for supervised fine-tuning and for pre-training.

    Raises:
        DocumentError: an option is not known, cannot be used here, or contradicts another.
    """
    parameters, data, output = document.hyperparameters, document.data, document.output
    options = _framework_options(document)
    cuda = torch.cuda.is_available() and not options.get("use_cpu", False)
    arguments: dict[str, Any] = {name: getattr(parameters, name) for name in _SHARED}
    if parameters.optim:
        arguments["optim"] = parameters.optim
    arguments |= {
        "output_dir": str(scratch),
        "per_device_train_batch_size": data.batch_size,
        "per_device_eval_batch_size": data.batch_size,
        "gradient_accumulation_steps": data.gradient_accumulation_steps,
        "dataloader_num_workers": data.num_workers,
        "dataloader_pin_memory": cuda if data.pin_memory is None else data.pin_memory,
        "seed": data.seed,
        "data_seed": data.seed,
        "packing": data.packing,
        # Rows were cut when they were made; TRL would only look at all of them again.
        "max_length": prepared.max_seq_length if data.packing else None,
        "save_strategy": output.save_strategy,
        "save_steps": output.save_steps,
        "use_cpu": not cuda,
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "warning",
        "log_level_replica": "error",
        **_padding(document, prepared),
        **_evaluation(document, prepared),
        **_precision(document, cuda=cuda),
        **_distribution(document, world_size=world_size, cuda=cuda),
        **options,
    }
    try:
        return SFTConfig(**arguments)
    except (TypeError, ValueError) as error:
        raise DocumentError(f"the training cannot be set up like this: {error}") from error


def _framework_options(document: Document) -> dict[str, Any]:
    given = document.framework.config
    hints = typing.get_type_hints(SFTConfig)
    places = {**{name: f"hyperparameters.{name}" for name in (*_SHARED, "optim", "eval_strategy")}, **_SET_ELSEWHERE}
    places |= {name: f"framework.distributed.config.{name}" for name in _DDP_OPTIONS}
    refuse_unknown("framework.config", given, FRAMEWORK_OPTIONS & hints.keys(), places)
    return {name: _typed(f"framework.config.{name}", text, hints[name]) for name, text in given.items()}


def _padding(document: Document, prepared: Prepared) -> dict[str, Any]:
    if document.data.padding == "max_length" and not document.data.packing:
        return {"pad_to_multiple_of": prepared.max_seq_length}
    if document.data.padding == "none" and document.data.batch_size > 1:
        return {"padding_free": True}
    return {}


def _evaluation(document: Document, prepared: Prepared) -> dict[str, Any]:
    parameters = document.hyperparameters
    strategy = parameters.eval_strategy or ("no" if prepared.eval_path is None else "epoch")
    if strategy != "no" and prepared.eval_path is None:
        raise DocumentError(
            f"hyperparameters.eval_strategy is {strategy}, but there is no validation data: "
            "set data_config.validation_split, or leave eval_strategy out"
        )
    metric = document.output.metric_for_best_model
    if metric and metric.startswith("eval_") and prepared.eval_path is None:
        raise DocumentError(
            f"output_config.checkpoint.metric_for_best_model is {metric}, but there is no validation data: "
            "set data_config.validation_split, or take a metric of the training, such as loss"
        )
    steps = parameters.eval_steps
    return {"eval_strategy": strategy, "eval_steps": steps if strategy == "steps" else None}


def _precision(document: Document, *, cuda: bool) -> dict[str, bool]:
    wanted = document.hyperparameters.mixed_precision
    if wanted == "auto":
        wanted = "bf16" if cuda and torch.cuda.is_bf16_supported() else "no"
    if wanted == "fp16" and not cuda:
        raise DocumentError("hyperparameters.mixed_precision: fp16 needs a GPU; use bf16 or no")
    return {"bf16": wanted == "bf16", "fp16": wanted == "fp16"}


def _distribution(document: Document, *, world_size: int, cuda: bool) -> dict[str, Any]:
    framework = document.framework
    strategies = ("fsdp", "fsdp2") if framework.sharded else ("ddp",)
    if framework.strategy not in (None, *strategies):
        raise DocumentError(
            f"framework.distributed.strategy {framework.strategy} is not one of {framework.type}: "
            f"use {strategies[0]}, or leave it out"
        )
    arguments: dict[str, Any] = {}
    if world_size > 1:
        # Gloo alone works without a GPU; with one, what was asked for.
        arguments["ddp_backend"] = framework.backend if cuda else "gloo"
    where, given = "framework.distributed.config", framework.distributed_config
    if framework.sharded:
        if world_size == 1:
            raise DocumentError("framework.type FSDP needs at least two ranks: set framework.distributed.world_size")
        refuse_unknown(where, given, _SHARDING_OPTIONS, {"version": "nothing (FSDP2 is used)"})
        config = {"version": 2, **{name: parsed(text) for name, text in given.items()}}
        return {**arguments, "fsdp": True, "fsdp_config": config}
    refuse_unknown(where, given, _DDP_OPTIONS, {})
    hints = typing.get_type_hints(SFTConfig)
    # Every parameter that is trained takes part in every step; to look for others costs a walk of the graph.
    arguments["ddp_find_unused_parameters"] = False
    return arguments | {name: _typed(f"{where}.{name}", text, hints[name]) for name, text in given.items()}


def _typed(where: str, text: str, hint: Any) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) else (hint,)
    names = {typing.get_origin(kind) or kind for kind in kinds}
    value = parsed(text)
    if type(value) in names or (isinstance(value, int) and not isinstance(value, bool) and float in names):
        return value
    if isinstance(value, float) and value.is_integer() and int in names:
        return int(value)
    if value is None and type(None) in names:
        return None
    if str in names and not isinstance(value, list | dict):
        return text
    wanted = " or ".join(sorted(kind.__name__ for kind in names if kind is not type(None)))
    raise DocumentError(f"{where}: {text!r} is no {wanted}")

"""From a training's document to the arguments of TRL's trainers. Nothing of the document is dropped silently."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from trl import SFTConfig

from trainmaster.server.core.training.options import CONFIG, DISTRIBUTED, refused_options
from trainmaster.server.core.training.types import FrameworkType
from trainmaster.training.document import Document, DocumentError, Prepared, parsed

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
    options = trl_options(document, prepared, scratch=scratch, world_size=world_size)
    try:
        return SFTConfig(**options)
    except (TypeError, ValueError) as error:
        raise DocumentError(f"the training cannot be set up like this: {error}") from error


def trl_options(document: Document, prepared: Prepared, *, scratch: Path, world_size: int) -> dict[str, Any]:
    """Those arguments by their names.

    Raises:
        DocumentError: an option is not known, or cannot be used here.
    """
    parameters, data, output = document.hyperparameters, document.data, document.output
    options = _options(document)
    cuda = torch.cuda.is_available() and not options.get("use_cpu", False)
    arguments: dict[str, Any] = {name: getattr(parameters, name) for name in _SHARED}
    if parameters.optim:
        arguments["optim"] = parameters.optim
    return arguments | {
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


def _options(document: Document) -> dict[str, Any]:
    """Of `framework.config`, typed."""
    framework = document.framework
    for field, instead in refused_options(
        FrameworkType(framework.type), framework.config, framework.distributed_config
    ):
        raise DocumentError(f"{field}: {instead}")
    return _typed(CONFIG, framework.config)


def _padding(document: Document, prepared: Prepared) -> dict[str, Any]:
    if document.data.padding == "max_length" and not document.data.packing:
        return {"pad_to_multiple_of": prepared.max_seq_length}
    if document.data.padding == "none" and document.data.batch_size > 1:
        return {"padding_free": True}
    return {}


def _evaluation(document: Document, prepared: Prepared) -> dict[str, Any]:
    parameters = document.hyperparameters
    strategy = parameters.eval_strategy or ("no" if prepared.eval_path is None else "epoch")
    return {"eval_strategy": strategy, "eval_steps": parameters.eval_steps if strategy == "steps" else None}


def _precision(document: Document, *, cuda: bool) -> dict[str, bool]:
    wanted = document.hyperparameters.mixed_precision
    if wanted == "auto":
        wanted = "bf16" if cuda and torch.cuda.is_bf16_supported() else "no"
    if wanted == "fp16" and not cuda:
        raise DocumentError("hyperparameters.mixed_precision: fp16 needs a GPU; use bf16 or no")
    return {"bf16": wanted == "bf16", "fp16": wanted == "fp16"}


def _distribution(document: Document, *, world_size: int, cuda: bool) -> dict[str, Any]:
    framework = document.framework
    arguments: dict[str, Any] = {}
    if world_size > 1:
        # Gloo alone works without a GPU; with one, what was asked for.
        arguments["ddp_backend"] = framework.backend if cuda else "gloo"
    if framework.sharded:
        config = {name: parsed(text) for name, text in framework.distributed_config.items()}
        # The model's own way to compute activations anew would have its weights gathered once more for each layer.
        config |= {"version": 2, "activation_checkpointing": document.hyperparameters.gradient_checkpointing}
        return {**arguments, "gradient_checkpointing": False, "fsdp": True, "fsdp_config": config}
    # Every parameter that is trained takes part in every step; to look for others costs a walk of the graph.
    arguments["ddp_find_unused_parameters"] = False
    return arguments | _typed(DISTRIBUTED, framework.distributed_config)


def _typed(where: str, options: Mapping[str, str]) -> dict[str, Any]:
    """Options as what TRL takes for them."""
    hints = typing.get_type_hints(SFTConfig)
    return {name: _value(f"{where}.{name}", text, hints[name]) for name, text in options.items()}


def _value(where: str, text: str, hint: Any) -> Any:
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

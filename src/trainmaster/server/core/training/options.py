"""What built-in trainers accept: options of frameworks, fields of rows, arguments for loading, lengths of sequences."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainmaster.server.core.errors import choice_message, shown
from trainmaster.server.core.training.hyperparameters import ELSEWHERE, HYPERPARAMETERS

CONFIG = "framework.config"
DISTRIBUTED = "framework.distributed.config"

ROW_FIELDS = (
    "messages",
    "prompt",
    "completion",
    "chosen",
    "rejected",
    "label",
    "text",
    "tools",
    "chat_template_kwargs",
)
"""What `preprocess.field_mapping` may name."""
TRL_OPTIONS = frozenset({
    "activation_offloading", "average_tokens_across_devices", "bf16_full_eval", "dataloader_drop_last",
    "dataloader_persistent_workers", "dataloader_prefetch_factor", "eval_accumulation_steps", "eval_delay",
    "eval_on_start", "eval_packing", "fp16_full_eval", "full_determinism", "gradient_checkpointing_kwargs",
    "label_smoothing_factor", "liger_kernel_config", "logging_first_step", "logging_nan_inf_filter", "loss_type",
    "lr_scheduler_kwargs", "optim_args", "optim_target_modules", "packing_strategy", "pad_to_multiple_of",
    "per_device_eval_batch_size", "router_aux_loss_coef", "shuffle_dataset", "tf32", "torch_compile_backend",
    "torch_compile_mode", "torch_empty_cache_steps", "use_cpu",
})  # fmt: skip
"""What `framework.config` may set: arguments of TRL that no other field sets, and that leave a resume exact."""
DDP_OPTIONS = frozenset({"ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_timeout"})
"""What `distributed.config` may set where each rank has a copy of the model."""
FSDP_OPTIONS = frozenset({
    "auto_wrap_policy", "cpu_offload", "cpu_ram_efficient_loading", "min_num_params", "reshard_after_forward",
    "transformer_layer_cls_to_wrap",
})  # fmt: skip
"""What it may set where the model is sharded: options of FSDP2, as accelerate names them."""
OPTIMIZERS_OF_WHOLE_WEIGHTS = frozenset({"adafactor"})
"""Optimizers that do not step a shard: they take means over rows and columns."""
_ELSEWHERE: Mapping[str, str] = {
    **{name: place if "." in place else f"hyperparameters.{place}" for name, place in ELSEWHERE.items()},
    **{name: f"hyperparameters.{name}" for name in HYPERPARAMETERS},
    **{name: f"{DISTRIBUTED}.{name}" for name in DDP_OPTIONS},
    "activation_checkpointing": "hyperparameters.gradient_checkpointing",
    "dataloader_pin_memory": "data_config.pin_memory",
    "data_seed": "data_config.seed",
    "fsdp": "framework.distributed.strategy fsdp",
    "fsdp_config": DISTRIBUTED,
}
"""Options that other fields set."""


def refused_options(
    config: Mapping[str, str], distributed: Mapping[str, str], *, sharded: bool
) -> Iterator[tuple[str, str]]:
    """The fields of options that a built-in trainer does not pass on, each with what to do instead."""
    of_ranks = FSDP_OPTIONS if sharded else DDP_OPTIONS
    for where, given, known in ((CONFIG, config, TRL_OPTIONS), (DISTRIBUTED, distributed, of_ranks)):
        for name in given:
            field = f"{where}.{shown(name)}"
            if name not in known:
                instead = _ELSEWHERE.get(name, field)
                choices = choice_message("option", name, sorted(known))
                yield field, choices if instead == field else f"set {instead} instead"


def refused_fields(mapping: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The names in a `field_mapping` that no row has, each with what to do instead."""
    for name, column in mapping.items():
        if name not in ROW_FIELDS:
            apply_rotary = f"; write it the other way round, {column}: {shown(name)}" if column in ROW_FIELDS else ""
            yield shown(name), choice_message("field", name, ROW_FIELDS) + apply_rotary


# Models, before they are loaded: the longest sequence, and arguments for loading that jobs may not set.

_LIMITS = ("max_position_embeddings", "n_positions")
"""What configurations call the number of positions."""
_ROPE = ("rope_scaling", "rope_parameters")
"""Where they say that rotary positions are stretched."""


def positions_of(config: Mapping[str, Any], model_kwargs: Mapping[str, str] | None = None) -> int | None:
    """The longest sequence that a model takes, by its `config.json` and `model_kwargs`; None when they do not say."""
    given = {name: _plain(text) for name, text in (model_kwargs or {}).items()}
    for part in (config, config.get("text_config")):
        if not isinstance(part, Mapping):
            continue
        known = {**part, **{name: value for name, value in given.items() if name in (*_LIMITS, *_ROPE)}}
        for limit in (known.get(name) for name in _LIMITS):
            if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
                return max(limit, _stretched(known, limit))
    return None


def too_long(max_seq_length: int | None, positions: int | None) -> str | None:
    """What is wrong with a max_seq_length for a model with so many positions; None when it fits."""
    if max_seq_length is None or positions is None or max_seq_length <= positions:
        return None
    return (
        f"data_config.max_seq_length is {max_seq_length}, but the base model has {positions} positions; set it to at "
        f"most {positions}"
    )


def _stretched(config: Mapping[str, Any], limit: int) -> int:
    """How far scaled rotary positions reach: `factor` times what the model was first trained with."""
    for name in _ROPE:
        scaling = config.get(name)
        if isinstance(scaling, Mapping) and isinstance(factor := scaling.get("factor"), int | float):
            first = scaling.get("original_max_position_embeddings")
            return int((first if isinstance(first, int) else limit) * factor)
    return 0


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


_PLACE = "leave it out; model_id, revision and tokenizer_id say what is loaded"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("dtype", "torch_dtype"), "set base_model.dtype instead"),
    "revision": "set base_model.revision instead",
    "attn_implementation": "set hyperparameters.attn_implementation instead",
    "device_map": "leave it out; ranks place the model themselves",
    "token": "give HF_TOKEN in training_config.environment instead",
    **dict.fromkeys(
        ("trust_remote_code", "code_revision", "use_kernels", "allow_all_kernels"),
        "set base_model.trust_remote_code instead",
    ),
    **dict.fromkeys(("use_safetensors", "weights_only"), "leave it out; weights are read from safetensors alone"),
    **dict.fromkeys(("adapter_kwargs", "cache_dir", "config", "gguf_file", "local_files_only"), _PLACE),
    **dict.fromkeys(("offload_folder", "state_dict", "subfolder"), _PLACE),
}
"""What to do instead, by the argument's name. Some are set from elsewhere. With the others a job would read unchecked
files, or run code that came with a model on a server that does not allow that."""


def refused_arguments(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Those of some arguments that a job may not pass on, each with what to do instead."""
    for name in names:
        if name in REFUSED:
            yield name, REFUSED[name]
        elif name.startswith("_") or name.endswith("_file"):
            yield name, _PLACE

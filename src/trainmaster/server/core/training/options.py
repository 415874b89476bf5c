"""Names that the built-in trainers accept: options that they pass to their framework, and fields of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from trainmaster.server.core.errors import choice_message, shown
from trainmaster.server.core.training.hyperparameters import HYPERPARAMETERS
from trainmaster.server.core.training.types import FrameworkType

CONFIG = "framework.config"
DISTRIBUTED = "framework.distributed.config"

ROW_FIELDS = ("messages", "prompt", "completion", "text", "tools", "chat_template_kwargs")
"""What `preprocess.field_mapping` may name."""
TRL_OPTIONS = frozenset(
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
DDP_OPTIONS = frozenset(
    {"ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_timeout"}
)  # fmt: skip
"""What `distributed.config` may set where each rank has a copy of the model."""
FSDP_OPTIONS = frozenset(
    {
        "auto_wrap_policy",
        "cpu_offload",
        "cpu_ram_efficient_loading",
        "min_num_params",
        "reshard_after_forward",
        "transformer_layer_cls_to_wrap",
    }
)
"""What it may set where the model is parted: options of FSDP2, as accelerate names them."""
_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        **{name: f"hyperparameters.{name}" for name in HYPERPARAMETERS},
        **{name: f"{DISTRIBUTED}.{name}" for name in DDP_OPTIONS},
        "activation_checkpointing": "hyperparameters.gradient_checkpointing",
        "bf16": "hyperparameters.mixed_precision",
        "fp16": "hyperparameters.mixed_precision",
        "dataloader_num_workers": "data_config.num_workers",
        "dataloader_pin_memory": "data_config.pin_memory",
        "data_seed": "data_config.seed",
        "fsdp": "framework.type FSDP",
        "fsdp_config": DISTRIBUTED,
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
)
"""Options that other fields set."""


def refused_options(
    framework: FrameworkType, config: Mapping[str, str], distributed: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """The fields of options that a built-in trainer does not pass on, each with what to do instead."""
    of_ranks = FSDP_OPTIONS if framework is FrameworkType.FSDP else DDP_OPTIONS
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
            turned = f"; write it the other way round, {column}: {shown(name)}" if column in ROW_FIELDS else ""
            yield shown(name), choice_message("field", name, ROW_FIELDS) + turned

"""Which options of a training the engine's own loop has; a training with others runs on TRL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainmaster.server.core.errors import shown
from trainmaster.server.core.training.hyperparameters import FP8, Value

_HYPERPARAMETERS = "hyperparameters"
_RESHARD = "reshard_after_forward"
"""The option of sharding that the engine has."""
ENGINE_HYPERPARAMETERS: Mapping[str, tuple[Value, ...] | None] = {
    "learning_rate": None,
    "num_train_epochs": None,
    "max_steps": None,
    "warmup_steps": None,
    "lr_scheduler_type": None,
    "weight_decay": None,
    "adam_beta1": None,
    "adam_beta2": None,
    "adam_epsilon": None,
    "max_grad_norm": None,
    "optim": None,
    "logging_steps": None,
    "eval_strategy": None,
    "eval_steps": None,
    "early_stopping_patience": None,
    "gradient_checkpointing": None,
    "mixed_precision": ("auto", "no", "bf16", FP8),
    "attn_implementation": (None,),
    "torch_compile": (False,),
    "neftune_noise_alpha": (None,),
    "padding_free": None,
    "use_liger_kernel": (False,),
    "tracker": None,
    "tracker_project": None,
    "completion_only_loss": None,
    "assistant_only_loss": None,
    "loss_type": None,
    "beta": None,
    "label_smoothing": None,
    "simpo_gamma": None,
    "desirable_weight": None,
    "undesirable_weight": None,
    "adapter": None,
    "lora_r": None,
    "lora_alpha": None,
    "lora_dropout": (0,),
    "lora_target_modules": None,
    "lora_bias": ("none",),
    "use_rslora": None,
    "use_dora": (False,),
    "modules_to_save": (None,),
    "lora_init": None,
}
"""The values of each hyperparameter that the loop has; None: all. It never pads, with `padding_free` or without."""

ENGINE_CONFIG: Mapping[str, tuple[str, ...]] = {"full_determinism": ("true", "false")}
"""The options in `framework.config` that the loop has, too, and their values; all others are TRL's alone."""


def engine_lacks(
    *,
    hyperparameters: Mapping[str, Value],
    config: Mapping[str, str],
    distributed: Mapping[str, str],
    sharded: bool,
    padding: str | None,
    packing: bool,
    dtype: str,
    trust_remote_code: bool,
) -> Iterator[tuple[str, str]]:
    """The fields of a training whose values the engine's loop does not have, each with what it has."""
    for name, value in hyperparameters.items():
        known = ENGINE_HYPERPARAMETERS.get(name, ())
        if known is not None and value not in known:
            has = " or ".join(_shown(each) for each in known) or "no such hyperparameter"
            yield f"{_HYPERPARAMETERS}.{name}", f"is {_shown(value)}, and the engine has {has}"
    for name, text in config.items():
        if name not in ENGINE_CONFIG:
            yield f"framework.config.{name}", "is an option of TRL"
        elif text.lower() not in ENGINE_CONFIG[name]:
            yield f"framework.config.{name}", f"is {text}, and the engine has {' or '.join(ENGINE_CONFIG[name])}"
    for name, text in distributed.items():
        if not sharded or name != _RESHARD:
            yield f"framework.distributed.config.{name}", "is an option of TRL's ranks"
        elif text.lower() not in ("true", "false"):
            yield f"framework.distributed.config.{name}", f"is {shown(text)}, and the engine has true or false"
    if padding == "max_length" and not packing:
        yield "data_config.preprocess.padding", "is max_length, and the engine pads no samples"
    if dtype == "float16":
        yield "base_model.dtype", "is float16, and the engine trains in float32 or bfloat16"
    if trust_remote_code:
        yield "base_model.trust_remote_code", "is set, and the engine runs no code that comes with a model"


def _shown(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)

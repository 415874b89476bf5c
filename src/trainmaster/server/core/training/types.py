"""Training types and frameworks: which framework does which type, what it needs installed, and what to use instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from trainmaster.server.core.training.preferences import PreferenceLoss


class TrainingType(StrEnum):
    """What kind of training it is."""

    SFT = "SFT"
    LORA = "LORA"
    QLORA = "QLORA"
    DPO = "DPO"
    RLHF = "RLHF"
    CONTINUED_PRETRAIN = "CONTINUED_PRETRAIN"
    FULL_FINETUNE = "FULL_FINETUNE"


LORA_TYPES = frozenset({TrainingType.LORA, TrainingType.QLORA})
"""The types that always train an adapter beside the base model."""
ADAPTER_TYPES = LORA_TYPES | {TrainingType.DPO}
"""Those, and the types whose hyperparameter `adapter` says whether they do."""
ADAPTER = "adapter"
LORA_ADAPTER = "lora"
"""The hyperparameter, and its value for an adapter."""


def trains_adapter(training_type: TrainingType, hyperparameters: Mapping[str, object]) -> bool:
    """Whether a training with these hyperparameters, all of them or as given, trains an adapter."""
    if training_type not in ADAPTER_TYPES:
        return False
    return training_type in LORA_TYPES or hyperparameters.get(ADAPTER, LORA_ADAPTER) == LORA_ADAPTER


class FrameworkType(StrEnum):
    """What does the training. CUSTOM is a script of the user's own."""

    AUTO = "AUTO"
    ENGINE = "ENGINE"
    HF_TRAINER = "HF_TRAINER"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    MEGATRON = "MEGATRON"
    CUSTOM = "CUSTOM"


FIELD = "training_config.hyperparameters"
TRAIN_EXTRA = "pip install 'trainmaster[train]'"
"""How the packages of the built-in trainers are installed."""
TRAIN_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors")
"""What the built-in trainers import."""

_MEASURED = ("loss", "mean_token_accuracy", "entropy", "aux_loss")
_OF_ANSWERS = ("loss", "reward_chosen", "reward_rejected")
_OF_PREFERENCES = ("loss", "reward_margin", "reward_accuracy", "reward_chosen", "reward_rejected")


def measured(training_type: TrainingType, hyperparameters: Mapping[str, object]) -> tuple[str, ...]:
    """Metrics of a checkpoint that tell how good it is; with `eval_` in front, those of an evaluation."""
    if training_type is not TrainingType.DPO:
        return _MEASURED
    return _OF_ANSWERS if hyperparameters.get("loss_type") == PreferenceLoss.KTO else _OF_PREFERENCES


_SFT = "trainmaster.training.sft"
TRAINERS: Mapping[TrainingType, str] = {
    TrainingType.SFT: _SFT,
    TrainingType.LORA: _SFT,
    TrainingType.FULL_FINETUNE: _SFT,
    TrainingType.CONTINUED_PRETRAIN: _SFT,
    TrainingType.DPO: "trainmaster.training.dpo",
}
"""The module of each training type's built-in trainer, which ranks import: its `build` makes the trainer."""
BUILT_IN = frozenset(TRAINERS)
ENGINE_ONLY = frozenset({TrainingType.DPO})
"""The types that the engine alone trains."""
LATER: Mapping[TrainingType, str] = {
    TrainingType.QLORA: "use LORA",
    TrainingType.RLHF: "drive a trainer service with your own loop (examples/loops/grpo_loop.py)",
}
"""The training types without a built-in trainer, and what comes nearest."""

OPTIONAL_PACKAGES: Mapping[tuple[str, object], tuple[str, str]] = {
    ("use_liger_kernel", True): ("liger_kernel", "liger-kernel"),
    ("attn_implementation", "flash_attention_2"): ("flash_attn", "flash-attn"),
    ("attn_implementation", "flash_attention_3"): ("flash_attn_interface", "flash-attn-3"),
    ("tracker", "trackio"): ("trackio", "trackio"),
}
"""What a value of a hyperparameter needs beside the rest: the module, and the package that has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    types: frozenset[TrainingType]
    meaning: str
    strategies: tuple[str, ...] = ()
    """What `framework.distributed.strategy` may say, beside nothing."""
    packages: tuple[str, ...] = ()
    """What has to be installed where its ranks run."""


SHARDED = ("fsdp", "fsdp2")
"""Strategies by which each rank has a shard of the model, its gradients and the optimizer state. They are the same."""
_ANY_STRATEGY = ("ddp", *SHARDED)

FRAMEWORKS: Mapping[FrameworkType, Framework] = {
    FrameworkType.AUTO: Framework(
        types=BUILT_IN,
        strategies=_ANY_STRATEGY,
        packages=TRAIN_PACKAGES,
        meaning="ENGINE, or HF_TRAINER where the engine lacks the model or an option; the job's events say why",
    ),
    FrameworkType.ENGINE: Framework(
        types=BUILT_IN,
        strategies=_ANY_STRATEGY,
        packages=TRAIN_PACKAGES,
        meaning="the engine of trainer services; each rank has a copy of the model or, with strategy fsdp, a shard",
    ),
    FrameworkType.HF_TRAINER: Framework(
        types=BUILT_IN - ENGINE_ONLY,
        strategies=_ANY_STRATEGY,
        packages=TRAIN_PACKAGES,
        meaning="TRL on transformers; each rank has a copy of the model or, with strategy fsdp, a shard",
    ),
    FrameworkType.FSDP: Framework(
        types=BUILT_IN,
        strategies=SHARDED,
        packages=TRAIN_PACKAGES,
        meaning="AUTO with strategy fsdp: model, gradients and optimizer state are sharded over the ranks",
    ),
    FrameworkType.CUSTOM: Framework(
        types=frozenset(TrainingType), meaning="your own script, which gets the data and the configuration"
    ),
    FrameworkType.DEEPSPEED: Framework(types=frozenset(), meaning="not available in this version: refused"),
    FrameworkType.MEGATRON: Framework(types=frozenset(), meaning="not available in this version: refused"),
}


def unavailable(framework: FrameworkType, training_type: TrainingType, *, ranks: int = 1) -> str | None:
    """Why no server of this version has a framework do a training type, and what works instead; None when it can."""
    known = FRAMEWORKS[framework]
    if training_type in known.types:
        return None
    custom = f"framework type {FrameworkType.CUSTOM} with a script of your own"
    if known.types and training_type in ENGINE_ONLY:
        return f"{framework} has no {training_type}, which the engine trains; use {FrameworkType.AUTO}, or {custom}"
    if known.types:
        return (
            f"training_type {training_type} is not available in this version with a built-in framework; "
            f"{LATER[training_type]}, or use {custom}. Available: {', '.join(sorted(known.types))}"
        )
    why = f"framework {framework} is not available in this version, installed or not"
    if training_type not in BUILT_IN:
        return f"{why}, and {training_type} has no built-in trainer; use {custom}"
    instead = (
        f"{FrameworkType.FSDP}, which spreads model, gradients and optimizer over the ranks"
        if ranks > 1
        else f"{FrameworkType.AUTO} (with several GPUs {FrameworkType.FSDP}, which spreads the model over them)"
    )
    return f"{why}; use {instead}, or {custom}. Leave out options that are {framework}'s own"


def missing(framework: FrameworkType, installed: Callable[[str], bool]) -> str | None:
    """Why a framework cannot train where `installed` says which packages can be imported; None when it can."""
    absent = [package for package in FRAMEWORKS[framework].packages if not installed(package)]
    if not absent:
        return None
    return (
        f"the workers' Python has no {', '.join(absent)}, which the built-in trainers need: "
        f"run `{TRAIN_EXTRA}` there, and submit the job again"
    )


def missing_options(hyperparameters: Mapping[str, object], installed: Callable[[str], bool]) -> str | None:
    """Which hyperparameter needs a package that is not there; None when all are."""
    for (name, value), (module, package) in OPTIONAL_PACKAGES.items():
        if hyperparameters.get(name) == value and not installed(module):
            return f"{FIELD}.{name} {value} needs the package {package} in the workers' Python; install it there"
    return None

"""The hyperparameters of the built-in trainers: one table, read for each training type.

Requests have them as text. Here each has a kind, bounds, a default and a meaning; what is not in the table is refused,
with the nearest name that is. The documentation is made from the same table.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from trainmaster.server.core.errors import Problem, RefusedError, nearest, shown
from trainmaster.server.core.training.types import FIELD, LORA_TYPES, TrainingType
from trainmaster.server.core.training.values import Hyperparameter, Value, ValueKind

ALL_LINEAR = "all-linear"
"""Every linear layer of the model but its output."""
_COMPLETIONS = frozenset({TrainingType.SFT, TrainingType.LORA, TrainingType.FULL_FINETUNE})
"""The types that may train on a part of each row."""
_MAX_PROBLEMS = 100
"""Who has more has no use for the rest."""

_ROWS = (
    Hyperparameter(
        name="learning_rate",
        kind=ValueKind.NUMBER,
        default=2e-5,
        defaults={TrainingType.LORA: 2e-4, TrainingType.CONTINUED_PRETRAIN: 5e-5},
        above=0,
        meaning="The highest learning rate, after the warm-up.",
    ),
    Hyperparameter(
        name="num_train_epochs",
        kind=ValueKind.NUMBER,
        default=3.0,
        defaults={TrainingType.CONTINUED_PRETRAIN: 1.0},
        above=0,
        meaning="Number of passes over the data; may be a fraction.",
    ),
    Hyperparameter(
        name="max_steps",
        kind=ValueKind.INTEGER,
        default=-1,
        minimum=-1,
        meaning="Number of optimizer steps; overrides num_train_epochs unless -1.",
    ),
    Hyperparameter(
        name="warmup_steps",
        kind=ValueKind.STEPS_OR_SHARE,
        default=0.03,
        minimum=0,
        meaning="Steps during which the learning rate rises from 0; a value below 1 is a share of all steps.",
    ),
    Hyperparameter(
        name="lr_scheduler_type",
        kind=ValueKind.CHOICE,
        default="linear",
        choices=(
            "linear",
            "cosine",
            "cosine_with_restarts",
            "polynomial",
            "constant",
            "constant_with_warmup",
            "inverse_sqrt",
        ),
        meaning="How the learning rate changes after the warm-up.",
    ),
    Hyperparameter(
        name="weight_decay",
        kind=ValueKind.NUMBER,
        default=0.0,
        minimum=0,
        meaning="Weight decay coefficient.",
    ),
    Hyperparameter(
        name="adam_beta1",
        kind=ValueKind.NUMBER,
        default=0.9,
        minimum=0,
        below=1,
        meaning="Decay rate of the first moment.",
    ),
    Hyperparameter(
        name="adam_beta2",
        kind=ValueKind.NUMBER,
        default=0.999,
        minimum=0,
        below=1,
        meaning="Decay rate of the second moment.",
    ),
    Hyperparameter(
        name="adam_epsilon",
        kind=ValueKind.NUMBER,
        default=1e-8,
        above=0,
        meaning="Added to the square root of the second moment.",
    ),
    Hyperparameter(
        name="max_grad_norm",
        kind=ValueKind.NUMBER,
        default=1.0,
        minimum=0,
        meaning="Gradients are clipped to this norm; 0: no clipping.",
    ),
    Hyperparameter(
        name="optim",
        kind=ValueKind.CHOICE,
        default="adamw_torch_fused",
        choices=("adamw_torch_fused", "adamw_torch", "adafactor", "adagrad", "rmsprop", "sgd"),
        meaning="The optimizer.",
    ),
    Hyperparameter(
        name="logging_steps",
        kind=ValueKind.INTEGER,
        default=10,
        minimum=1,
        meaning="Steps between reports of the metrics.",
    ),
    Hyperparameter(
        name="eval_strategy",
        kind=ValueKind.CHOICE,
        default=None,
        choices=("no", "steps", "epoch"),
        meaning="When to evaluate the validation data. Default: after each epoch if there is any, else no.",
    ),
    Hyperparameter(
        name="eval_steps",
        kind=ValueKind.INTEGER,
        default=None,
        minimum=1,
        meaning="Steps between evaluations, with eval_strategy steps. Default: as many as between checkpoints.",
    ),
    Hyperparameter(
        name="gradient_checkpointing",
        kind=ValueKind.FLAG,
        default=True,
        meaning="Recompute activations in the backward pass instead of storing them: slower, needs less memory.",
    ),
    Hyperparameter(
        name="mixed_precision",
        kind=ValueKind.CHOICE,
        default="auto",
        choices=("auto", "no", "bf16", "fp16"),
        meaning="The number format of the computation; auto is bf16 on a GPU that supports it, else no.",
    ),
    Hyperparameter(
        name="attn_implementation",
        kind=ValueKind.CHOICE,
        default=None,
        choices=("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"),
        meaning="The attention kernels. Default: the choice of transformers; for packed samples on a GPU, kernels "
        "that skip masked pairs of tokens.",
    ),
    Hyperparameter(
        name="torch_compile", kind=ValueKind.FLAG, default=False, meaning="Compile the model before training."
    ),
    Hyperparameter(
        name="neftune_noise_alpha",
        kind=ValueKind.NUMBER,
        default=None,
        above=0,
        meaning="Strength of the noise added to the embeddings (NEFTune). Default: none.",
    ),
    Hyperparameter(
        name="padding_free",
        kind=ValueKind.FLAG,
        default=False,
        meaning="Concatenate the samples of a batch without padding; needs attention kernels that separate samples.",
    ),
    Hyperparameter(
        name="use_liger_kernel",
        kind=ValueKind.FLAG,
        default=False,
        meaning="Use the kernels of the package liger-kernel.",
    ),
    Hyperparameter(
        name="tracker",
        kind=ValueKind.CHOICE,
        default="none",
        choices=("none", "trackio"),
        meaning="The tracker that metrics are mirrored to.",
    ),
    Hyperparameter(
        name="tracker_project",
        kind=ValueKind.TEXT,
        default=None,
        meaning="The tracker's project. Default: trainmaster.",
    ),
    Hyperparameter(
        name="completion_only_loss",
        kind=ValueKind.FLAG,
        default=True,
        defaults={TrainingType.FULL_FINETUNE: False},
        types=_COMPLETIONS,
        meaning="Train only on completions, if rows have prompts and completions.",
    ),
    Hyperparameter(
        name="assistant_only_loss",
        kind=ValueKind.FLAG,
        default=True,
        defaults={TrainingType.FULL_FINETUNE: False},
        types=_COMPLETIONS,
        meaning="Train only on what the assistant says, if rows are conversations.",
    ),
    Hyperparameter(
        name="lora_r", kind=ValueKind.INTEGER, default=16, minimum=1, types=LORA_TYPES, meaning="The adapter's rank."
    ),
    Hyperparameter(
        name="lora_alpha",
        kind=ValueKind.NUMBER,
        default=32.0,
        above=0,
        types=LORA_TYPES,
        meaning="The adapter's output is scaled by lora_alpha / lora_r.",
    ),
    Hyperparameter(
        name="lora_dropout",
        kind=ValueKind.NUMBER,
        default=0.0,
        minimum=0,
        below=1,
        types=LORA_TYPES,
        meaning="Dropout probability of the adapter's inputs.",
    ),
    Hyperparameter(
        name="lora_target_modules",
        kind=ValueKind.NAMES,
        default=ALL_LINEAR,
        choices=(ALL_LINEAR,),
        types=LORA_TYPES,
        meaning=f"The layers that get an adapter, by the ends of their names; {ALL_LINEAR}: all linear layers except "
        "the output.",
    ),
    Hyperparameter(
        name="lora_bias",
        kind=ValueKind.CHOICE,
        default="none",
        choices=("none", "all", "lora_only"),
        types=LORA_TYPES,
        meaning="Which biases are trained.",
    ),
    Hyperparameter(
        name="use_rslora",
        kind=ValueKind.FLAG,
        default=False,
        types=LORA_TYPES,
        meaning="Scale the adapter's output by lora_alpha / √lora_r instead.",
    ),
    Hyperparameter(
        name="use_dora",
        kind=ValueKind.FLAG,
        default=False,
        types=LORA_TYPES,
        meaning="Train the magnitude of the weights separately from their direction.",
    ),
    Hyperparameter(
        name="modules_to_save",
        kind=ValueKind.NAMES,
        default=None,
        types=LORA_TYPES,
        meaning="Modules to train and save in full, in addition to the adapter.",
    ),
    Hyperparameter(
        name="lora_init",
        kind=ValueKind.FLAG_OR_CHOICE,
        default=True,
        # PEFT has more; those change the base model, so that the adapter alone would be of no use.
        choices=("gaussian", "orthogonal"),
        types=LORA_TYPES,
        meaning="Initialization of the adapter: true starts without effect; false is random, for tests.",
    ),
)
HYPERPARAMETERS: Mapping[str, Hyperparameter] = MappingProxyType({row.name: row for row in _ROWS})

ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "lr": "learning_rate",
        "epochs": "num_train_epochs",
        "num_epochs": "num_train_epochs",
        "warmup_ratio": "warmup_steps, which takes a share below 1",
        "lr_scheduler": "lr_scheduler_type",
        "optimizer": "optim",
        "bf16": "mixed_precision",
        "fp16": "mixed_precision",
        "r": "lora_r",
        "rank": "lora_r",
        "alpha": "lora_alpha",
        "target_modules": "lora_target_modules",
        "report_to": "tracker",
        "batch_size": "data_config.batch_size",
        "per_device_train_batch_size": "data_config.batch_size",
        "gradient_accumulation_steps": "data_config.gradient_accumulation_steps",
        "max_seq_length": "data_config.max_seq_length",
        "max_length": "data_config.max_seq_length",
        "packing": "data_config.preprocess.packing",
        "seed": "data_config.seed",
        "dataloader_num_workers": "data_config.num_workers",
        "save_strategy": "output_config.checkpoint.save_strategy",
        "save_steps": "output_config.checkpoint.save_steps",
        "save_total_limit": "output_config.checkpoint.save_total_limit",
        "metric_for_best_model": "output_config.checkpoint.metric_for_best_model",
    }
)
"""Names that other programs have for something, and ours."""


def read_hyperparameters(training_type: TrainingType, given: Mapping[str, str]) -> dict[str, Value]:
    """All hyperparameters of a training type: what was given as typed values, and defaults for the rest.

    Raises:
        RefusedError: one is not known, or its value cannot be read; they are named, up to a hundred of them.
    """
    table = hyperparameters_of(training_type)
    values = {name: known.default_for(training_type) for name, known in table.items()}
    problems: list[Problem] = []
    for name, text in given.items():
        if len(problems) == _MAX_PROBLEMS:
            break  # to look for the nearest name takes time
        if name not in table:
            problems.append(Problem(field=f"{FIELD}.{shown(name)}", message=_unknown(name, training_type)))
            continue
        try:
            values[name] = table[name].read(text)
        except ValueError as error:
            problems.append(Problem(field=f"{FIELD}.{name}", message=str(error)))
    if problems:
        raise RefusedError.because(problems)
    return values


def hyperparameters_of(training_type: TrainingType) -> dict[str, Hyperparameter]:
    return {name: known for name, known in HYPERPARAMETERS.items() if training_type in known.types}


def _unknown(name: str, training_type: TrainingType) -> str:
    if (elsewhere := ELSEWHERE.get(name)) is not None:
        return f"unknown hyperparameter; use {elsewhere}"
    if (known := HYPERPARAMETERS.get(name)) is not None:
        return f"is for {', '.join(sorted(known.types))}, and this is {training_type}; leave it out"
    near = nearest(name, hyperparameters_of(training_type))
    return f"unknown hyperparameter; did you mean '{near}'?" if near else "unknown hyperparameter; leave it out"

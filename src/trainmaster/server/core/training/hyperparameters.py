"""The hyperparameters of the built-in trainers: one table, from which the documentation is made, too. Requests have
them as text; what is not in the table is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import StrEnum

from trainmaster.server.core.errors import Problem, RefusedError, choice_message, nearest, shown
from trainmaster.server.core.training.preferences import LOSSES, OPTIONS_OF_LOSSES, PreferenceLoss
from trainmaster.server.core.training.types import (
    ADAPTER,
    ADAPTER_TYPES,
    BUILT_IN,
    ENGINE_ONLY,
    FIELD,
    LORA_ADAPTER,
    LORA_TYPES,
    TrainingType,
    trains_adapter,
)

Value = int | float | bool | str | None
"""What a trainer is given; None leaves it to the trainer."""

_MAX_NAMES = 1024
_MAX_INTEGER = 2**31 - 1
_LONGEST_NUMBER = 64


class ValueKind(StrEnum):
    """How a value is written."""

    INTEGER = "whole number"
    NUMBER = "number"
    STEPS_OR_SHARE = "whole number, or a share below 1"
    FLAG = "true or false"
    CHOICE = "choice"
    TEXT = "text"
    NAMES = "names separated by commas"
    FLAG_OR_CHOICE = "true, false, or a choice"


@dataclass(frozen=True, slots=True)
class Hyperparameter:
    name: str
    kind: ValueKind
    default: Value
    meaning: str
    _: KW_ONLY
    types: frozenset[TrainingType] = BUILT_IN
    defaults: Mapping[TrainingType, Value] = field(default_factory=dict)
    """Of training types whose default is another."""
    minimum: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    adapter_choices: tuple[str, ...] = ()
    """Choices of types that train an adapter, beside those of all."""

    def default_for(self, training_type: TrainingType) -> Value:
        return self.defaults.get(training_type, self.default)

    def read(self, text: str) -> Value:
        """The value that a text stands for; ValueError, with what to write, when it stands for none."""
        value = _value(self, text.strip())
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"must be at least {self.minimum:g}")
        if self.above is not None and value <= self.above:
            raise ValueError(f"must be more than {self.above:g}")
        if self.below is not None and value >= self.below:
            raise ValueError(f"must be less than {self.below:g}")
        return value


def _value(known: Hyperparameter, text: str) -> Value:
    number, flag = _finite(text), _FLAGS.get(text.casefold())
    match known.kind:
        case ValueKind.INTEGER:
            if number is None or not number.is_integer() or abs(number) > _MAX_INTEGER:
                raise ValueError(f"must be a whole number, not '{shown(text)}'")
            return int(number)
        case ValueKind.NUMBER:
            if number is None:
                raise ValueError(f"must be a number, not '{shown(text)}'")
            return number
        case ValueKind.STEPS_OR_SHARE:
            if number is None or number > _MAX_INTEGER or (number >= 1 and not number.is_integer()):
                says = "must be a whole number of steps, or a share of all steps below 1"
                raise ValueError(f"{says}, not '{shown(text)}'")
            return number if 0 < number < 1 else int(number)
        case ValueKind.FLAG | ValueKind.FLAG_OR_CHOICE if flag is not None:
            return flag
        case ValueKind.FLAG:
            raise ValueError(f"must be true or false, not '{shown(text)}'")
        case ValueKind.CHOICE | ValueKind.FLAG_OR_CHOICE:
            if text not in known.choices:
                raise ValueError(choice_message("value", text, known.choices))
            return text
        case ValueKind.TEXT:
            if not text:
                raise ValueError("must not be empty")
            return text
        case ValueKind.NAMES:
            names = [name.strip() for name in text.split(",")]
            if not all(names) or len(names) > _MAX_NAMES:
                raise ValueError(f"must be 1 to {_MAX_NAMES} names with commas between")
            return ",".join(names)


def _finite(text: str) -> float | None:
    # float() itself takes more than people write: underscores, nan, infinity.
    if len(text) > _LONGEST_NUMBER or not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text):
        return None
    number = float(text)
    return number if math.isfinite(number) else None


_FLAGS = {"true": True, "1": True, "false": False, "0": False}
ALL_LINEAR = "all-linear"
"""Every linear layer of the model but its output."""
_COMPLETIONS = frozenset({TrainingType.SFT, TrainingType.LORA, TrainingType.FULL_FINETUNE})
"""The types that may train on a part of each row."""
_PREFERENCES = frozenset({TrainingType.DPO})
_TRL = BUILT_IN - ENGINE_ONLY
"""The types that TRL trains, too."""
FP8 = "fp8"
"""The value of `mixed_precision` for frozen weights of 8 bits."""
_MAX_PROBLEMS = 100
"""Who has more has no use for the rest."""

# fmt: off
_ROWS = (
    Hyperparameter("learning_rate", ValueKind.NUMBER, 2e-5, "The highest learning rate, after the warm-up.",
        defaults={TrainingType.LORA: 2e-4, TrainingType.CONTINUED_PRETRAIN: 5e-5, TrainingType.DPO: 5e-6}, above=0),
    Hyperparameter("num_train_epochs", ValueKind.NUMBER, 3.0, "Number of passes over the data; may be a fraction.",
        defaults={TrainingType.CONTINUED_PRETRAIN: 1.0, TrainingType.DPO: 1.0}, above=0),
    Hyperparameter("max_steps", ValueKind.INTEGER, -1,
        "Number of optimizer steps; overrides num_train_epochs unless -1.", minimum=-1),
    Hyperparameter("warmup_steps", ValueKind.STEPS_OR_SHARE, 0.03,
        "Steps during which the learning rate rises from 0; a value below 1 is a share of all steps.", minimum=0),
    Hyperparameter("lr_scheduler_type", ValueKind.CHOICE, "linear", "How the learning rate changes after the warm-up.",
        choices=("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup",
                 "inverse_sqrt")),
    Hyperparameter("weight_decay", ValueKind.NUMBER, 0.0, "Weight decay coefficient.", minimum=0),
    Hyperparameter("adam_beta1", ValueKind.NUMBER, 0.9, "Decay rate of the first moment.", minimum=0, below=1),
    Hyperparameter("adam_beta2", ValueKind.NUMBER, 0.999, "Decay rate of the second moment.", minimum=0, below=1),
    Hyperparameter("adam_epsilon", ValueKind.NUMBER, 1e-8, "Added to the square root of the second moment.", above=0),
    Hyperparameter("max_grad_norm", ValueKind.NUMBER, 1.0, "Gradients are clipped to this norm; 0: no clipping.",
        minimum=0),
    Hyperparameter("optim", ValueKind.CHOICE, "adamw_torch_fused", "The optimizer.",
        choices=("adamw_torch_fused", "adamw_torch", "adafactor", "adagrad", "rmsprop", "sgd")),
    Hyperparameter("logging_steps", ValueKind.INTEGER, 10, "Steps between reports of the metrics.", minimum=1),
    Hyperparameter("eval_strategy", ValueKind.CHOICE, None,
        "When to evaluate the validation data. Default: after each epoch if there is any, else no.",
        choices=("no", "steps", "epoch")),
    Hyperparameter("eval_steps", ValueKind.INTEGER, None,
        "Steps between evaluations, with eval_strategy steps. Default: as many as between checkpoints.", minimum=1),
    Hyperparameter("early_stopping_patience", ValueKind.INTEGER, 0,
        "Evaluations in a row without a better metric_for_best_model after which the training ends; 0: it does not.",
        minimum=0),
    Hyperparameter("gradient_checkpointing", ValueKind.FLAG_OR_CHOICE, "auto",
        "Recompute activations in the backward pass instead of storing them: slower, needs less memory. With auto, the "
        "engine on a GPU recomputes only as many layers as do not fit in memory; otherwise auto is true.",
        choices=("auto",)),
    Hyperparameter("mixed_precision", ValueKind.CHOICE, "auto",
        "The number format of the computation; auto is bf16 on a GPU that supports it, else no. fp8: bf16, and the "
        "frozen weights of linear layers have 8 bits.",
        choices=("auto", "no", "bf16", "fp16"), adapter_choices=(FP8,)),
    Hyperparameter("attn_implementation", ValueKind.CHOICE, None,
        "The attention kernels. Default: the choice of transformers; for packed samples on a GPU, kernels "
        "that skip masked pairs of tokens.",
        choices=("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"), types=_TRL),
    Hyperparameter("torch_compile", ValueKind.FLAG, False, "Compile the model before training.", types=_TRL),
    Hyperparameter("neftune_noise_alpha", ValueKind.NUMBER, None,
        "Strength of the noise added to the embeddings (NEFTune). Default: none.", above=0, types=_TRL),
    Hyperparameter("padding_free", ValueKind.FLAG, False,
        "Concatenate the samples of a batch without padding; needs attention kernels that separate samples.",
        types=_TRL),
    Hyperparameter("use_liger_kernel", ValueKind.FLAG, False, "Use the kernels of the package liger-kernel.",
        types=_TRL),
    Hyperparameter("tracker", ValueKind.CHOICE, "none", "The tracker that metrics are mirrored to.",
        choices=("none", "trackio")),
    Hyperparameter("tracker_project", ValueKind.TEXT, None, "The tracker's project. Default: trainmaster."),
    Hyperparameter("completion_only_loss", ValueKind.FLAG, True,
        "Train only on completions, if rows have prompts and completions.",
        defaults={TrainingType.FULL_FINETUNE: False}, types=_COMPLETIONS),
    Hyperparameter("assistant_only_loss", ValueKind.FLAG, True,
        "Train only on what the assistant says, if rows are conversations.",
        defaults={TrainingType.FULL_FINETUNE: False, TrainingType.DPO: False}, types=_COMPLETIONS),
    Hyperparameter("loss_type", ValueKind.CHOICE, PreferenceLoss.SIGMOID,
        "The loss of a pair of answers or, with kto, of a single one.",
        choices=tuple(PreferenceLoss), types=_PREFERENCES),
    Hyperparameter("beta", ValueKind.NUMBER, 0.1,
        "How closely the model is held to the reference; in orpo, the weight of the odds ratio; in simpo, the scale "
        "of the rewards.", above=0, types=_PREFERENCES),
    Hyperparameter("label_smoothing", ValueKind.NUMBER, 0.0,
        "The share of pairs whose answers are the wrong way round; for the losses sigmoid and robust.",
        minimum=0, below=0.5, types=_PREFERENCES),
    Hyperparameter("simpo_gamma", ValueKind.NUMBER, 0.5, "The margin that rewards are to have; for the loss simpo.",
        minimum=0, types=_PREFERENCES),
    Hyperparameter("desirable_weight", ValueKind.NUMBER, 1.0, "The weight of liked answers; for the loss kto.",
        minimum=0, types=_PREFERENCES),
    Hyperparameter("undesirable_weight", ValueKind.NUMBER, 1.0, "The weight of other answers; for the loss kto.",
        minimum=0, types=_PREFERENCES),
    Hyperparameter(ADAPTER, ValueKind.CHOICE, LORA_ADAPTER,
        "What is trained: an adapter beside the base model, with the options lora_*, or, with none, all weights.",
        choices=(LORA_ADAPTER, "none"), types=ADAPTER_TYPES - LORA_TYPES),
    Hyperparameter("lora_r", ValueKind.INTEGER, 16, "The adapter's rank.", minimum=1, types=ADAPTER_TYPES),
    Hyperparameter("lora_alpha", ValueKind.NUMBER, 32.0, "The adapter's output is scaled by lora_alpha / lora_r.",
        above=0, types=ADAPTER_TYPES),
    Hyperparameter("lora_dropout", ValueKind.NUMBER, 0.0, "Dropout probability of the adapter's inputs.",
        minimum=0, below=1, types=LORA_TYPES),
    Hyperparameter("lora_target_modules", ValueKind.NAMES, ALL_LINEAR,
        f"The layers that get an adapter, by the ends of their names; {ALL_LINEAR}: all linear layers except "
        "the output.",
        choices=(ALL_LINEAR,), types=ADAPTER_TYPES),
    Hyperparameter("lora_bias", ValueKind.CHOICE, "none", "Which biases are trained.",
        choices=("none", "all", "lora_only"), types=LORA_TYPES),
    Hyperparameter("use_rslora", ValueKind.FLAG, False, "Scale the adapter's output by lora_alpha / √lora_r instead.",
        types=ADAPTER_TYPES),
    Hyperparameter("use_dora", ValueKind.FLAG, False,
        "Train the magnitude of the weights separately from their direction.", types=LORA_TYPES),
    Hyperparameter("modules_to_save", ValueKind.NAMES, None,
        "Modules to train and save in full, in addition to the adapter.", types=LORA_TYPES),
    # PEFT has more; those change the base model, so that the adapter alone would be of no use.
    Hyperparameter("lora_init", ValueKind.FLAG_OR_CHOICE, True,
        "Initialization of the adapter: true starts without effect; false is random, for tests.",
        choices=("gaussian", "orthogonal"), types=ADAPTER_TYPES),
)
# fmt: on
HYPERPARAMETERS: Mapping[str, Hyperparameter] = {row.name: row for row in _ROWS}

ELSEWHERE: Mapping[str, str] = {
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
    "early_stopping": "early_stopping_patience",
    "dpo_beta": "beta",
    "preference_loss": "loss_type",
    "simpo_margin": "simpo_gamma",
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
"""Names that other programs have for something, and ours."""


def read_hyperparameters(training_type: TrainingType, given: Mapping[str, str]) -> dict[str, Value]:
    """All hyperparameters of a training type: what was given as typed values, and defaults for the rest."""
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
            message = str(error)
            if text.strip() in table[name].adapter_choices:
                message = f"{text.strip()} is for frozen base models, and {training_type} trains its own; {message}"
            problems.append(Problem(field=f"{FIELD}.{name}", message=message))
    problems += _without_effect(training_type, given, values)
    if problems:
        raise RefusedError.because(problems)
    return values


def _without_effect(
    training_type: TrainingType, given: Mapping[str, str], values: Mapping[str, Value]
) -> Iterator[Problem]:
    """What was given and does nothing beside the rest; defaults do nothing wrong."""
    loss, adapts = values.get("loss_type"), trains_adapter(training_type, values)
    for name in given:
        known = HYPERPARAMETERS.get(name)
        if known is None or name not in values or values[name] == known.default_for(training_type):
            continue
        if name in OPTIONS_OF_LOSSES and loss is not None and name not in LOSSES[PreferenceLoss(str(loss))].options:
            having = " and ".join(each for each, own in LOSSES.items() if name in own.options)
            message = f"is for the loss {having}, and loss_type is {loss}; leave it out"
            yield Problem(field=f"{FIELD}.{name}", message=message)
        elif known.types == ADAPTER_TYPES and not adapts:
            message = f"is for an adapter, and {ADAPTER} is {values[ADAPTER]}; leave it out"
            yield Problem(field=f"{FIELD}.{name}", message=message)
    if not adapts and values.get("mixed_precision") == FP8 and training_type in ADAPTER_TYPES:
        message = f"{FP8} is for frozen base models, and {ADAPTER} is {values[ADAPTER]}; use bf16"
        yield Problem(field=f"{FIELD}.mixed_precision", message=message)


def hyperparameters_of(training_type: TrainingType) -> dict[str, Hyperparameter]:
    """Those of a training type, with the choices that it has."""
    own = {name: known for name, known in HYPERPARAMETERS.items() if training_type in known.types}
    if training_type not in ADAPTER_TYPES:
        return own
    return {name: replace(known, choices=known.choices + known.adapter_choices) for name, known in own.items()}


def _unknown(name: str, training_type: TrainingType) -> str:
    if (elsewhere := ELSEWHERE.get(name)) is not None:
        return f"unknown hyperparameter; use {elsewhere}"
    if (known := HYPERPARAMETERS.get(name)) is not None:
        return f"is for {', '.join(sorted(known.types))}, and this is {training_type}; leave it out"
    near = nearest(name, hyperparameters_of(training_type))
    return f"unknown hyperparameter; did you mean '{near}'?" if near else "unknown hyperparameter; leave it out"

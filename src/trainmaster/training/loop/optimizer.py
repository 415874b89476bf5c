"""Optimizer and schedule of a training, those that transformers' loop would make of the same hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler
from transformers.optimization import Adafactor
from transformers.trainer_pt_utils import get_parameter_names

from trainmaster.server.core.training.hyperparameters import Value

_NOT_DECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Names of parameters without weight decay, as in transformers."""


def make_optimizer(model: nn.Module, parameters: Mapping[str, Value]) -> Optimizer:
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    decayed = set(get_parameter_names(model, [nn.LayerNorm], _NOT_DECAYED))  # type: ignore[no-untyped-call]
    groups = [
        {
            "params": [parameter for name, parameter in trained.items() if (name in decayed) is decays],
            "weight_decay": parameters["weight_decay"] if decays else 0.0,
        }
        for decays in (True, False)
    ]
    return _OPTIMIZERS[str(parameters["optim"])](groups, parameters)


def _adamw(*, fused: bool) -> Callable[[Iterable[Any], Mapping[str, Value]], Optimizer]:
    def make(groups: Iterable[Any], parameters: Mapping[str, Value]) -> Optimizer:
        return torch.optim.AdamW(
            groups,
            lr=_number(parameters, "learning_rate"),
            betas=(_number(parameters, "adam_beta1"), _number(parameters, "adam_beta2")),
            eps=_number(parameters, "adam_epsilon"),
            fused=fused or None,
        )

    return make


def _plain(kind: Callable[..., Optimizer], **options: Any) -> Callable[[Iterable[Any], Mapping[str, Value]], Optimizer]:
    def make(groups: Iterable[Any], parameters: Mapping[str, Value]) -> Optimizer:
        return kind(groups, lr=_number(parameters, "learning_rate"), **options)

    return make


_OPTIMIZERS = {
    "adamw_torch_fused": _adamw(fused=True),
    "adamw_torch": _adamw(fused=False),
    "adafactor": _plain(Adafactor, scale_parameter=False, relative_step=False),
    "adagrad": _plain(torch.optim.Adagrad),
    "rmsprop": _plain(torch.optim.RMSprop),
    "sgd": _plain(torch.optim.SGD),
}


def make_scheduler(optimizer: Optimizer, parameters: Mapping[str, Value], *, steps: int) -> LambdaLR:
    warmup = _number(parameters, "warmup_steps")
    scheduler = get_scheduler(
        str(parameters["lr_scheduler_type"]),
        optimizer=optimizer,
        num_warmup_steps=int(warmup) if warmup >= 1 else math.ceil(steps * warmup),
        num_training_steps=steps,
    )
    assert isinstance(scheduler, LambdaLR)
    return scheduler


def _number(parameters: Mapping[str, Value], name: str) -> float:
    return float(parameters[name] or 0)

"""The state that moves between checkpoint and training, by the names of parameters.

Names survive what indices and wrappers do not: another number of ranks, sharding, compilation, another loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Prefixes that compilation, activation checkpointing and FSDP put into names."""


class StateMismatchError(ValueError):
    """The checkpoint belongs to another model, adapter or optimizer than this training has."""


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """The trained weights of a model; where all of it is trained, also the buffers in its state."""
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    trained = {name: parameter.detach() for name, parameter in parameters.items() if parameter.requires_grad}
    if len(trained) < len(parameters):
        return trained
    kept = {plain_name(name) for name in model.state_dict()}
    buffers = {plain_name(name): buffer for name, buffer in model.named_buffers()}
    return trained | {name: buffer for name, buffer in buffers.items() if name in kept}


def load_weights(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    ours = trained_weights(model)
    _require_same("the model", ours, saved)
    with torch.no_grad():
        for name, target in ours.items():
            if target is not saved[name]:
                if target.shape != saved[name].shape:
                    raise StateMismatchError(
                        f"{name} has shape {tuple(saved[name].shape)} in the checkpoint, "
                        f"but {tuple(target.shape)} in the model"
                    )
                target.copy_(saved[name])


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    optimizer = _inner(optimizer)
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    return {
        "state": {names[id(parameter)]: dict(state) for parameter, state in optimizer.state.items()},
        "groups": [
            {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ],
    }


def load_optimizer(model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load a saved state; options such as the weight decay stay those of this training. Raises StateMismatchError."""
    ours, theirs = optimizer_state(model, optimizer)["groups"], saved["groups"]
    names, saved_names = ([name for group in groups for name in group["params"]] for groups in (ours, theirs))
    _require_same("the optimizer", names, saved_names)
    if [group["params"] for group in ours] != [group["params"] for group in theirs]:
        raise StateMismatchError("the optimizer's groups of parameters are others than in the checkpoint")
    indices = {name: index for index, name in enumerate(names)}
    groups = [
        {**group, "lr": before["lr"], "params": [indices[name] for name in group["params"]]}
        for group, before in zip(ours, theirs, strict=True)
    ]
    state = {indices[name]: dict(values) for name, values in saved["state"].items()}
    _inner(optimizer).load_state_dict({"state": state, "param_groups": groups})


def load_scheduler(scheduler: LambdaLR, saved: Mapping[str, Any], *, step: int) -> None:
    """Continue a schedule at a step, with the learning rates of this training."""
    bases = scheduler.base_lrs
    scheduler.load_state_dict(dict(saved))
    scheduler.base_lrs, scheduler.last_epoch, scheduler._step_count = bases, step, step + 1
    rates = [base * factor(step) for base, factor in zip(bases, scheduler.lr_lambdas, strict=True)]
    scheduler._last_lr = rates
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def make_optimizer_state(optimizer: Optimizer) -> None:
    """Have an optimizer that made no step create its state, so that a saved one can be read into it."""
    inner = _inner(optimizer)
    if inner.state:
        return
    rates = [group["lr"] for group in inner.param_groups]
    for group in inner.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    inner.step()
    for group, rate in zip(inner.param_groups, rates, strict=True):
        group["lr"] = rate
    inner.zero_grad(set_to_none=True)


def plain_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(f".{wrapper}", ".").removeprefix(wrapper)
    return name


def _inner(optimizer: Optimizer) -> Optimizer:
    return getattr(optimizer, "optimizer", optimizer)


def _require_same(what: str, ours: Mapping[str, Any] | list[str], theirs: Mapping[str, Any] | list[str]) -> None:
    missing, foreign = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
    if missing or foreign:
        lacking = f"lacks {missing[0]} and {len(missing) - 1} more" if missing else ""
        having = f"has {foreign[0]} and {len(foreign) - 1} more that are not here" if foreign else ""
        raise StateMismatchError(
            f"the checkpoint's state of {what} is that of another training: it "
            + " and ".join(part for part in (lacking, having) if part)
            + ". Resume with the same base model, training type and adapter options, or start over"
        )

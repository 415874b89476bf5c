"""What a training changes: weights and the optimizer's state, by the names of parameters, and the schedule.

Names outlive what indices and wrappers do not: another number of ranks, sharding, compilation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What compilation, activation checkpointing and the like put into names."""


class StateMismatchError(ValueError):
    """The checkpoint belongs to another model, adapter or optimizer than this training has."""


def weights(model: nn.Module) -> dict[str, Tensor]:
    """What is trained of a model. Where all of it is, also the buffers that its state has."""
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    trained = {name: parameter.detach() for name, parameter in parameters.items() if parameter.requires_grad}
    if len(trained) < len(parameters):
        return trained
    kept = {plain_name(name) for name in model.state_dict()}
    return trained | {name: buffer for name, buffer in _buffers(model).items() if name in kept}


def load_weights(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Put saved weights in their place.

    Raises:
        StateMismatchError: names or shapes are not those of this model.
    """
    ours = weights(model)
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
    """The optimizer's state and options, with parameters by name."""
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
    """Give the optimizer a saved state. Its options, such as the weight decay, are those that it was made with now.

    Raises:
        StateMismatchError: it is that of other parameters.
    """
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


def load_scheduler(scheduler: Any, saved: Mapping[str, Any], *, step: int) -> None:
    """Let a schedule go on at a step, as it was saved; where it follows from the step alone, with the rates of now."""
    bases = getattr(scheduler, "base_lrs", None)
    scheduler.load_state_dict(dict(saved))
    if not isinstance(scheduler, LambdaLR):
        return
    scheduler.base_lrs, scheduler.last_epoch, scheduler._step_count = bases, step, step + 1
    rates = [base * factor(step) for base, factor in zip(bases, scheduler.lr_lambdas, strict=True)]
    scheduler._last_lr = rates
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def make_optimizer_state(optimizer: Optimizer) -> None:
    """Let an optimizer that has made no step make its state, so that a saved one has a form to be read into."""
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
    """A parameter's name without what wrappers have put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(f".{wrapper}", ".").removeprefix(wrapper)
    return name


def _inner(optimizer: Optimizer) -> Optimizer:
    """Without accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {plain_name(name): buffer for name, buffer in model.named_buffers()}


def _require_same(what: str, ours: Mapping[str, Any] | list[str], theirs: Mapping[str, Any] | list[str]) -> None:
    missing, foreign = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
    if missing or foreign:
        lacking = f"lacks {missing[0]} and {len(missing) - 1} more" if missing else ""
        having = f"has {foreign[0]} and {len(foreign) - 1} more that are not here" if foreign else ""
        raise StateMismatchError(
            f"the checkpoint's state of {what} is that of another training: it "
            + " and ".join(part for part in (lacking, having) if part)
            + ". Resume with the same base model, training type and adapter options, or start anew"
        )

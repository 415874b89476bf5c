"""The checkpoint that a training resumes from, and the state that moves between checkpoint and training.

A checkpoint is refused where the training would take another course. State is stored by the names of parameters, which
survive what indices and wrappers do not: another number of ranks, sharding, compilation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from trainmaster.jobs import rng
from trainmaster.jobs.checkpoint import CorruptCheckpointError, Manifest
from trainmaster.jobs.checkpoint_saver import InexactResumeError, Saver
from trainmaster.jobs.process import Process
from trainmaster.jobs.report import Reporter
from trainmaster.jobs.roots import Root, open_checkpoint
from trainmaster.jobs.trees import ANYTHING
from trainmaster.training.document import Prepared

NEEDS = ("model", "optimizer", "scheduler", "trainer_state")
"""The parts of a trainer's checkpoint; a resume without one of them would not be exact."""
_ADVICE = "Bring it back, resume from another checkpoint of the job, or start anew without one"


@dataclass(slots=True, kw_only=True)
class Resumed:
    """A checkpoint to resume from."""

    where: str
    manifest: Manifest
    metadata: Mapping[str, Any]
    rng_state: rng.State | None
    """Of this rank; None where the number of ranks changed."""
    tree: Any = field(repr=False, default=None)
    """None where it is read later, into a template."""
    _saver: Saver = field(repr=False)
    _rel_path: str = field(repr=False)

    def take_tree(self, template: Any) -> Any:
        """Weights, optimizer and the rest, once. A sharded tree is read now, into the template's shards."""
        if self.tree is None:
            return self._saver.load(self._rel_path, template, verify=False).tree
        tree, self.tree = self.tree, None
        return tree


def find(where: str, *, process: Process, reporter: Reporter, sharded: bool) -> Resumed:
    """The checkpoint at a path or URI; where it is corrupt, the newest good one before it. Collective.

    The tree of a `sharded` training is not read yet: it is read into the shards later.

    Raises:
        InexactResumeError: something is missing without which the training would take another course.
        CorruptCheckpointError: it is corrupt, and so are all before it.
    """
    root, name = open_checkpoint(where)
    _require_all_files(root, name)
    saver = Saver(root, process, reporter=reporter)
    if sharded:
        name = _verified(root, name, process, reporter)
        loaded = saver.load(name, {}, partial=True, needs=NEEDS[-1:])
    else:
        name, loaded = saver.load_latest_good(ANYTHING, start=name, needs=NEEDS)
    same_ranks = loaded.manifest.world_size == process.count
    if not same_ranks and process.index == 0:
        reporter.note(
            f"{name} was saved by {loaded.manifest.world_size} ranks, and {process.count} go on from it: weights and "
            "optimizer are the same, but random numbers and the division of rows are not"
        )
    return Resumed(
        where=root.locate(name),
        manifest=loaded.manifest,
        metadata=loaded.metadata,
        rng_state=saver.load_rng(name) if same_ranks else None,
        tree=None if sharded else loaded.tree,
        _saver=saver,
        _rel_path=name,
    )


def compare_inputs(
    resumed: Resumed, prepared: Prepared, *, process: Process, reporter: Reporter, adapter: bool
) -> None:
    """Check that base model and rows are those of the checkpoint; other rows are only noted.

    Raises:
        InexactResumeError: an adapter belongs to another base model.
    """
    model, rows = (resumed.metadata.get(name) for name in ("model_key", "rows_key"))
    if adapter and model and model != prepared.model_key:
        raise InexactResumeError(
            f"{resumed.where} has an adapter, and the base model is not the one that it was trained beside: it was "
            "changed, or is another. Bring it back (base_model.revision pins it), or start anew without a checkpoint"
        )
    if rows and rows != prepared.rows_key and process.index == 0:
        reporter.note(
            "the rows are not those that the checkpoint was trained on: the data, its configuration, the tokenizer or "
            "a package is another; training goes on with them at the same place in the epochs"
        )


def _require_all_files(root: Root, name: str) -> None:
    """Refuse a checkpoint with missing files: somebody removed them. (Corrupt bytes lead to an earlier checkpoint.)"""
    manifest, place = root.manifest(name), Path(root.locate(name))
    if manifest is None:
        raise InexactResumeError(f"{root.locate(name)}: there is no checkpoint any more. {_ADVICE}")
    if not place.is_dir():
        return
    missing = [file.path for file in manifest.files if not (place / manifest.data / file.path).exists()]
    if missing:
        raise InexactResumeError(f"{place} lacks {missing[0]}: training cannot go on exactly without it. {_ADVICE}")


def _verified(root: Root, start: str, process: Process, reporter: Reporter) -> str:
    """The newest intact checkpoint up to `start`; the first rank reads, and broadcasts its name."""
    said: dict[str, str] = {}
    if process.index == 0:
        candidates = root.committed()[::-1]
        for name in candidates[candidates.index(start) :] if start in candidates else [start]:
            try:
                root.verify(name)
                said = {"name": name}
                break
            except CorruptCheckpointError as error:
                reporter.note(f"the checkpoint {name} is corrupt, the one before it is used: {error}")
                said.setdefault("error", str(error))
    said = process.broadcast(said, "the checkpoint to go on from")
    if "name" not in said:
        raise CorruptCheckpointError(said.get("error", f"{start}: nothing is committed there"))
    return said["name"]


_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Prefixes that compilation, activation checkpointing and FSDP put into names."""


class StateMismatchError(ValueError):
    """The checkpoint belongs to another model, adapter or optimizer than this training has."""


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The trained weights of a model; where all of it is trained, also the buffers in its state."""
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    trained = {name: parameter.detach() for name, parameter in parameters.items() if parameter.requires_grad}
    if len(trained) < len(parameters):
        return trained
    kept = {plain_name(name) for name in model.state_dict()}
    return trained | {name: buffer for name, buffer in _buffers(model).items() if name in kept}


def load_weights(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Raises StateMismatchError where names or shapes are not those of this model."""
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
    """Load a saved state; options such as the weight decay stay those of this training. Raises StateMismatchError
    where the parameters differ.
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
    """A parameter's name without the prefixes of wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(f".{wrapper}", ".").removeprefix(wrapper)
    return name


def _inner(optimizer: Optimizer) -> Optimizer:
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

"""How checkpoints name weights, and which of their tensors make up a parameter, where the two are not the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from trainmaster.engine.architectures.mixtures import Mixture, Stored
from trainmaster.engine.architectures.naming import ALONE, Naming
from trainmaster.engine.config import ModelConfig

_EXPERTS = ".mlp.experts."


@dataclass(frozen=True, slots=True)
class Layout:
    names: tuple[str, ...]
    """The names of the tensors in the checkpoint."""
    joined: Callable[[Sequence[Tensor]], Tensor]
    """The parameter that the tensors make up."""
    parted: Callable[[Tensor], Sequence[Tensor]]
    """The tensors that make up a parameter."""


class Tensors(Protocol):
    """The weights of a checkpoint."""

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> Sequence[int]: ...


def layout_of(config: ModelConfig, naming: Naming, parameter: str, names: Tensors) -> Layout:
    """How a checkpoint has a parameter of the model."""
    mixture, theirs = config.mixture, naming.theirs(parameter)
    if mixture is not None and _EXPERTS in parameter and mixture.stored is Stored.TRANSPOSED:
        inputs = config.hidden_size if theirs.endswith(".gate_up_proj") else mixture.width
        # transformers writes both forms.
        is_transposed = theirs not in names or names.shape(theirs)[1] == inputs
        return _transposed(theirs) if is_transposed else _as_it_is(theirs)
    if mixture is None or ".mlp." not in parameter or theirs in names:
        return _as_it_is(theirs)
    if _EXPERTS in parameter and not theirs.endswith("_bias"):
        return _each_expert(mixture, theirs)
    return _as_it_is(theirs.replace(".mlp.", f".{mixture.module}."))


def module_naming(config: ModelConfig) -> Naming:
    """The names of transformers' modules, which PEFT uses, too."""
    return _namings(config)[0]


def _namings(config: ModelConfig) -> list[Naming]:
    known = config.nested.namings if config.nested else (ALONE,)
    return [replace(naming, beside=naming.beside + config.beside) for naming in known]


def naming_of(config: ModelConfig, names: Iterable[str]) -> Naming:
    """How some weights are named: transformers saves published names, or those of its modules."""
    modules, *others = _namings(config)
    known = list(names)
    for other in others:
        if any(name.startswith((other.body, other.unembedding)) for name in known):
            return other
    return modules


def _as_it_is(name: str) -> Layout:
    return Layout((name,), lambda tensors: tensors[0], lambda whole: (whole,))


def _transposed(name: str) -> Layout:
    return Layout((name,), lambda tensors: tensors[0].transpose(1, 2), lambda whole: (whole.transpose(1, 2),))


def _each_expert(mixture: Mixture, name: str) -> Layout:
    """One tensor for each expert and product; gate and up of an expert lie one after the other."""
    layer, _, kind = name.partition(_EXPERTS)
    gate, up, down = mixture.names
    products = (gate, up) if kind == "gate_up_proj" else (down,)
    names = tuple(
        f"{layer}.{mixture.module}.experts.{expert}.{product}.weight"
        for expert in range(mixture.experts)
        for product in products
    )

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        stacked = torch.stack(list(tensors))
        return stacked.view(mixture.experts, -1, stacked.shape[2])

    def parted(whole: Tensor) -> Sequence[Tensor]:
        return whole.reshape(len(names), -1, whole.shape[2]).unbind(0)

    return Layout(names, joined, parted)

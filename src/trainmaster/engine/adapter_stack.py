"""The factors of several adapters in one tensor for each layer, so that the rows of all of them share its kernels.

A stack has a fixed number of places. Another adapter costs a copy of its factors into a place: the addresses stay, and
so do CUDA graphs that read them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainmaster.engine.adapters import Adapter
from trainmaster.engine.kernels.adapter_products import lower_rows, raise_rows
from trainmaster.engine.products import Layer, product

_LEAST_RANK = 16
"""Tensor cores take no less."""
_LEAST_PLACES = 4
_SAME_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Products of the same rows."""


@dataclass(frozen=True, slots=True, eq=False)
class _Lowering:
    """The first factors of the targets that have the same inputs: [places, targets x rank, in]."""

    factors: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Target:
    lowering: _Lowering
    first: int
    """Where its own part of the lowered rows begins."""
    a: Tensor
    """[places, rank, in], a view."""
    b: Tensor
    """[places, out, rank], times the adapter's scale."""


class AdapterStack:
    def __init__(self, adapters: Sequence[Adapter], device: torch.device, dtype: torch.dtype) -> None:
        """Room for these adapters, and for others of their layers and of no greater rank."""
        self.rank = max(_LEAST_RANK, _power_of_two(max(adapter.options.rank for adapter in adapters)))
        self.places = max(_LEAST_PLACES, _power_of_two(len(adapters)))
        shapes: dict[str, tuple[int, int]] = {}
        for adapter in adapters:
            shapes |= {name: (len(own.b), own.a.shape[1]) for name, own in adapter.factors.items()}
        self._targets: dict[str, _Target] = {}
        for names in _joined(shapes):
            inputs = shapes[names[0]][1]
            lowering = _Lowering(torch.zeros(self.places, len(names) * self.rank, inputs, device=device, dtype=dtype))
            for index, name in enumerate(names):
                first = index * self.rank
                b = torch.zeros(self.places, shapes[name][0], self.rank, device=device, dtype=dtype)
                self._targets[name] = _Target(lowering, first, lowering.factors[:, first : first + self.rank], b)
        self._owners: list[weakref.ref[Adapter] | None] = [None] * self.places
        self._used = [0] * self.places
        self._uses = 0

    @property
    def owners(self) -> list[Adapter]:
        """The adapters that have places, and live."""
        return [owner for ref in self._owners if ref is not None and (owner := ref()) is not None]

    def holds(self, adapters: Sequence[Adapter]) -> bool:
        """Whether there is room for all of them at once."""
        return len(adapters) <= self.places and all(
            each.options.rank <= self.rank and each.factors.keys() <= self._targets.keys() for each in adapters
        )

    def place(self, adapters: Sequence[Adapter]) -> dict[Adapter, int]:
        """The place of each adapter; those that had none take the places of others, the longest unused ones first."""
        self._uses += 1
        owners = [None if ref is None else ref() for ref in self._owners]
        found = {owner: place for place, owner in enumerate(owners) if owner is not None and owner in adapters}
        others = [place for place, owner in enumerate(owners) if owner not in found]
        others.sort(key=lambda place: (owners[place] is not None, self._used[place]))
        for adapter in adapters:
            if adapter not in found:
                found[adapter] = others.pop(0)
                self._fill(found[adapter], adapter)
                self._owners[found[adapter]] = weakref.ref(adapter)
            self._used[found[adapter]] = self._uses
        return found

    def lowering(self, target: str) -> _Lowering | None:
        own = self._targets.get(target)
        return None if own is None else own.lowering

    def add(self, target: str, outputs: Tensor, lowered: Tensor, places: Tensor) -> None:
        own = self._targets[target]
        raise_rows(outputs, lowered, own.first, own.b, places)

    def _fill(self, place: int, adapter: Adapter) -> None:
        rank = adapter.options.rank
        for name, own in self._targets.items():
            if rank < self.rank or name not in adapter.factors:
                own.a[place].zero_()
                own.b[place].zero_()
        mine = [self._targets[name] for name in adapter.factors]
        factors = list(adapter.factors.values())
        torch._foreach_copy_([own.a[place, :rank] for own in mine], [each.a.detach() for each in factors])
        scaled = torch._foreach_mul([each.b.detach() for each in factors], adapter.scale)
        torch._foreach_copy_([own.b[place, :, :rank] for own in mine], list(scaled))


@dataclass(slots=True, eq=False)
class StackedRows:
    """Which rows belong to which place of a stack: int32 [n]; -1: to the base model alone."""

    stack: AdapterStack
    places: Tensor
    _of: _Lowering | None = field(default=None, init=False)
    _rows: Tensor | None = field(default=None, init=False)
    _lowered: Tensor | None = field(default=None, init=False)

    @property
    def total(self) -> int:
        return len(self.places)

    def products(self, layers: Sequence[Layer], rows: Tensor) -> tuple[Tensor, ...]:
        outputs = tuple(product(rows, layer.weight, layer.bias) for layer in layers)
        for layer, output in zip(layers, outputs, strict=True):
            self.add(layer.target, rows, output)
        return outputs

    def add(self, target: str, rows: Tensor, outputs: Tensor) -> None:
        """Add the adapters' part to the outputs of a layer."""
        lowering = self.stack.lowering(target)
        if lowering is None:
            return
        if lowering is not self._of or rows is not self._rows:
            self._of, self._rows = lowering, rows
            self._lowered = lower_rows(rows, lowering.factors, self.places, self.stack.rank)
        assert self._lowered is not None
        self.stack.add(target, outputs, self._lowered, self.places)


def _joined(shapes: dict[str, tuple[int, int]]) -> list[list[str]]:
    """The targets, those with the same inputs together."""
    groups: dict[tuple[str, object], list[str]] = {}
    for target in shapes:
        parent, _, name = target.rpartition(".")
        same = next((names for names in _SAME_INPUTS if name in names), name)
        groups.setdefault((parent, same), []).append(target)
    return list(groups.values())


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()

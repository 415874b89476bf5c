"""The factors of several adapters in one tensor for each layer, so that the rows of all of them share its kernels.

A stack has a fixed number of places. Another adapter costs a copy of its factors into a place: the addresses stay, and
so do CUDA graphs that read them.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainmaster.engine.adapters import Adapter
from trainmaster.engine.kernels.adapter_products import COLUMNS, lower_rows, raise_rows
from trainmaster.engine.products import Layer, joint_product

_LEAST_RANK = 16
"""Tensor cores take no less."""
_LEAST_PLACES = 4
_SAME_ROWS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Products that multiply the same rows, as the model computes them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Products of the same rows."""

    a: Tensor
    """[places, products x rank, in]."""
    b: Tensor
    """[places, the sum of their outputs, rank], times the adapter's scale."""
    blocks: Tensor
    """For `raise_rows`."""


class AdapterStack:
    def __init__(self, adapters: Sequence[Adapter], device: torch.device, dtype: torch.dtype) -> None:
        """Room for these adapters, and for others of their layers and of no greater rank."""
        self.rank, self.places, shapes = _sizes(adapters)
        self._groups: dict[tuple[str, ...], _Group] = {}
        self._factors: dict[str, tuple[Tensor, Tensor]] = {}
        """By the product's name, its parts of a group's tensors: [places, rank, in] and [places, out, rank]."""
        for names in _with_the_same_rows(shapes):
            inputs, widths = shapes[names[0]][1], [shapes[name][0] for name in names]
            ends = list(itertools.accumulate(widths, initial=0))
            group = _Group(
                torch.zeros(self.places, len(names) * self.rank, inputs, device=device, dtype=dtype),
                torch.zeros(self.places, ends[-1], self.rank, device=device, dtype=dtype),
                _blocks(ends, self.rank).to(device),
            )
            self._groups[names] = group
            for index, name in enumerate(names):
                a = group.a[:, index * self.rank : (index + 1) * self.rank]
                self._factors[name] = a, group.b[:, ends[index] : ends[index + 1]]
        self._owners: list[weakref.ref[Adapter] | None] = [None] * self.places
        self._used = [0] * self.places
        self._uses = 0

    @staticmethod
    def bytes_of(adapters: Sequence[Adapter], dtype: torch.dtype) -> int:
        """What a stack with room for these adapters takes."""
        rank, places, shapes = _sizes(adapters)
        return places * rank * sum(map(sum, shapes.values())) * dtype.itemsize

    @property
    def owners(self) -> list[Adapter]:
        """The adapters that have places, and live."""
        return [owner for ref in self._owners if ref is not None and (owner := ref()) is not None]

    def holds(self, adapters: Sequence[Adapter]) -> bool:
        """Whether there is room for all of them at once."""
        return len(adapters) <= self.places and all(
            each.options.rank <= self.rank and each.factors.keys() <= self._factors.keys() for each in adapters
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
                # Nobody's, if there is no memory to fill it.
                self._owners[found[adapter]] = None
                self._fill(found[adapter], adapter)
                self._owners[found[adapter]] = weakref.ref(adapter)
            self._used[found[adapter]] = self._uses
        return found

    def add(self, targets: tuple[str, ...], rows: Tensor, outputs: Tensor, segments: Tensor) -> None:
        """Add the adapters' parts to the outputs, side by side, of products of the same rows."""
        group = self._groups.get(targets)
        if group is not None:
            raise_rows(outputs, lower_rows(rows, group.a, segments), group.b, segments, group.blocks)

    def _fill(self, place: int, adapter: Adapter) -> None:
        rank = adapter.options.rank
        for name, (a, b) in self._factors.items():
            if rank < self.rank or name not in adapter.factors:
                a[place].zero_()
                b[place].zero_()
        mine = [self._factors[name] for name in adapter.factors]
        factors = list(adapter.factors.values())
        torch._foreach_copy_([a[place, :rank] for a, _ in mine], [each.a.detach() for each in factors])
        scaled = torch._foreach_mul([each.b.detach() for each in factors], adapter.scale)
        torch._foreach_copy_([b[place, :, :rank] for _, b in mine], list(scaled))


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRows:
    """Which rows belong to which place of a stack: segments of rows, as `segments_of` finds them."""

    stack: AdapterStack
    segments: Tensor
    total: int

    def products(self, layers: Sequence[Layer], rows: Tensor) -> tuple[Tensor, ...]:
        outputs = joint_product(rows, layers)
        self.stack.add(tuple(layer.target for layer in layers), rows, outputs, self.segments)
        return torch.split_with_sizes(outputs, [len(layer.weight) for layer in layers], dim=1)


def _sizes(adapters: Sequence[Adapter]) -> tuple[int, int, dict[str, tuple[int, int]]]:
    """The rank and the number of places of a stack, and the widths of its layers' outputs and inputs."""
    shapes: dict[str, tuple[int, int]] = {}
    for adapter in adapters:
        shapes |= {name: (len(own.b), own.a.shape[1]) for name, own in adapter.factors.items()}
    rank = max(_LEAST_RANK, _power_of_two(max(adapter.options.rank for adapter in adapters)))
    return rank, max(_LEAST_PLACES, _power_of_two(len(adapters))), shapes


def _with_the_same_rows(shapes: Iterable[str]) -> list[tuple[str, ...]]:
    groups: dict[tuple[str, object], list[str]] = {}
    for target in shapes:
        parent, _, name = target.rpartition(".")
        same = next((names for names in _SAME_ROWS if name in names), name)
        groups.setdefault((parent, same), []).append(target)
    return [tuple(names) for names in groups.values()]


def _blocks(ends: Sequence[int], rank: int) -> Tensor:
    """Blocks of columns for `raise_rows`: those of one product have lowered rows of their own."""
    return torch.tensor(
        [
            (start, min(start + COLUMNS, stop), index * rank)
            for index, (first, stop) in enumerate(itertools.pairwise(ends))
            for start in range(first, stop, COLUMNS)
        ],
        dtype=torch.int32,
    )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()

"""The factors of a pack's adapters as GPUs compute with them: side by side, rounded once while they do not change."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trainmaster.engine.products import Factors

_RANKS = 8
"""Ranks are padded to a multiple of this, so that rows of 16 bits begin at multiples of 16 bytes."""


class Factored(Protocol):
    """An adapter, as far as its factors go."""

    scale: float
    changes: int

    @property
    def factors(self) -> Mapping[str, Factors]: ...


def flat_factors(adapter: Factored) -> dict[str, Factors]:
    """Those of single layers; `grouped_products` computes those of experts."""
    return {target: factors for target, factors in adapter.factors.items() if factors.a.dim() == 2}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a layer's factors begin in each adapter's part."""

    a: int
    b: int
    inputs: int
    outputs: int


class FactorStack:
    """Of each adapter all A, in the order of the layers, and then all B times the adapter's scale.

    Layers that follow each other, such as those of queries, keys and values, have their A end to end. What an adapter
    lacks, of its rank or of its layers, is zero.
    """

    def __init__(self, adapters: Sequence[Factored], dtype: torch.dtype) -> None:
        self.adapters = tuple(adapters)
        self._factors = [flat_factors(adapter) for adapter in adapters]
        factors = {target: each for own in self._factors for target, each in own.items()}
        device = next(iter(factors.values())).a.device
        self.rank = -(-max(len(each.a) for own in self._factors for each in own.values()) // _RANKS) * _RANKS
        self._places: dict[str, _Place] = {}
        starts = self.rank * sum(each.a.shape[1] for each in factors.values())
        self._b_start = starts
        done = 0
        for target, each in factors.items():
            inputs, outputs = each.a.shape[1], each.b.shape[0]
            self._places[target] = _Place(done, starts, inputs, outputs)
            done += self.rank * inputs
            starts += self.rank * outputs
        self.values = torch.zeros(len(adapters), starts, dtype=dtype, device=device)
        self._filled_a, self._filled_b = self._parts(self.values)
        self._filled_with: object = None
        self._spans: dict[tuple[str, ...], tuple[int, int, int] | None] = {}
        self._own_a: dict[tuple[str, ...], Tensor] = {}
        self._own_b: dict[str, Tensor] = {}
        """What `a` and `b` gave for the values: a step asks for them a thousand times."""

    def holds(self, adapters: Sequence[Factored], dtype: torch.dtype) -> bool:
        same = zip(self.adapters, adapters, strict=False)
        return (
            dtype == self.values.dtype and len(adapters) == len(self.adapters) and all(own is its for own, its in same)
        )

    @torch.no_grad()
    def fill(self) -> None:
        """Take the adapters' factors as they are now."""
        pairs = [each for own in self._factors for each in own.values()]
        # Optimizers write without counting a tensor's versions up; everything else counts.
        versions = (
            [adapter.changes for adapter in self.adapters],
            [(each.a._version, each.b._version) for each in pairs],
        )
        if versions == self._filled_with:
            return
        torch._foreach_copy_(self._filled_a, [each.a for each in pairs])
        raising: list[Tensor] = [each.b for each in pairs]
        scales = [adapter.scale for adapter, own in zip(self.adapters, self._factors, strict=True) for _ in own]
        if any(scale != 1.0 for scale in scales):
            torch._foreach_copy_(self._filled_b, torch._foreach_mul(raising, scales))
        else:
            torch._foreach_copy_(self._filled_b, raising)
        self._filled_with = versions

    def a(self, targets: Sequence[str], of: Tensor | None = None) -> Tensor | None:
        """A of all adapters for consecutive layers: [adapters, layers x rank, inputs]; None if they are no such."""
        key = tuple(targets)
        if of is None and (known := self._own_a.get(key)) is not None:
            return known
        if key not in self._spans:
            self._spans[key] = self._span_of_a(targets)
        if (span := self._spans[key]) is None:
            return None
        start, stop, inputs = span
        tensor = self.values if of is None else of
        found = tensor[:, start:stop].view(tensor.shape[0], -1, inputs)
        if of is None:
            self._own_a[key] = found
        return found

    def _span_of_a(self, targets: Sequence[str]) -> tuple[int, int, int] | None:
        """Where A of consecutive layers begin and end in an adapter's part, and their inputs; None: they are not."""
        places = [self._places.get(target) for target in targets]
        first = places[0]
        if first is None:
            return None
        for index, place in enumerate(places):
            if place is None or place.inputs != first.inputs or place.a != first.a + index * self.rank * first.inputs:
                return None
        return first.a, first.a + len(targets) * self.rank * first.inputs, first.inputs

    def b(self, target: str, of: Tensor | None = None) -> Tensor:
        """B of all adapters for a layer: [adapters, outputs, rank]."""
        if of is None and (known := self._own_b.get(target)) is not None:
            return known
        place = self._places[target]
        tensor = self.values if of is None else of
        found = tensor[:, place.b : place.b + self.rank * place.outputs].view(tensor.shape[0], -1, self.rank)
        if of is None:
            self._own_b[target] = found
        return found

    @property
    def trained(self) -> bool:
        return any(each.a.requires_grad for own in self._factors for each in own.values())

    def hand_out(self, gradients: Tensor, targets: Collection[str]) -> None:
        """Make parts of `gradients`, laid out as the values, the gradients of these layers' factors."""
        for own, adapter in zip(gradients, self.adapters, strict=True):
            if adapter.scale != 1.0:
                own[self._b_start :].mul_(adapter.scale)
        of_a, of_b = self._parts(gradients)
        pairs = [(target, each) for own in self._factors for target, each in own.items()]
        for (target, each), grad_a, grad_b in zip(pairs, of_a, of_b, strict=True):
            for parameter, grad in ((each.a, grad_a), (each.b, grad_b)):
                if parameter.requires_grad and target in targets:
                    grad = grad.contiguous().to(parameter.dtype)
                    parameter.grad = grad if parameter.grad is None else parameter.grad + grad

    def _parts(self, tensor: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Of each layer of each adapter, the places of A and B at the adapter's own rank."""
        of_a, of_b = [], []
        for own, of_adapter in zip(tensor, self._factors, strict=True):
            for target, factors in of_adapter.items():
                place, rank = self._places[target], len(factors.a)
                of_a.append(own[place.a : place.a + rank * place.inputs].view(rank, place.inputs))
                of_b.append(own[place.b : place.b + self.rank * place.outputs].view(-1, self.rank)[:, :rank])
        return of_a, of_b


class FactorStacks:
    """The stack of the last pack, kept for the next one."""

    def __init__(self) -> None:
        self._last: FactorStack | None = None

    def of(self, adapters: Sequence[Factored], dtype: torch.dtype) -> FactorStack:
        if self._last is None or not self._last.holds(adapters, dtype):
            self._last = None  # before another one is made: it may be large
            self._last = FactorStack(adapters, dtype)
        self._last.fill()
        return self._last

    def clear(self) -> None:
        self._last = None

"""Low-rank adapters of a model's layers, and which rows of a pack each one adapts."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainmaster.engine import kernels
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.factor_products import FactorRows
from trainmaster.engine.factor_stacks import FactorStacks, flat_factors
from trainmaster.engine.products import AdapterShare, Factors, Layer, adapted_outputs, adapted_product, products
from trainmaster.engine.targets import target_shapes
from trainmaster.engine.types import EngineError, LoraOptions


def check_shapes(problem: str, own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    if other := sorted(own.keys() ^ given.keys()):
        raise EngineError(f"{problem}: {other[0]} is on one side only")
    for name, tensor in own.items():
        if given[name].shape != tensor.shape:
            raise EngineError(f"{problem}: {name} is {list(given[name].shape)}, not {list(tensor.shape)}")


class Adapter:
    """The factors of one adapter: those of one seed are the same on all devices. No seed means seed 0."""

    changes = 0
    """How often an optimizer, or `load`, wrote the factors."""

    def __init__(
        self,
        config: ModelConfig,
        options: LoraOptions,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if options.rank < 1:
            raise EngineError(f"an adapter's rank is at least 1, not {options.rank}")
        if not (math.isfinite(options.alpha) and options.alpha > 0):
            raise EngineError(f"an adapter's alpha is a positive number, not {options.alpha}")
        if options.init not in ("kaiming", "nora"):
            raise EngineError(f"an adapter is initialized by kaiming or nora, not by {options.init!r}")
        shapes = target_shapes(config, options)
        if not shapes:
            raise EngineError("an adapter needs something to adapt: train_attn, train_mlp or train_unembed")
        self.config = config
        self.options = options
        self.scale = options.alpha / options.rank
        self.factors: dict[str, Factors] = {}
        """By the layer's name, such as `model.layers.0.self_attn.q_proj`."""
        for target, (*experts, outputs, inputs) in shapes.items():
            a = nn.Parameter(_begun(options, target, experts, inputs).to(device, dtype))
            b = nn.Parameter(torch.zeros(*experts, outputs, options.rank, device=device, dtype=dtype))
            self.factors[target] = Factors(a, b)

    @classmethod
    def of(cls, config: ModelConfig, factors: Mapping[str, Factors], *, scale: float) -> Adapter:
        """An adapter of factors that are there, by the names of the layers that they adapt."""
        rank = max(len(own.a) for own in factors.values())
        adapter = object.__new__(cls)
        adapter.config, adapter.options, adapter.scale = config, LoraOptions(rank=rank, alpha=scale * rank), scale
        adapter.factors = dict(factors)
        return adapter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each factor by name, always in the same order: `<layer>.lora_A.weight` and `<layer>.lora_B.weight`."""
        for target, factors in self.factors.items():
            yield f"{target}.lora_A.weight", factors.a
            yield f"{target}.lora_B.weight", factors.b

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Set all factors, by the names of `named_parameters`. Raises EngineError, first, if one does not fit."""
        own = dict(self.named_parameters())
        check_shapes("these are not this adapter's factors", own, tensors)
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(tensors[name])
        self.changes += 1

    def copy(self) -> Adapter:
        twin = object.__new__(Adapter)
        twin.config, twin.options, twin.scale = self.config, self.options, self.scale
        twin.factors = {
            target: Factors(*(nn.Parameter(each.detach().clone(), requires_grad=False) for each in (own.a, own.b)))
            for target, own in self.factors.items()
        }
        return twin

    def delta(self, target: str) -> Tensor:
        """The matrix that the adapter adds to a layer's weight, float32 [out, in], or [experts, out, in]."""
        factors = self.factors[target]
        return self.scale * (factors.b.detach().float() @ factors.a.detach().float())


def _begun(options: LoraOptions, target: str, experts: Sequence[int], inputs: int) -> Tensor:
    """The initial A. It depends on the seed and the layer alone."""
    digest = hashlib.sha256(f"{options.seed or 0}:{target}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    drawn = torch.rand(*experts, options.rank, inputs, generator=generator) * 2 - 1
    if options.init == "nora":
        # Every input counts the same at first: its column over the rank has length 1.
        return functional.normalize(drawn, dim=-2)
    return drawn / math.sqrt(inputs)


class AdaptedRows(Protocol):
    """Which adapters the rows of a pack have, and how they change the outputs of a layer."""

    @property
    def total(self) -> int: ...

    def products(self, layers: Sequence[Layer], rows: Tensor) -> tuple[Tensor, ...]:
        """The outputs of layers that see the same rows, each with its adapter's part."""


class AdapterRows:
    """Which rows of a pack belong to which adapter, or None for the base model alone, in the order of the rows.

    No dataclass: FSDP would take tensors in its fields for inputs of the layers.
    """

    def __init__(self, parts: Sequence[tuple[Adapter | None, int]], stacks: FactorStacks | None = None) -> None:
        """`stacks`: where a GPU's copy of the factors is kept for the next pack."""
        self.parts = parts
        self.stacks = stacks or FactorStacks()
        self._shares: dict[str, tuple[AdapterShare, ...]] = {}
        self._stacked: FactorRows | None = None

    @property
    def total(self) -> int:
        return sum(rows for _, rows in self.parts)

    def products(self, layers: Sequence[Layer], rows: Tensor) -> tuple[Tensor, ...]:
        if stacked := self.stacked(rows):
            return stacked.products(rows, layers)
        shares = [self.shares(layer.target, rows.dtype) for layer in layers]
        if any(layer.quantized is not None for layer in layers):
            outputs = products(rows, layers)
            return tuple(adapted_outputs(output, rows, own) for output, own in zip(outputs, shares, strict=True))
        return tuple(
            adapted_product(rows, layer.weight, layer.bias, own) for layer, own in zip(layers, shares, strict=True)
        )

    def stacked(self, rows: Tensor) -> FactorRows | None:
        """What computes the adapters' parts on a GPU, if there are any."""
        if self._stacked is None and kernels.serve(rows):
            ends = itertools.accumulate(count for _, count in self.parts)
            own = [
                (adapter, (end - count, end))
                for (adapter, count), end in zip(self.parts, ends, strict=True)
                if adapter is not None and count and flat_factors(adapter)
            ]
            if own:
                stack = self.stacks.of([adapter for adapter, _ in own], rows.dtype)
                self._stacked = FactorRows(stack, [bounds for _, bounds in own], self.total)
        return self._stacked

    def hand_out_gradients(self) -> None:
        """Give the factors the gradients that were noted outside of autograd."""
        if self._stacked is not None:
            self._stacked.hand_out_gradients()

    def shares(self, target: str, dtype: torch.dtype) -> tuple[AdapterShare, ...]:
        """The parts that adapt a layer; their factors are rounded once for the pack to the type that it computes in."""
        if target not in self._shares:
            starts = itertools.accumulate((rows for _, rows in self.parts), initial=0)
            self._shares[target] = tuple(
                AdapterShare(
                    start,
                    start + rows,
                    adapter.scale,
                    factors,
                    factors.a.detach().to(dtype),
                    factors.b.detach().to(dtype),
                )
                for (adapter, rows), start in zip(self.parts, starts, strict=False)
                if adapter is not None and rows and (factors := adapter.factors.get(target))
            )
        return self._shares[target]

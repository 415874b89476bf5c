"""Runs of several adapters in one pack, and what each gets from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tiny_models import random_tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainmaster.engine.adapters import Adapter, AdapterRows
from trainmaster.engine.attention import PackedAttention
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.logprobs import all_logits, target_logprobs
from trainmaster.engine.model import Transformer
from trainmaster.engine.types import LoraOptions


@dataclass(frozen=True)
class Work:
    """Sequences of some lengths, for an adapter or for the base model."""

    adapter: Adapter | None
    lengths: tuple[int, ...]

    @property
    def rows(self) -> int:
        return sum(self.lengths)

    @property
    def texts(self) -> list[Tensor]:
        """Each with one token more, which is the last target."""
        return [random_tokens(length + 1, seed=length) for length in self.lengths]


@dataclass(frozen=True)
class Outcome:
    logprobs: Tensor
    gradients: list[Tensor]

    def equals(self, other: Outcome) -> bool:
        """To the last bit."""
        same = zip(self.gradients, other.gradients, strict=True)
        return torch.equal(self.logprobs, other.logprobs) and all(torch.equal(*each) for each in same)


def run(
    model: Transformer, works: Sequence[Work], *, chunk: int | None = None, recompute: bool = False
) -> list[Outcome]:
    """All of it in one pack, forward and backward by the sum of the logprobs."""
    hidden, adapters = hidden_of(model, works, recompute=recompute)
    targets = torch.cat([text[1:] for work in works for text in work.texts])
    logprobs = target_logprobs(hidden, targets, model.unembedding, adapters, chunk)
    if logprobs.requires_grad:
        logprobs.sum().backward()
    outcomes = []
    for work, own in zip(works, logprobs.detach().split([work.rows for work in works]), strict=True):
        parameters = list(work.adapter.parameters()) if work.adapter else []
        outcomes.append(Outcome(own, [parameter.grad.clone() for parameter in parameters]))
        for parameter in parameters:
            parameter.grad = None
    return outcomes


def hidden_of(model: Transformer, works: Sequence[Work], *, recompute: bool = False) -> tuple[Tensor, AdapterRows]:
    lengths = [length for work in works for length in work.lengths]
    adapters = AdapterRows([(work.adapter, work.rows) for work in works])
    tokens = torch.cat([text[:-1] for work in works for text in work.texts])
    positions = torch.cat([torch.arange(length) for length in lengths])
    return model.hidden(tokens, positions, PackedAttention(lengths), adapters, recompute=recompute), adapters


def logits_of(model: Transformer, texts: Sequence[Tensor], adapters: AdapterRows | None = None) -> list[Tensor]:
    """Of each of some sequences, computed as one pack."""
    lengths = [len(text) for text in texts]
    positions = torch.cat([torch.arange(length) for length in lengths])
    hidden = model.hidden(torch.cat(list(texts)), positions, PackedAttention(lengths), adapters)
    return list(all_logits(hidden, model.unembedding, adapters).split(lengths))


def filled_adapter(config: ModelConfig, *, seed: int = 0, **options: Any) -> Adapter:
    """An adapter none of whose factors is zero, as after some training."""
    adapter = Adapter(config, LoraOptions(**{"rank": 4, "seed": seed, **options}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return adapter


class Watch(TorchDispatchMode):
    """Counts the matrix products with each of some weights, and notes the largest tensor that anything makes."""

    def __init__(self, weights: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._names = {weight.untyped_storage().data_ptr(): index for index, weight in enumerate(weights)}
        self.products: Counter[int] = Counter()
        self.all_products = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.all_products += 1
            for each in args:
                if isinstance(each, Tensor) and each.untyped_storage().data_ptr() in self._names:
                    self.products[self._names[each.untyped_storage().data_ptr()]] += 1
        if isinstance(made, Tensor):
            self.largest = max(self.largest, made.numel())
        return made

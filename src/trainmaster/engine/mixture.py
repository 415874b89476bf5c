"""Mixtures of experts: a router chooses a few MLPs for each token, and what they say is added up by weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainmaster.engine.adapters import AdapterRows
from trainmaster.engine.architectures.mixtures import Mixture
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.grouped_products import Choices, GroupedShare, adapted_grouped_product
from trainmaster.engine.products import gated, product


class Router(nn.Module):
    def __init__(self, mixture: Mixture, hidden: int) -> None:
        super().__init__()
        self._mixture = mixture
        self.weight = nn.Parameter(torch.empty(mixture.experts, hidden))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each row and their weights, int64 and at least float32: [rows, chosen]."""
        logits = product(rows, self.weight)
        wide = torch.promote_types(rows.dtype, torch.float32)
        weights, chosen = torch.softmax(logits, dim=-1, dtype=wide).topk(self._mixture.chosen, dim=-1)
        return chosen, weights / weights.sum(-1, keepdim=True) if self._mixture.normalized else weights


class Experts(nn.Module):
    """The experts of a layer, with one matrix for each in every weight."""

    def __init__(self, config: ModelConfig, mixture: Mixture, target: str) -> None:
        super().__init__()
        self._activation, self._width = config.activation, mixture.width
        self._target = target
        hidden, count = config.hidden_size, mixture.experts
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * mixture.width, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, mixture.width))

    def forward(self, rows: Tensor, choices: Choices, adapters: AdapterRows | None) -> Tensor:
        """What each chosen expert says: [rows x chosen, hidden], sorted by expert."""
        first, second = slice(0, self._width), slice(self._width, None)
        shares = self._shares("gate_proj", first, adapters, rows) + self._shares("up_proj", second, adapters, rows)
        both = adapted_grouped_product(choices.spread(rows), self.gate_up_proj, None, choices, shares)
        gate, up = both.chunk(2, dim=1)
        between = gated(gate, up, self._activation)
        down = self._shares("down_proj", slice(None), adapters, rows)
        return adapted_grouped_product(between, self.down_proj, None, choices, down)

    def _shares(self, name: str, columns: slice, adapters: AdapterRows | None, rows: Tensor) -> list[GroupedShare]:
        if adapters is None:
            return []
        return [GroupedShare(share, columns) for share in adapters.shares(f"{self._target}.{name}", rows.dtype)]


class MixtureMlp(nn.Module):
    def __init__(self, config: ModelConfig, mixture: Mixture, layer: int) -> None:
        super().__init__()
        self._count = mixture.experts
        self.gate = Router(mixture, config.hidden_size)
        self.experts = Experts(config, mixture, f"model.layers.{layer}.mlp.experts")

    def forward(self, rows: Tensor, adapters: AdapterRows | None) -> Tensor:
        chosen, weights = self.gate(rows)
        choices = Choices(chosen, self._count)
        said: Tensor = self.experts(rows, choices, adapters)
        return choices.gathered(said, weights).to(rows.dtype)

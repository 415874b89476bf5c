"""Mixtures of experts: a router chooses a few MLPs for each token, and what they say is added up by weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainmaster.engine.adapters import AdapterRows
from trainmaster.engine.architectures.mixtures import Clamp, Mixture, Scores
from trainmaster.engine.attention import computed_in
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.grouped_products import Choices, GroupedShare, adapted_grouped_product
from trainmaster.engine.products import gated, product, sigmoid


class Router(nn.Module):
    e_score_correction_bias: Tensor

    def __init__(self, mixture: Mixture, hidden: int) -> None:
        super().__init__()
        self._mixture = mixture
        self.weight = nn.Parameter(torch.empty(mixture.experts, hidden))
        self.bias = nn.Parameter(torch.empty(mixture.experts)) if mixture.router_bias else None
        if mixture.corrected:
            # No parameter: it is not trained by gradients.
            self.register_buffer("e_score_correction_bias", torch.empty(mixture.experts))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each row and their weights, int64 and at least float32: [rows, chosen]."""
        mixture, wide = self._mixture, torch.promote_types(rows.dtype, torch.float32)
        if mixture.exact:
            logits = product(rows.to(wide), self.weight.to(wide), None if self.bias is None else self.bias.to(wide))
        else:
            logits = product(rows, self.weight, self.bias)
        if mixture.scores is Scores.SIGMOID:
            scores = sigmoid(logits.to(wide))
        else:
            scores = torch.softmax(logits, dim=-1, dtype=wide)
        chosen = self._chosen(scores.detach())
        weights = scores.gather(1, chosen)
        if mixture.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return chosen, weights if mixture.scale == 1.0 else weights * mixture.scale

    def _chosen(self, scores: Tensor) -> Tensor:
        mixture, groups = self._mixture, self._mixture.groups
        if mixture.corrected:
            scores = scores + self.e_score_correction_bias
        if groups is not None:
            grouped = scores.view(len(scores), groups.count, -1)
            best = grouped.topk(groups.best, dim=-1).values.sum(-1).topk(groups.chosen, dim=-1).indices
            closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, value=False)
            scores = grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1)
        return scores.topk(mixture.chosen, dim=-1).indices


class Experts(nn.Module):
    """The experts of a layer, with one matrix for each in every weight."""

    def __init__(self, config: ModelConfig, mixture: Mixture, target: str) -> None:
        super().__init__()
        self._activation, self._clamp, self._interleaved = config.activation, mixture.clamp, mixture.interleaved
        self._target = target
        hidden, inner, count = config.hidden_size, mixture.width, mixture.experts
        self._gate, self._up = slice(0, inner), slice(inner, None)
        both, down = (2 * inner, hidden), (hidden, inner)
        if mixture.interleaved:
            self._gate, self._up = slice(0, None, 2), slice(1, None, 2)
            both, down = (hidden, 2 * inner), (inner, hidden)
        self.gate_up_proj = nn.Parameter(torch.empty(count, *both))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(count, 2 * inner)) if mixture.bias else None
        self.down_proj = nn.Parameter(torch.empty(count, *down))
        self.down_proj_bias = nn.Parameter(torch.empty(count, hidden)) if mixture.bias else None

    def forward(self, rows: Tensor, choices: Choices, adapters: AdapterRows | None) -> Tensor:
        """What each chosen expert says: [rows x chosen, hidden], sorted by expert."""

        def shares(name: str, columns: slice) -> list[GroupedShare]:
            own = () if adapters is None else adapters.shares(f"{self._target}.{name}", rows.dtype)
            return [GroupedShare(share, columns) for share in own]

        both: Tensor = self.gate_up_proj
        down: Tensor = self.down_proj
        if self._interleaved:
            both, down = both.transpose(1, 2), down.transpose(1, 2)
        gate_up_shares = shares("gate_proj", self._gate) + shares("up_proj", self._up)
        outputs = adapted_grouped_product(choices.spread(rows), both, self.gate_up_proj_bias, choices, gate_up_shares)
        gate, up = outputs[:, self._gate], outputs[:, self._up]
        between = gated(gate, up, self._activation) if self._clamp is None else _clamped(gate, up, self._clamp)
        return adapted_grouped_product(between, down, self.down_proj_bias, choices, shares("down_proj", slice(None)))


def _clamped(gate: Tensor, up: Tensor, clamp: Clamp) -> Tensor:
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return (up + 1) * (gate * sigmoid(gate * clamp.steepness))


class MixtureMlp(nn.Module):
    def __init__(self, config: ModelConfig, mixture: Mixture, target: str, shared: nn.Module | None) -> None:
        super().__init__()
        self._mixture = mixture
        self.add_module(mixture.router, Router(mixture, config.hidden_size))
        self.experts = Experts(config, mixture, f"{target}.experts")
        if shared is not None:
            self.add_module(mixture.shared, shared)
        if mixture.shared_gate:
            self.shared_expert_gate = _Gate(config.hidden_size)

    def forward(self, rows: Tensor, adapters: AdapterRows | None) -> Tensor:
        mixture = self._mixture
        chosen, weights = getattr(self, mixture.router)(rows)
        choices = Choices(chosen, mixture.experts)
        said: Tensor = choices.gathered(self.experts(rows, choices, adapters), weights).to(rows.dtype)
        if not mixture.shared_width:
            return said
        shared: Tensor = getattr(self, mixture.shared)(rows, adapters)
        return said + (self.shared_expert_gate(rows) * shared if mixture.shared_gate else shared)


class _Gate(nn.Module):
    """How far each row opens: [rows, 1]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden))

    def forward(self, rows: Tensor) -> Tensor:
        # Products of one column are rounded by their row's place on the CPU.
        wide = computed_in(rows)
        return sigmoid((rows.to(wide) * self.weight.to(wide)).sum(-1, keepdim=True).to(rows.dtype))

"""Layers with the gated delta rule: what goes into it and what comes out of it, row by row."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainmaster.engine.adapters import AdaptedRows
from trainmaster.engine.attention import Attention, computed_in
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.delta_rule import RecurrentRows
from trainmaster.engine.layers import Linear, together
from trainmaster.engine.products import gated
from trainmaster.engine.recurrences import recurrence_of


class LinearMixer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        linear, hidden = config.linear, config.hidden_size
        if linear is None:
            raise ValueError(f"layer {layer} has no recurrent state")
        self._linear, self._place = linear, sum(linear.layers[:layer])
        prefix = f"model.layers.{layer}.linear_attn."
        if linear.by_key_head:
            self.in_proj_qkvz = Linear(prefix + "in_proj_qkvz", hidden, linear.mixed + linear.values)
            self.in_proj_ba = Linear(prefix + "in_proj_ba", hidden, 2 * linear.value_heads)
        else:
            self.in_proj_qkv = Linear(prefix + "in_proj_qkv", hidden, linear.mixed)
            self.in_proj_z = Linear(prefix + "in_proj_z", hidden, linear.values)
            self.in_proj_b = Linear(prefix + "in_proj_b", hidden, linear.value_heads)
            self.in_proj_a = Linear(prefix + "in_proj_a", hidden, linear.value_heads)
        self.conv1d = _Taps(linear.mixed, linear.taps)
        self.dt_bias = nn.Parameter(torch.empty(linear.value_heads))
        self.A_log = nn.Parameter(torch.empty(linear.value_heads))
        self.norm = _GatedNorm(linear.value_width, config.norm_eps)
        self.out_proj = Linear(prefix + "out_proj", linear.values, hidden)

    @property
    def wide(self) -> tuple[tuple[Linear, ...], ...]:
        """The layers that may have weights of 8 bits, with those that see the same rows; those of decays may not."""
        inward = (self.in_proj_qkvz,) if self._linear.by_key_head else (self.in_proj_qkv, self.in_proj_z)
        return inward, (self.out_proj,)

    def forward(self, rows: Tensor, attention: Attention, adapters: AdaptedRows | None) -> Tensor:
        mixed, gate, opened, stepped = self._projected(rows, adapters)
        wide = torch.promote_types(computed_in(rows), torch.float32)
        beta = torch.sigmoid(opened.to(wide))
        decay = -self.A_log.to(wide).exp() * functional.softplus(stepped.to(wide) + self.dt_bias.to(wide))
        taps = self.conv1d.weight.squeeze(1)
        given = RecurrentRows(mixed, decay, beta)
        outputs = recurrence_of(attention)(self._linear, self._place, given, taps)
        normed: Tensor = self.norm(outputs.flatten(0, 1), gate.flatten(0, 1))
        output: Tensor = self.out_proj(normed.view(len(rows), -1), adapters)
        return output

    def _projected(self, rows: Tensor, adapters: AdaptedRows | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values of the rows [n, mixed], gates [n, heads, width], and two numbers for each head."""
        linear = self._linear
        if not linear.by_key_head:
            layers = (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
            mixed, gate, opened, stepped = together(layers, rows, adapters)
            return mixed, gate.reshape(len(rows), linear.value_heads, -1), opened, stepped
        joint, numbers = together((self.in_proj_qkvz, self.in_proj_ba), rows, adapters)
        shared = linear.value_heads // linear.key_heads
        widths = [linear.key_width, linear.key_width, shared * linear.value_width, shared * linear.value_width]
        by_head = joint.view(len(rows), linear.key_heads, -1)
        query, key, value, gate = torch.split_with_sizes(by_head, widths, dim=2)
        mixed = torch.cat([each.flatten(1) for each in (query, key, value)], dim=1)
        opened, stepped = numbers.view(len(rows), linear.key_heads, -1).chunk(2, dim=2)
        gate = gate.reshape(len(rows), linear.value_heads, linear.value_width)
        return mixed, gate, opened.flatten(1), stepped.flatten(1)


class _Taps(nn.Module):
    """A convolution of each column with its own weights."""

    def __init__(self, columns: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(columns, 1, taps))


class _GatedNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self._eps = eps

    def forward(self, rows: Tensor, gate: Tensor) -> Tensor:
        return gated(gate.contiguous(), functional.rms_norm(rows, self.weight.shape, self.weight, self._eps), "silu")

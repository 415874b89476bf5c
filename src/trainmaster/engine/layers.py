"""Layers that all parts of a model are made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainmaster.engine import kernels
from trainmaster.engine.adapters import AdaptedRows
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.products import QuantizedLayer, products


class Linear(nn.Module):
    """A layer that adapters may adapt; `target` is its name for them."""

    def __init__(self, target: str, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.target = target
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.quantized: QuantizedLayer | None = None

    def forward(self, rows: Tensor, adapters: AdaptedRows | None = None) -> Tensor:
        return together((self,), rows, adapters)[0]


def together(layers: Sequence[Linear], rows: Tensor, adapters: AdaptedRows | None) -> tuple[Tensor, ...]:
    """The outputs of layers that see the same rows."""
    return products(rows, layers) if adapters is None else adapters.products(layers, rows)


class Norm(nn.Module):
    def __init__(self, width: int, config: ModelConfig, *, eps: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self._eps, self._offset = config.norm_eps if eps is None else eps, config.norm_offset

    def forward(self, rows: Tensor) -> Tensor:
        if kernels.serve(rows):
            from trainmaster.engine.kernels.norms import rms_norm

            return rms_norm(rows.flatten(0, -2), self.weight, self._eps, self._offset).view(rows.shape)
        if not self._offset:
            return functional.rms_norm(rows, self.weight.shape, self.weight, self._eps)
        # 1 plus a small weight keeps its digits in 32 bits only.
        wide = torch.promote_types(rows.dtype, torch.float32)
        weight = self._offset + self.weight.to(wide)
        return functional.rms_norm(rows.to(wide), self.weight.shape, weight, self._eps).to(rows.dtype)

    def of_sum(self, rows: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of `rows + added`, and that sum."""
        if added is not None and kernels.serve(rows):
            from trainmaster.engine.kernels.norms import add_rms_norm

            return add_rms_norm(rows, added, self.weight, self._eps, self._offset)
        total = rows if added is None else rows + added
        return self(total), total

"""Frozen weights of 8 bits, and products with them: `precision: fp8`.

Each row of a weight, and each row of what is multiplied with it, is divided by a scale of its own, so that its largest
number is the largest of e4m3, and rounded. Both passes of a training, and sampling, compute with the same weights, and
nothing else of them is kept: the gradient of the rows is `grad @ W`, where the scales of W's rows go to the columns of
the gradient before it is rounded.

A GPU multiplies by tensor cores for 8 bits, which want rows of both sides end to end, and so has each weight turned,
too. The CPU multiplies the same numbers in float32: slower than without quantization, and for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainmaster.engine import kernels
from trainmaster.engine.products import Layer, QuantizedLayer, back_product, product
from trainmaster.engine.types import EngineError

VALUES = torch.float8_e4m3fn
LARGEST = 448.0
"""Of e4m3."""
SMALLEST_ROW = 1e-30
"""Rows whose largest number is below become zeros: a scale has to have an inverse."""
CAPABILITY = (8, 9)
"""Of GPUs whose tensor cores multiply e4m3."""
ALIGNED = 16
"""Both widths of a weight are multiples of this."""


def check_fp8(device: torch.device, dtype: torch.dtype) -> None:
    """Raises EngineError where these products cannot be computed."""
    if device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        raise EngineError(
            f"fp8 needs a GPU of compute capability {_shown(CAPABILITY)} or higher, such as an L4, H100 or H200, and "
            f"the {torch.cuda.get_device_name(device)} has {_shown(found)}; use bfloat16 instead"
        )
    if dtype != torch.bfloat16:
        raise EngineError(f"with fp8, a GPU computes the rest of the model in bfloat16, and not in {dtype}")


def _shown(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedRows:
    values: Tensor
    """e4m3 [n, width]."""
    scales: Tensor
    """float32 [n]."""

    def dequantized(self) -> Tensor:
        return self.values.float() * self.scales[:, None]


def quantized_rows(parts: Sequence[Tensor], factors: Tensor | None = None) -> QuantizedRows:
    """Rows whose columns are those of all parts, each times its factor (float32 [width]), if there are any."""
    if kernels.serve(parts[0]):
        from trainmaster.engine.kernels.quantization import quantize_rows

        return QuantizedRows(*quantize_rows(parts, factors, largest=LARGEST, smallest_row=SMALLEST_ROW))
    wide = torch.cat([part.float() for part in parts], dim=1)
    if factors is not None:
        wide = wide * factors
    most = wide.abs().amax(dim=1).clamp(min=SMALLEST_ROW)
    return QuantizedRows((wide * (LARGEST / most)[:, None]).to(VALUES), most / LARGEST)


class QuantizedWeights:
    """The weights of layers that see the same rows, end to end."""

    def __init__(self, rows: QuantizedRows, widths: Sequence[int], turned: Tensor | None = None) -> None:
        """`turned`: the values with rows and columns exchanged, for a GPU."""
        self.values, self.scales = rows.values, rows.scales
        self.widths = tuple(widths)
        self._turned = self.values.t().contiguous() if turned is None and self.values.is_cuda else turned
        self._ones = None if self._turned is None else self.scales.new_ones(len(self._turned))
        """Scales of the turned values' rows: those of the columns are in what is multiplied with them."""

    def part(self, start: int, stop: int) -> QuantizedWeights:
        """Those of the layers from `start` to before `stop`."""
        if (start, stop) == (0, len(self.widths)):
            return self
        first = sum(self.widths[:start])
        own = slice(first, first + sum(self.widths[start:stop]))
        turned = None if self._turned is None else self._turned[:, own]
        return QuantizedWeights(QuantizedRows(self.values[own], self.scales[own]), self.widths[start:stop], turned)

    def product(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return _Product.apply(rows, self, bias)  # type: ignore[no-any-return,no-untyped-call]

    def computed(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return scaled_product(quantized_rows([rows]), self.values, self.scales, bias, rows.dtype)

    def back_product(self, grads: Sequence[Tensor]) -> Tensor:
        given = quantized_rows(grads, self.scales)
        if self._turned is None or self._ones is None:
            return (back_product(given.values.float(), self.values.float()) * given.scales[:, None]).to(grads[0].dtype)
        return scaled_product(given, self._turned.contiguous(), self._ones, None, grads[0].dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: QuantizedWeights, bias: Tensor | None) -> Tensor:
        ctx.weights = weights
        return weights.computed(rows, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.weights.back_product([grad]) if ctx.needs_input_grad[0] else None, None, None


def scaled_product(
    rows: QuantizedRows, values: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`rows @ (values * scales).T + bias`, for values [out, in] and scales [out]."""
    if values.is_cuda:
        return torch._scaled_mm(
            rows.values,
            values.t(),
            scale_a=rows.scales[:, None],
            scale_b=scales[None, :],
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=True,
        )
    outputs = product(rows.values.float(), values.float()) * rows.scales[:, None] * scales
    return (outputs if bias is None else outputs + bias).to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedPart:
    """The place of one layer's weight among those of the layers that see the same rows."""

    whole: QuantizedWeights
    index: int

    def joined(self, others: Sequence[QuantizedLayer | None]) -> QuantizedWeights | None:
        for place, other in enumerate(others, self.index + 1):
            if not isinstance(other, QuantizedPart) or other.whole is not self.whole or other.index != place:
                return None
        return self.whole.part(self.index, self.index + 1 + len(others))


class _Frozen(Layer, Protocol):
    quantized: QuantizedLayer | None


def quantize(layers: Sequence[_Frozen], device: torch.device) -> None:
    """Have layers that see the same rows compute on the device with weights of 8 bits, and forget what they had.

    Layers whose widths do not allow it stay as they are.
    """
    fitting = [layer for layer in layers if can_be_quantized(layer.weight)]
    if not fitting:
        return
    parts = [quantized_rows([layer.weight.detach().to(device)]) for layer in fitting]
    joined = QuantizedRows(torch.cat([each.values for each in parts]), torch.cat([each.scales for each in parts]))
    widths = [len(layer.weight) for layer in fitting]
    whole = QuantizedWeights(joined, widths)
    for index, (layer, values) in enumerate(zip(fitting, torch.split_with_sizes(whole.values, widths), strict=True)):
        layer.weight = nn.Parameter(values, requires_grad=False)
        layer.quantized = QuantizedPart(whole, index)


def can_be_quantized(weight: Tensor) -> bool:
    return not any(width % ALIGNED for width in weight.shape)

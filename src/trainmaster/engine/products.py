"""Matrix products of base and adapters, and gates, whose rows do not depend on the number of rows.

Clients train and sample together in one product, and each must get, to the last bit, the result it would get alone. The
CPU's library (MKL, as PyTorch ships it) computes an element by the same sums for any number of rows, with one
exception: a thread with fewer than four rows uses a kernel with other roundings. Threads share the rows in strips, so
which numbers of rows leave a thread with so few depends on the number of threads (with two: up to 11; with sixteen: up
to 27), but no multiple of four does. Rows are therefore padded to a multiple of 16, which leaves room for wider
kernels. If a layer's width is no multiple of four, roundings also depend on a row's position, and nothing is promised;
no family has such layers, and the vocabulary may have any size. GPUs choose kernels by shape: there, nothing is padded
and nothing promised.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainmaster.engine import kernels

ROWS = 16
"""Products on the CPU have a multiple of this many rows."""


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`rows @ weight.T + bias`, for rows [n, in] and weight [out, in]."""
    missing = _missing(rows)
    if not missing:
        return functional.linear(rows, weight, bias)
    return functional.linear(functional.pad(rows, (0, 0, 0, missing)), weight, bias)[: len(rows)]


class Quantized(Protocol):
    """Weights of fewer bits, of one layer or of several that see the same rows; `quantized` has them."""

    def product(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """The layers' outputs, side by side; autograd knows the gradient of the rows."""

    def back_product(self, grads: Sequence[Tensor]) -> Tensor:
        """The gradient of the rows, by those of each layer's outputs."""


class QuantizedLayer(Protocol):
    def joined(self, others: Sequence[QuantizedLayer | None]) -> Quantized | None:
        """The weights of this layer and of others, if these follow it."""


class Layer(Protocol):
    """A product that adapters may adapt, by its name for them."""

    target: str
    weight: nn.Parameter
    """Of 8 bits, and not to be computed with, if the layer is quantized."""
    bias: nn.Parameter | None

    @property
    def quantized(self) -> QuantizedLayer | None: ...


def products(rows: Tensor, layers: Sequence[Layer]) -> tuple[Tensor, ...]:
    """The outputs of layers that see the same rows; by one product, if their weights lie together."""
    if _together([layer.weight for layer in layers]) is None:
        return tuple(base_products(rows, layers))
    return torch.split_with_sizes(joint_product(rows, layers), widths_of(layers), dim=1)


def joint_product(rows: Tensor, layers: Sequence[Layer]) -> Tensor:
    """The outputs of layers that see the same rows, side by side: [n, the sum of their widths]."""
    if (quantized := quantized_together(layers)) is not None:
        return quantized.product(rows, _biases(layers))
    if (weight := _together([layer.weight for layer in layers])) is None:
        return torch.cat(base_products(rows, layers), dim=1)
    return product(rows, weight, _biases(layers))


def base_products(rows: Tensor, layers: Sequence[Layer]) -> list[Tensor]:
    """The outputs of layers that see the same rows, each by a product of its own unless they are quantized together."""
    outputs: list[Tensor] = []
    for quantized, run in _runs(layers):
        if quantized is None:
            outputs += [product(rows, layer.weight, layer.bias) for layer in run]
        else:
            joint = quantized.product(rows, _biases(run))
            outputs += torch.split_with_sizes(joint, widths_of(run), dim=1)
    return outputs


def add_base_products(outputs: Sequence[Tensor], rows: Tensor, layers: Sequence[Layer]) -> None:
    """Add the products of rows and weights to the outputs of layers, none of which is quantized."""
    joint, weight = _side_by_side(outputs), _together([layer.weight for layer in layers])
    if joint is not None and weight is not None:
        joint.addmm_(rows, weight.t())
        return
    for output, layer in zip(outputs, layers, strict=True):
        output.addmm_(rows, layer.weight.t())


def base_back_product(grads: Sequence[Tensor], layers: Sequence[Layer], onto: Tensor | None = None) -> Tensor:
    """The gradient of the rows that layers see, by those of each layer's outputs; added to `onto`, if there is one."""
    total, left = onto, iter(grads)
    for quantized, run in _runs(layers):
        own = [next(left) for _ in run]
        if quantized is not None:
            part = quantized.back_product(own)
            total = part if total is None else total.add_(part)
    plain = [(grad, layer.weight) for grad, layer in zip(grads, layers, strict=True) if layer.quantized is None]
    if plain:
        joint, weight = _side_by_side([grad for grad, _ in plain]), _together([weight for _, weight in plain])
        for grad, own_weight in plain if joint is None or weight is None else [(joint, weight)]:
            total = back_product(grad, own_weight) if total is None else total.addmm_(grad, own_weight)
    assert total is not None
    return total


def widths_of(layers: Sequence[Layer]) -> list[int]:
    return [layer.weight.shape[0] for layer in layers]  # `len` of a tensor takes ten times as long


def quantized_together(layers: Sequence[Layer]) -> Quantized | None:
    """The quantized weights of layers, if these lie end to end."""
    first, *others = (layer.quantized for layer in layers)
    return None if first is None else first.joined(others)


def _runs(layers: Sequence[Layer]) -> Iterator[tuple[Quantized | None, Sequence[Layer]]]:
    """As many layers at a time as are quantized together; the others one by one."""
    start = 0
    while start < len(layers):
        quantized, end = None, start + 1
        for longest in range(len(layers), start, -1):
            if (found := quantized_together(layers[start:longest])) is not None:
                quantized, end = found, longest
                break
        yield quantized, layers[start:end]
        start = end


def _biases(layers: Sequence[Layer]) -> Tensor | None:
    """The biases of layers side by side, zeros for those that have none; None: none of them has any."""
    biases = [layer.bias for layer in layers if layer.bias is not None]
    if not biases:
        return None
    if len(biases) < len(layers):
        zeros = biases[0].new_zeros
        return torch.cat([zeros(len(layer.weight)) if layer.bias is None else layer.bias for layer in layers])
    together = biases[0] if len(biases) == 1 else _together(biases)
    return torch.cat([*biases]) if together is None else together


def lay_together(tensors: Sequence[nn.Parameter]) -> None:
    """Move parameters that are not trained to consecutive addresses."""
    if tensors and not any(each.requires_grad for each in tensors):
        for parameter, part in zip(
            tensors, torch.split_with_sizes(torch.cat([*tensors]), [len(each) for each in tensors]), strict=True
        ):
            parameter.data = part


def _together(tensors: Sequence[Tensor]) -> Tensor | None:
    """All of them as one tensor, if they are not trained, and lie at consecutive addresses."""
    first, end = tensors[0], tensors[0].storage_offset()
    for each in tensors:
        consecutive = each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not consecutive or each.storage_offset() != end or each.requires_grad:
            return None
        end += each.numel()
    rows = sum(each.shape[0] for each in tensors)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """All of them as one tensor, if each begins where the columns of the one before end."""
    first, end = tensors[0], tensors[0].storage_offset()
    for each in tensors:
        alike = each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not alike or each.stride() != first.stride() or each.storage_offset() != end:
            return None
        end += each.shape[1]
    width = end - first.storage_offset()
    if first.stride(1) != 1 or first.stride(0) < width:
        return None
    return first.as_strided((len(first), width), first.stride())


def back_product(rows: Tensor, weight: Tensor) -> Tensor:
    """`rows @ weight`, for rows [n, out] and weight [out, in]."""
    missing = _missing(rows)
    if not missing:
        return rows @ weight
    return (functional.pad(rows, (0, 0, 0, missing)) @ weight)[: len(rows)]


def wide_product(rows: Tensor, weight: Tensor) -> Tensor:
    """`rows @ weight.T` in at least float32: 16 bits would round logits of 30 to eighths."""
    if rows.dtype in (torch.bfloat16, torch.float16) and rows.is_cuda:
        return torch.mm(rows, weight.t(), out_dtype=torch.float32)
    return product(rows, weight).to(torch.promote_types(rows.dtype, torch.float32))


def _missing(rows: Tensor) -> int:
    return -len(rows) % ROWS if rows.device.type == "cpu" else 0


# An adapted layer computes `x W' + scale * (x A') B'`. The product with W is one for all rows of a pack, whoever they
# belong to; those with A and B are each adapter's own, on its own rows. A pack's other rows take no part in them, so an
# adapter's gradients are what they would be alone. `add_shares` and `share_gradients` make all small products of a
# layer, and nothing else does. A GPU takes all adapters, and layers that see the same rows, at once: `FactorRows`.


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """A [rank, in] and B [out, rank] of one layer, or of each of its experts."""

    a: nn.Parameter
    b: nn.Parameter


@dataclass(frozen=True, slots=True, eq=False)
class AdapterShare:
    start: int
    stop: int
    scale: float
    factors: Factors
    a: Tensor
    """A in the type that the layer computes in."""
    b: Tensor


def adapted_product(rows: Tensor, weight: Tensor, bias: Tensor | None, shares: Sequence[AdapterShare]) -> Tensor:
    """`rows @ weight.T + bias`, one product for all rows, plus each adapter's part on its own rows."""
    if not shares:
        return product(rows, weight, bias)
    return _AdaptedProduct.apply(rows, weight, bias, shares, *factors_of(shares))  # type: ignore[no-any-return,no-untyped-call]


def adapted_outputs(outputs: Tensor, rows: Tensor, shares: Sequence[AdapterShare]) -> Tensor:
    """The outputs of a layer for the rows, plus each adapter's part on its own rows."""
    if not shares:
        return outputs
    return _AdaptedOutputs.apply(outputs, rows, shares, *factors_of(shares))  # type: ignore[no-any-return,no-untyped-call]


def factors_of(shares: Sequence[AdapterShare]) -> list[nn.Parameter]:
    """A and B of each share, in the order of `share_gradients`."""
    return [each for share in shares for each in (share.factors.a, share.factors.b)]


def add_shares(outputs: Tensor, rows: Tensor, shares: Sequence[AdapterShare]) -> list[Tensor]:
    """Add the adapters' part to the outputs of a layer, [n, out]; returns `scale * rows @ A.T` of each share."""
    lowered = []
    second_product = product if outputs.dtype == rows.dtype else wide_product
    for share in shares:
        own = slice(share.start, share.stop)
        lowered.append(share.scale * product(rows[own], share.a))
        outputs[own] += second_product(lowered[-1], share.b)
    return lowered


def share_gradients(
    grad: Tensor, rows: Tensor, lowered: Sequence[Tensor], shares: Sequence[AdapterShare], grad_rows: Tensor | None
) -> list[Tensor]:
    """The gradients of A and B of each share, by those of the outputs; those of the rows are added to `grad_rows`."""
    grads = []
    for share, own_lowered in zip(shares, lowered, strict=True):
        own = slice(share.start, share.stop)
        grad_lowered = share.scale * back_product(grad[own], share.b)
        if grad_rows is not None:
            grad_rows[own] += back_product(grad_lowered, share.a)
        grads += [grad_lowered.t() @ rows[own], grad[own].t() @ own_lowered]
    return grads


class _AdaptedProduct(torch.autograd.Function):
    """One layer with all adapters: autograd's slices would make a gradient as large as the pack for each adapter."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, shares: Sequence[AdapterShare], *_factors: Tensor
    ) -> Tensor:
        outputs = product(rows, weight, bias)
        lowered = add_shares(outputs, rows, shares)
        ctx.shares = shares
        ctx.save_for_backward(rows, weight, *lowered)
        return outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, weight, *lowered = ctx.saved_tensors
        wants_rows, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        grad_rows = back_product(grad, weight) if wants_rows else None
        grad_factors = share_gradients(grad, rows, lowered, ctx.shares, grad_rows)
        grad_weight = grad.t() @ rows if wants_weight else None
        return grad_rows, grad_weight, grad.sum(0) if wants_bias else None, None, *grad_factors


class _AdaptedOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, rows: Tensor, shares: Sequence[AdapterShare], *_factors: Tensor) -> Tensor:
        adapted = outputs.clone()
        lowered = add_shares(adapted, rows, shares)
        ctx.shares = shares
        ctx.save_for_backward(rows, *lowered)
        return adapted

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, *lowered = ctx.saved_tensors
        grad_rows = torch.zeros_like(rows) if ctx.needs_input_grad[1] else None
        return grad, grad_rows, None, *share_gradients(grad, rows, lowered, ctx.shares, grad_rows)


# PyTorch's silu and gelu compute most elements of a tensor eight or sixteen at a time, and the last ones
# one by one, by another formula with other roundings; so at the end of each thread's part. exp and tanh do not:
# on the CPU the gates are written with them, and with operations that IEEE rounds in one way only.

_GELU_SCALE = math.sqrt(2 / math.pi)
_GELU_CUBE = 0.044715


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`activation(gate) * up`, for `silu` or `gelu_tanh`."""
    if kernels.serve(gate):
        from trainmaster.engine.kernels import gates

        return gates.gated(gate, up, activation)
    if gate.device.type == "cpu":
        return _Gated.apply(gate, up, activation)  # type: ignore[no-any-return,no-untyped-call]
    active = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    return active * up


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        if activation == "silu":
            return _sigmoid(gate).mul_(gate).mul_(up)
        return _tanh(gate).add_(1).mul_(gate * 0.5).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        gate, up = ctx.saved_tensors
        if ctx.activation == "silu":
            sigmoid = _sigmoid(gate)
            active = sigmoid * gate
            slope = (sigmoid - active * sigmoid).add_(active)
        else:
            tanh = _tanh(gate)
            half = (tanh + 1).mul_(0.5)
            active = half * gate
            bent = (1 - tanh * tanh).mul_(gate * 0.5)
            slope = (gate * gate).mul_(3 * _GELU_CUBE).add_(1).mul_(_GELU_SCALE).mul_(bent).add_(half)
        return slope.mul_(up).mul_(grad), active.mul_(grad), None


def sigmoid(gate: Tensor) -> Tensor:
    if gate.device.type == "cpu":
        return _Sigmoid.apply(gate)  # type: ignore[no-any-return,no-untyped-call]
    return torch.sigmoid(gate)


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor) -> Tensor:
        opened = _sigmoid(gate)
        ctx.save_for_backward(opened)
        return opened

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor]:
        (opened,) = ctx.saved_tensors
        return (grad * (opened - opened * opened),)


def _sigmoid(gate: Tensor) -> Tensor:
    return torch.neg(gate).exp_().add_(1).reciprocal_()


def _tanh(gate: Tensor) -> Tensor:
    return (gate * gate).mul_(_GELU_CUBE).add_(1).mul_(gate).mul_(_GELU_SCALE).tanh_()

"""Gated activations, `activation(gate) * up`; the backward pass computes the activation again."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Of [n, width], for `silu` or `gelu_tanh`."""
    if torch.is_grad_enabled():
        return _Gated.apply(gate, up, activation)  # type: ignore[no-any-return]
    return _forward(gate, up, activation)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _forward(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = gate_gradients(grad, gate, up, ctx.activation)
        return grad_gate, grad_up, None


def gate_gradients(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Side by side in one tensor, so that one product can take both."""
    grad, gate, up = _laid(grad), _laid(gate), _laid(up)
    count, width = gate.shape
    grad_gate, grad_up = torch.empty((count, 2 * width), dtype=gate.dtype, device=gate.device).split(width, dim=1)
    if count:
        _gate_backward[(count, triton.cdiv(width, _BLOCK))](
            grad,
            gate,
            up,
            grad_gate,
            grad_up,
            grad.stride(0),
            gate.stride(0),
            up.stride(0),
            width,
            GELU=_is_gelu(activation),
            BLOCK=_BLOCK,
        )
    return grad_gate, grad_up


def _forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    gate, up = _laid(gate), _laid(up)
    count, width = gate.shape
    result = torch.empty((count, width), dtype=gate.dtype, device=gate.device)
    if count:
        _gate_forward[(count, triton.cdiv(width, _BLOCK))](
            gate, up, result, gate.stride(0), up.stride(0), width, GELU=_is_gelu(activation), BLOCK=_BLOCK
        )
    return result


def _is_gelu(activation: str) -> bool:
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"there is no kernel for the activation {activation!r}")
    return activation == "gelu_tanh"


def _laid(rows: Tensor) -> Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()


@triton.jit
def _sigmoid(values):
    return 1.0 / (1.0 + tl.exp(-values))


@triton.jit
def _gelu_angle(values):
    """Twice what tanh is taken of: tanh(x) = 2 sigmoid(2 x) - 1."""
    return 2.0 * 0.7978845608028654 * (values + 0.044715 * values * values * values)


@triton.jit
def _gate_forward(gate, up, result, gate_stride, up_stride, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    given = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    angle = given
    if GELU:
        angle = _gelu_angle(given)
    active = given * _sigmoid(angle)
    tl.store(result + row * width + columns, (active * other).to(result.dtype.element_ty), mask=inside)


@triton.jit
def _gate_backward(
    grad,
    gate,
    up,
    grad_gate,
    grad_up,
    grad_stride,
    gate_stride,
    up_stride,
    width,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    own = tl.load(grad + row * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        share = _sigmoid(_gelu_angle(given))
        turn = 2.0 * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * given * given)
    else:
        share = _sigmoid(given)
        turn = 1.0
    slope = share + given * share * (1.0 - share) * turn
    tl.store(grad_gate + row * 2 * width + columns, (own * other * slope).to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + row * 2 * width + columns, (own * given * share).to(grad_up.dtype.element_ty), mask=inside)

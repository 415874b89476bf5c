"""The gate of an MLP, computed so that a row does not depend on how many rows there are.

PyTorch's own silu and gelu compute most elements of a tensor eight or sixteen at a time and what is left over at its
end one by one, by another formula with other roundings; threads end where they end. Its exp and tanh do not: on the CPU
the gates are written with them, and with what IEEE rounds in one way only.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_GELU_SCALE = math.sqrt(2 / math.pi)
_GELU_CUBE = 0.044715


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`activation(gate) * up`, for `silu` or `gelu_tanh`."""
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


def _sigmoid(gate: Tensor) -> Tensor:
    return torch.neg(gate).exp_().add_(1).reciprocal_()


def _tanh(gate: Tensor) -> Tensor:
    """What gelu's approximation bends by."""
    return (gate * gate).mul_(_GELU_CUBE).add_(1).mul_(gate).mul_(_GELU_SCALE).tanh_()

"""Products of layers that adapters adapt: one with the base's weight for all rows, and small ones with their factors.

An adapted layer computes `x W' + scale * (x A') B'`. The product with W is one for all rows of a pack, whoever they
belong to; those with A and B are each adapter's own, on its own rows. A pack's other rows take no part in them, so an
adapter's gradients are what they would be alone.

`add_shares` and `share_gradients` make all small products of a layer, and nothing else does: kernels that take many
adapters at once would take their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainmaster.engine.products import back_product, product, wide_product


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """A [rank, in] and B [out, rank] beside one layer."""

    a: nn.Parameter
    b: nn.Parameter


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """Consecutive rows of one adapter, and its factors for one layer."""

    start: int
    stop: int
    scale: float
    factors: Factors
    a: Tensor
    """A in the type that is computed in."""
    b: Tensor


def adapted_product(rows: Tensor, weight: Tensor, bias: Tensor | None, shares: Sequence[Share]) -> Tensor:
    """`rows @ weight.T + bias`, one product for all rows, and on their own rows what the adapters add."""
    if not shares:
        return product(rows, weight, bias)
    return _AdaptedProduct.apply(rows, weight, bias, shares, *factors_of(shares))  # type: ignore[no-any-return,no-untyped-call]


def factors_of(shares: Sequence[Share]) -> list[nn.Parameter]:
    """A and B of each share, in the order in which `share_gradients` gives their gradients."""
    return [each for share in shares for each in (share.factors.a, share.factors.b)]


def add_shares(outputs: Tensor, rows: Tensor, shares: Sequence[Share]) -> list[Tensor]:
    """Add to the outputs of a layer what adapters make of its rows.

    Args:
        outputs: [n, out], of the type of the rows, or wider.
        rows: [n, in].
        shares: Which of them are whose.

    Returns:
        For each share its rows as A and the scale made them, [rows, rank], of which the gradients are made.
    """
    lowered = []
    second_product = product if outputs.dtype == rows.dtype else wide_product
    for share in shares:
        own = slice(share.start, share.stop)
        lowered.append(share.scale * product(rows[own], share.a))
        outputs[own] += second_product(lowered[-1], share.b)
    return lowered


def share_gradients(
    grad: Tensor, rows: Tensor, lowered: Sequence[Tensor], shares: Sequence[Share], grad_rows: Tensor | None
) -> list[Tensor]:
    """The gradients of all factors, A's and B's of each share; those of the rows are added to `grad_rows`.

    Args:
        grad: Of the outputs, [n, out].
        rows: As `add_shares` was given them.
        lowered: What it returned.
        shares: Which rows are whose.
        grad_rows: [n, in]; None: nobody wants them.
    """
    grads = []
    for share, own_lowered in zip(shares, lowered, strict=True):
        own = slice(share.start, share.stop)
        grad_lowered = share.scale * back_product(grad[own], share.b)
        if grad_rows is not None:
            grad_rows[own] += back_product(grad_lowered, share.a)
        grads += [grad_lowered.t() @ rows[own], grad[own].t() @ own_lowered]
    return grads


class _AdaptedProduct(torch.autograd.Function):
    """One layer with all adapters' part in it.

    Slices and their products left to autograd would make a gradient as large as the whole pack for each adapter.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, shares: Sequence[Share], *_factors: Tensor
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

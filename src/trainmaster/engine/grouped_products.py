"""Matrix products of rows with the weight of each row's group, such as its expert, and of the groups' adapters.

Rows are sorted by group. On a GPU in 16 bits, one kernel computes all groups; otherwise they are computed one by one,
as `products` does it: on the CPU a row's result does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainmaster.engine.products import AdapterShare, back_product, factors_of, product

_ALIGNED = 8
"""Widths that the kernel takes are multiples of this many 16-bit numbers."""


@dataclass(eq=False)
class Groups:
    """Rows sorted by their group."""

    owners: Tensor
    """The group of each row, ascending: int64 [rows]."""
    count: int

    @cached_property
    def ends(self) -> Tensor:
        """One past the last row of each group: int32 [count]."""
        groups = torch.arange(self.count, device=self.owners.device)
        return torch.searchsorted(self.owners, groups, right=True, out_int32=True)

    @cached_property
    def parts(self) -> list[tuple[int, slice]]:
        """The groups that have rows, and which."""
        bounds = [0, *self.ends.tolist()]
        return [(group, slice(*bounds[group : group + 2])) for group in range(self.count) if _differ(bounds, group)]


def _differ(bounds: Sequence[int], group: int) -> bool:
    return bounds[group] < bounds[group + 1]


@dataclass(eq=False)
class Choices:
    """The groups that each token chose: [tokens, choices], spread over rows that are sorted by group."""

    chosen: Tensor
    count: int
    _shared: dict[tuple[tuple[int, int], ...], tuple[Tensor, Groups]] = field(default_factory=dict, init=False)

    @cached_property
    def order(self) -> Tensor:
        """The choice, counted over all tokens, that is computed in each row."""
        return torch.argsort(self.chosen.flatten(), stable=True)

    @cached_property
    def groups(self) -> Groups:
        return Groups(self.chosen.flatten()[self.order], self.count)

    def spread(self, tokens: Tensor) -> Tensor:
        """Each token's row [tokens, width] once for each of its choices."""
        return _Spread.apply(tokens, self)  # type: ignore[no-any-return,no-untyped-call]

    def gathered(self, rows: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each token's rows, in the order of its choices; `weights` [tokens, choices]."""
        placed = rows[torch.argsort(self.order)].view(*self.chosen.shape, -1)
        parts = [placed[:, choice] * weights[:, choice, None] for choice in range(self.chosen.shape[1])]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def of_tokens(self, ranges: tuple[tuple[int, int], ...]) -> tuple[Tensor, Groups]:
        """The rows that belong to some ranges of tokens, and their groups; each range has groups of its own."""
        if ranges not in self._shared:
            tokens = self.order // self.chosen.shape[1]
            parts = [((tokens >= start) & (tokens < stop)).nonzero().squeeze(1) for start, stop in ranges]
            owners = [self.groups.owners[rows] + place * self.count for place, rows in enumerate(parts)]
            self._shared[ranges] = torch.cat(parts), Groups(torch.cat(owners), len(ranges) * self.count)
        return self._shared[ranges]


class _Spread(torch.autograd.Function):
    """Indexing, whose gradient is summed in the order of the choices: autograd's order is not told."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, choices: Choices) -> Tensor:
        ctx.choices = choices
        return tokens[choices.order // choices.chosen.shape[1]]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        choices: Choices = ctx.choices
        placed = grad[torch.argsort(choices.order)].view(*choices.chosen.shape, -1)
        total = placed[:, 0].clone()
        for choice in range(1, placed.shape[1]):
            total += placed[:, choice]
        return total, None


@dataclass(frozen=True, slots=True, eq=False)
class GroupedShare:
    """An adapter's part in some columns of the outputs; its factors have one matrix for each group."""

    share: AdapterShare
    columns: slice


@dataclass(frozen=True, slots=True, eq=False)
class _Alike:
    """Shares in the same columns, of one rank and scale, which are computed together."""

    places: list[int]
    """Among all shares."""
    shares: list[AdapterShare]
    columns: slice

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        return tuple((share.start, share.stop) for share in self.shares)

    @property
    def scale(self) -> float:
        return self.shares[0].scale

    @property
    def rank(self) -> int:
        return self.shares[0].a.shape[1]

    @property
    def padding(self) -> int:
        """What the rank lacks to be one that the kernel takes."""
        return -self.rank % _ALIGNED if _has_kernel(self.shares[0].a) else 0

    @property
    def a(self) -> Tensor:
        return functional.pad(_joined([share.a for share in self.shares]), (0, 0, 0, self.padding))

    @property
    def b(self) -> Tensor:
        return functional.pad(_joined([share.b for share in self.shares]), (0, self.padding))

    def parted(self, grad_a: Tensor, grad_b: Tensor, count: int) -> dict[int, tuple[Tensor, Tensor]]:
        """The gradients of each share's factors, by its place."""
        parts = (torch.split(each, count) for each in (grad_a[:, : self.rank], grad_b[..., : self.rank]))
        return dict(zip(self.places, zip(*parts, strict=True), strict=True))


def _joined(factors: Sequence[Tensor]) -> Tensor:
    return factors[0] if len(factors) == 1 else torch.cat(list(factors))


def _alike(shares: Sequence[GroupedShare]) -> list[_Alike]:
    found: dict[tuple[object, ...], _Alike] = {}
    for place, each in enumerate(shares):
        share, columns = each.share, each.columns
        key = (columns.start, columns.stop, columns.step, share.scale, share.a.shape)
        alike = found.setdefault(key, _Alike([], [], columns))
        alike.places.append(place)
        alike.shares.append(share)
    return list(found.values())


def adapted_grouped_product(
    rows: Tensor, weight: Tensor, bias: Tensor | None, choices: Choices, shares: Sequence[GroupedShare]
) -> Tensor:
    """`rows @ weight[group].T + bias[group]`, and each adapter's part on its own rows; `weight` is [count, out, in]."""
    factors = factors_of([each.share for each in shares])
    outputs: Tensor = _AdaptedGroupedProduct.apply(rows, weight, choices, shares, *factors)  # type: ignore[no-untyped-call]
    return outputs if bias is None else outputs + bias[choices.groups.owners]


class _AdaptedGroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, choices: Choices, shares: Sequence[GroupedShare], *_factors: Tensor
    ) -> Tensor:
        outputs = _products(rows, weight, choices.groups)
        lowered = []
        alike = _alike(shares)
        for each in alike:
            own, groups = choices.of_tokens(each.ranges)
            lowered.append(each.scale * _products(rows[own], each.a, groups))
            outputs[:, each.columns].index_add_(0, own, _products(lowered[-1], each.b, groups))
        ctx.choices, ctx.alike = choices, alike
        ctx.save_for_backward(rows, weight, *lowered)
        return outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, weight, *lowered = ctx.saved_tensors
        choices: Choices = ctx.choices
        wants_rows, wants_weight, *_ = ctx.needs_input_grad
        grad_rows = _back_products(grad, weight, choices.groups) if wants_rows else None
        grads: dict[int, tuple[Tensor, Tensor]] = {}
        for each, own_lowered in zip(ctx.alike, lowered, strict=True):
            own, groups = choices.of_tokens(each.ranges)
            own_grad = grad[own, each.columns]
            grad_lowered = each.scale * _back_products(own_grad, each.b, groups)
            if grad_rows is not None:
                grad_rows.index_add_(0, own, _back_products(grad_lowered, each.a, groups))
            grad_a = _outer_products(grad_lowered, rows[own], groups)
            grad_b = _outer_products(own_grad, own_lowered, groups)
            grads |= each.parted(grad_a, grad_b, choices.count)
        grad_weight = _outer_products(grad, rows, choices.groups) if wants_weight else None
        return grad_rows, grad_weight, None, None, *(factor for place in sorted(grads) for factor in grads[place])


def _products(rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """`rows @ weight[group].T`"""
    if _one_kernel(rows, weight.shape[1], weight.shape[2]):
        return functional.grouped_mm(rows, weight.transpose(1, 2), offs=groups.ends)
    outputs = rows.new_empty(len(rows), weight.shape[1])
    for group, part in groups.parts:
        outputs[part] = product(rows[part], weight[group])
    return outputs


def _back_products(rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """`rows @ weight[group]`"""
    if _one_kernel(rows, weight.shape[1], weight.shape[2]):
        return functional.grouped_mm(rows.contiguous(), weight, offs=groups.ends)
    outputs = rows.new_empty(len(rows), weight.shape[2])
    for group, part in groups.parts:
        outputs[part] = back_product(rows[part], weight[group])
    return outputs


def _outer_products(left: Tensor, right: Tensor, groups: Groups) -> Tensor:
    """`left.T @ right` of the rows of each group: [count, left width, right width]."""
    if _one_kernel(left, left.shape[1], right.shape[1]):
        return functional.grouped_mm(left.contiguous().t(), right, offs=groups.ends)
    outputs = left.new_zeros(groups.count, left.shape[1], right.shape[1])
    for group, part in groups.parts:
        outputs[group] = left[part].t() @ right[part]
    return outputs


def _one_kernel(rows: Tensor, *widths: int) -> bool:
    return _has_kernel(rows) and not any(width % _ALIGNED for width in widths)


def _has_kernel(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype == torch.bfloat16

"""The products of a pack's rows on a GPU, with the adapters' parts: few kernels for any number of adapters.

Layers that see the same rows are computed together: one product with all their A. The gradients of all factors come
into one tensor, which is handed out at the end of the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainmaster.engine.factor_stacks import FactorStack
from trainmaster.engine.products import (
    Layer,
    add_base_products,
    base_back_product,
    base_products,
    widths_of,
)


class FactorRows:
    """Which rows of a pack are whose, and the gradients of a backward pass over them."""

    def __init__(self, stack: FactorStack, bounds: Sequence[tuple[int, int]], rows: int) -> None:
        from trainmaster.engine.kernels.groups import Groups

        self.stack = stack
        self.bounds = bounds
        device = stack.values.device
        self._groups = None if len(bounds) == 1 and bounds[0] == (0, rows) else Groups.of(bounds, device)
        """None: all rows are of one adapter."""
        self._covers = sum(end - start for start, end in bounds) == rows
        """Whether each row has an adapter."""
        self._gradients: Tensor | None = None
        self._targets: set[str] = set()
        """The layers whose gradients were noted."""
        self._ends = False
        self.anchor = torch.empty(0, device=device, requires_grad=True) if stack.trained else None
        """What autograd takes for the factors, so that it computes the layers that nothing else trains."""

    def products(self, rows: Tensor, layers: Sequence[Layer]) -> tuple[Tensor, ...]:
        """The layers' outputs for the rows, each with its adapter's part."""
        if self.stack.a([layer.target for layer in layers]) is None:
            if len(layers) > 1:
                return tuple(output for layer in layers for output in self.products(rows, [layer]))
            return tuple(base_products(rows, layers))
        if not torch.is_grad_enabled():
            return tuple(self.computed(rows, layers)[0])
        tensors = [each for layer in layers for each in (layer.weight, layer.bias)]
        return _Products.apply(rows, self.anchor, self, layers, *tensors)  # type: ignore[no-any-return,no-untyped-call]

    def computed(self, rows: Tensor, layers: Sequence[Layer]) -> tuple[Sequence[Tensor], Tensor]:
        """The outputs, and the rows times A of all layers, [n, layers x rank]."""
        lowered = self._lowered(rows, [layer.target for layer in layers])
        own_lowered = torch.split(lowered, self.stack.rank, dim=1)
        outputs: Sequence[Tensor]
        if self._adapters_first(layers):
            outputs = _room_for_outputs(rows, layers)
            for output, own, layer in zip(outputs, own_lowered, layers, strict=True):
                self._raise(own, layer, onto=output)
            add_base_products(outputs, rows, layers)
        else:
            outputs = base_products(rows, layers)
            for output, own, layer in zip(outputs, own_lowered, layers, strict=True):
                self._add_raised(output, own, layer.target)
        return outputs, lowered

    def pull(
        self, grads: Sequence[Tensor], rows: Tensor, lowered: Tensor, layers: Sequence[Layer], *, wants_rows: bool
    ) -> Tensor | None:
        """Note the gradients of the layers' factors; that of the rows, if wanted."""
        stack, rank = self.stack, self.stack.rank
        targets = [layer.target for layer in layers]
        gradients = self.noted(targets)
        a, grad_a = stack.a(targets), stack.a(targets, gradients)
        assert a is not None
        assert grad_a is not None
        grad_lowered = torch.empty_like(lowered)
        halves = (torch.split(each, rank, dim=1) for each in (lowered, grad_lowered))
        parts = zip(grads, targets, *halves, strict=True)
        for grad, target, own, onto in parts:
            b, grad_b = stack.b(target), stack.b(target, gradients)
            if self._groups is None:
                torch.mm(grad, b[0], out=onto)
                _narrow_product(grad.t(), own, grad_b[0])
            else:
                from trainmaster.engine.kernels.groups import add_group_outer, group_product

                group_product(grad, b, self._groups, out=onto, transposed=True)
                add_group_outer(grad, own, self._groups, out=grad_b)
        if self._groups is None:
            _narrow_product(grad_lowered.t(), rows, grad_a[0])
        else:
            from trainmaster.engine.kernels.groups import add_group_outer

            add_group_outer(grad_lowered, rows, self._groups, out=grad_a)
        if not wants_rows:
            return None
        if not self._adapters_first(layers):
            grad_rows = base_back_product(grads, layers)
            self._lower_back(grad_lowered, a, onto=grad_rows, add=True)
            return grad_rows
        grad_rows = torch.empty_like(rows)
        self._lower_back(grad_lowered, a, onto=grad_rows, add=False)
        return base_back_product(grads, layers, onto=grad_rows)

    def _adapters_first(self, layers: Sequence[Layer]) -> bool:
        """Whether the adapters' part is written, and the large product, which has the time for it, adds to that.

        Otherwise outputs that are there are read and written again. Products of quantized weights cannot add, and rows
        of no adapter would have to be cleared.
        """
        return self._covers and all(layer.quantized is None for layer in layers)

    def hand_out_at_end(self) -> None:
        """Have autograd call `hand_out_gradients` when it ends."""
        if not self._ends:
            self._ends = True
            torch.autograd.Variable._execution_engine.queue_callback(self.hand_out_gradients)

    def hand_out_gradients(self) -> None:
        """Give the factors the gradients that were noted for them."""
        self._ends = False
        if self._gradients is not None:
            self.stack.hand_out(self._gradients, self._targets)
            self._gradients, self._targets = None, set()

    def noted(self, targets: Sequence[str]) -> Tensor:
        """Where the gradients of these layers' factors are to be written, laid out as the stack."""
        self._targets.update(targets)
        if self._gradients is None:
            self._gradients = torch.zeros_like(self.stack.values, dtype=torch.float32)
        return self._gradients

    def _lowered(self, rows: Tensor, targets: Sequence[str]) -> Tensor:
        a = self.stack.a(targets)
        assert a is not None
        if self._groups is None:
            return rows @ a[0].t()
        from trainmaster.engine.kernels.groups import group_product

        return group_product(rows, a, self._groups, out=rows.new_empty(len(rows), a.shape[1]))

    def _raise(self, lowered: Tensor, layer: Layer, onto: Tensor) -> None:
        """Write the adapters' part, and the bias; each row has an adapter."""
        b = self.stack.b(layer.target)
        bias = layer.bias
        if self._groups is not None:
            from trainmaster.engine.kernels.groups import group_product

            if bias is not None:
                onto.copy_(bias.expand_as(onto))
            group_product(lowered, b, self._groups, out=onto, add=bias is not None)
        elif bias is not None:
            torch.addmm(bias, lowered, b[0].t(), out=onto)
        else:
            torch.mm(lowered, b[0].t(), out=onto)

    def _add_raised(self, outputs: Tensor, lowered: Tensor, target: str) -> None:
        b = self.stack.b(target)
        if self._groups is None:
            outputs.addmm_(lowered, b[0].t())
            return
        from trainmaster.engine.kernels.groups import group_product

        group_product(lowered, b, self._groups, out=outputs, add=True)

    def _lower_back(self, grad_lowered: Tensor, a: Tensor, *, onto: Tensor, add: bool) -> None:
        """Write the gradient of the rows by the adapters' part, or add it."""
        if self._groups is not None:
            from trainmaster.engine.kernels.groups import group_product

            group_product(grad_lowered, a, self._groups, out=onto, add=add, transposed=True)
        elif add:
            onto.addmm_(grad_lowered, a[0])
        else:
            torch.mm(grad_lowered, a[0], out=onto)


def _room_for_outputs(rows: Tensor, layers: Sequence[Layer]) -> Sequence[Tensor]:
    """Gate and up side by side, so that one product makes both; values would keep the memory of queries and keys."""
    widths = widths_of(layers)
    if len(widths) != 2 or len(set(widths)) > 1:
        return [rows.new_empty(len(rows), width) for width in widths]
    return torch.split_with_sizes(rows.new_empty(len(rows), sum(widths)), widths, dim=1)


def _narrow_product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """`left @ right` into `out`, float32, which nothing else writes."""
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    else:
        torch.mm(left, right, out_dtype=out.dtype, out=out)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        _anchor: Tensor | None,
        of: FactorRows,
        layers: Sequence[Layer],
        *_tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        outputs, lowered = of.computed(rows, layers)
        ctx.of, ctx.layers = of, layers
        ctx.save_for_backward(rows, lowered)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        rows, lowered = ctx.saved_tensors
        wants_rows, wants_factors, _, _, *wanted = ctx.needs_input_grad
        of_tensors: list[Tensor | None] = []
        for place, grad in enumerate(grads):
            of_tensors.append(grad.t() @ rows if wanted[2 * place] else None)
            of_tensors.append(grad.sum(0) if wanted[2 * place + 1] else None)
        ctx.of.hand_out_at_end()
        grad_rows = None
        if wants_factors or wants_rows:
            grad_rows = ctx.of.pull(grads, rows, lowered, ctx.layers, wants_rows=wants_rows)
        return grad_rows, None, None, None, *of_tensors

"""Logprobs and the gradient of hidden states in one pass over the logits, on a GPU.

`target_logprobs` computes logits again for the gradients, as a loss may be any function of all logprobs. Where a
token's loss depends on nothing but the token, each group's gradients are made while its logits are there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trainmaster.engine.adapters import AdapterRows
from trainmaster.engine.factor_products import FactorRows
from trainmaster.engine.model import Unembedding
from trainmaster.engine.products import wide_product

LOGITS = 2**28
"""How many logits are held at a time: 1 GiB, and half as much for their gradients."""
_ROWS = 128
"""Rows are computed in multiples of this: matrix products have tiles of so many."""

Pull = Callable[[slice, Tensor], Tensor]
"""The gradients of a loss by the logprobs of some rows, as soon as these are known."""


@torch.no_grad()
def pulled_logprobs(
    hidden: Tensor, targets: Tensor, unembedding: Unembedding, adapters: AdapterRows, pull: Pull | None
) -> tuple[Tensor, Tensor | None]:
    """The logprobs of tokens, int64 [n] or [n, k], by rows of `hidden` [n, hidden], and the gradient of `hidden`.

    The gradients of the unembedding's weight, if it is trained, and of its adapters are added to what they have.
    """
    from trainmaster.engine.kernels.vocabulary import pull_logits, row_totals

    weight, softcap = unembedding.weight, unembedding.logit_softcap
    columns = targets.view(len(targets), -1)
    step = max(_ROWS, LOGITS // len(weight) // _ROWS * _ROWS)
    logprobs = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
    grad_hidden = None if pull is None else torch.empty_like(hidden)
    grad_weight = None if pull is None or not weight.requires_grad else torch.zeros_like(weight, dtype=torch.float32)
    room = hidden.new_empty(0 if pull is None else min(step, len(hidden)), len(weight))
    factors = _Factors.of(adapters, hidden, unembedding.target)
    for start in range(0, len(hidden), step):
        own = slice(start, min(start + step, len(hidden)))
        rows = hidden[own]
        logits = wide_product(rows, weight)
        lowered = None if factors is None else factors.add(logits, rows, own)
        if softcap:
            logits.div_(softcap).tanh_().mul_(softcap)
        found = row_totals(logits, columns[own])
        logprobs[own] = found.logprobs.view(logprobs[own].shape)
        if pull is None or grad_hidden is None:
            continue
        grads = pull(own, logprobs[own]).view(len(rows), -1)
        grad_logits = pull_logits(logits, found.totals, columns[own], grads, room[: len(rows)], softcap)
        torch.mm(grad_logits, weight, out=grad_hidden[own])
        if grad_weight is not None:
            grad_weight += grad_logits.t() @ rows
        if factors is not None and lowered is not None:
            factors.pull(grad_logits, rows, lowered, own, grad_hidden[own])
    if grad_weight is not None:
        made = grad_weight.to(weight.dtype)
        weight.grad = made if weight.grad is None else weight.grad.add_(made)
    return logprobs, grad_hidden


class _Factors:
    """The adapters' part: each adapter's rows by products of their own, as the vocabulary is long and adapters few."""

    def __init__(self, rows: FactorRows, a: Tensor, b: Tensor, target: str) -> None:
        self._rows, self._a, self._b, self._target = rows, a, b, target

    @classmethod
    def of(cls, adapters: AdapterRows, hidden: Tensor, target: str) -> _Factors | None:
        rows = adapters.stacked(hidden)
        a = None if rows is None else rows.stack.a([target])
        return None if rows is None or a is None else cls(rows, a, rows.stack.b(target), target)

    def add(self, logits: Tensor, rows: Tensor, own: slice) -> Tensor:
        """Add the adapters' part to the logits; returns the rows times A."""
        from trainmaster.engine.kernels.groups import Groups, group_product

        lowered = rows.new_zeros(len(rows), self._a.shape[1])
        bounds = self._bounds(own)
        for (start, end), a in zip(bounds, self._a, strict=True):
            if start < end:
                torch.mm(rows[start:end], a.t(), out=lowered[start:end])
        group_product(lowered, self._b, Groups.of(bounds, rows.device), out=logits, add=True)
        return lowered

    def pull(self, grad_logits: Tensor, rows: Tensor, lowered: Tensor, own: slice, grad_rows: Tensor) -> None:
        gradients = self._rows.noted([self._target])
        grad_a, grad_b = self._rows.stack.a([self._target], gradients), self._rows.stack.b(self._target, gradients)
        assert grad_a is not None
        for place, (start, end) in enumerate(self._bounds(own)):
            if start < end:
                grad = grad_logits[start:end]
                grad_lowered = grad @ self._b[place]
                grad_rows[start:end].addmm_(grad_lowered, self._a[place])
                grad_a[place] += grad_lowered.t() @ rows[start:end]
                grad_b[place] += grad.t() @ lowered[start:end]

    def _bounds(self, own: slice) -> list[tuple[int, int]]:
        """Each adapter's rows within `own`, counted from its first; some have none."""
        cut = [(max(start, own.start) - own.start, min(end, own.stop) - own.start) for start, end in self._rows.bounds]
        return [(start, max(start, end)) for start, end in cut]

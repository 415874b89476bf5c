"""Logprobs of tokens, without holding the logits of all rows.

The logits of a large vocabulary are the largest tensor in training. Here they are computed for some rows at a time, and
again for the gradients. All sums over the vocabulary are at least in float32.

Rows are computed in groups of whole spans, and each adapter's spans begin with its own first row. So its gradient,
which is summed span by span, does not depend on the rows before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainmaster.engine.adapters import AdapterRows
from trainmaster.engine.model import Unembedding
from trainmaster.engine.products import (
    AdapterShare,
    add_shares,
    back_product,
    factors_of,
    share_gradients,
    wide_product,
)
from trainmaster.engine.types import EngineError

LOGITS = 2**27
"""How many logits are held at a time: half a gigabyte, some 900 rows of a vocabulary of 150,000."""
_SPAN = 256
_NOBODY = -1


def target_logprobs(
    hidden: Tensor,
    targets: Tensor,
    unembedding: Unembedding,
    adapters: AdapterRows | None = None,
    chunk: int | None = None,
) -> Tensor:
    """The logprobs of given tokens, float32, in the shape of `targets`; differentiable.

    Args:
        hidden: [n, hidden], from `Transformer.hidden`.
        targets: int64 [n], or [n, k] for k tokens per row.
        unembedding: The model's.
        adapters: Of the rows.
        chunk: Rows whose logits are held at a time, approximately; None: as many as make LOGITS.

    Raises:
        EngineError: A target is not in the vocabulary. Not checked on a GPU, where the check would wait for all work
            in the queue.
    """
    if not targets.numel():
        return hidden.new_zeros(targets.shape, dtype=_wide(hidden))
    if targets.device.type == "cpu":
        _check(targets, len(unembedding.weight))
    plan = _Plan(unembedding, adapters, len(hidden), chunk)
    columns = targets.unsqueeze(1) if targets.dim() == 1 else targets
    logprobs: Tensor = _TargetLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, unembedding.weight, columns, plan, *factors_of(plan.shares)
    )
    return logprobs.view(targets.shape)


@torch.no_grad()
def top_logprobs(
    hidden: Tensor, k: int, unembedding: Unembedding, adapters: AdapterRows | None = None, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens of each row, likeliest first, and their logprobs: int64 and float32 [n, k].

    The arguments are those of `target_logprobs`.
    """
    plan = _Plan(unembedding, adapters, len(hidden), chunk)
    tokens = torch.empty(len(hidden), k, dtype=torch.int64, device=hidden.device)
    logprobs = torch.empty(len(hidden), k, dtype=_wide(hidden), device=hidden.device)
    for group in plan.groups:
        logits, _ = plan.logits(hidden, group)
        best = logits.topk(k, dim=1)
        tokens[group.rows] = best.indices
        logprobs[group.rows] = best.values - logits.logsumexp(1, keepdim=True)
    return tokens, logprobs


@torch.no_grad()
def all_logits(hidden: Tensor, unembedding: Unembedding, adapters: AdapterRows | None = None) -> Tensor:
    """The logits of a few rows, float32 [n, vocabulary], without gradients: for sampling."""
    if not len(hidden):
        return hidden.new_zeros(0, len(unembedding.weight), dtype=_wide(hidden))
    plan = _Plan(unembedding, adapters, len(hidden), len(hidden))
    (everything,) = plan.groups
    return plan.logits(hidden, everything)[0]


@dataclass(frozen=True, slots=True)
class _Span:
    """Consecutive rows of one adapter, or of the base model alone."""

    start: int
    stop: int
    owner: int
    """The index of the share, or _NOBODY."""


@dataclass(frozen=True, slots=True)
class _RowGroup:
    """Rows of consecutive spans whose logits are computed together."""

    rows: slice
    shares: tuple[AdapterShare, ...]
    """The spans of adapters, counted from the group's first row."""
    owners: tuple[int, ...]
    """The indices of their shares."""


class _Plan:
    """Which rows' logits are computed together.

    A group ends with the span that fills it, so many adapters make no more groups than one.
    """

    def __init__(self, unembedding: Unembedding, adapters: AdapterRows | None, rows: int, chunk: int | None) -> None:
        if adapters is not None and adapters.total != rows:
            raise ValueError(f"adapters of {adapters.total} rows cannot adapt {rows}")
        self.unembedding = unembedding
        self.shares = adapters.shares(unembedding.target, unembedding.weight.dtype) if adapters else ()
        chunk = chunk or max(1, LOGITS // len(unembedding.weight))
        self.groups: list[_RowGroup] = []
        filling: list[_Span] = []
        for span in _spans(self.shares, rows, min(chunk, _SPAN)):
            filling.append(span)
            if span.stop - filling[0].start >= chunk:
                self.groups.append(self._group(filling))
                filling = []
        if filling:
            self.groups.append(self._group(filling))

    def logits(self, hidden: Tensor, group: _RowGroup) -> tuple[Tensor, list[Tensor]]:
        """The logits [rows of the group, vocabulary] after the softcap, and what `add_shares` returned."""
        logits = wide_product(hidden[group.rows], self.unembedding.weight)
        lowered = add_shares(logits, hidden[group.rows], group.shares)
        if cap := self.unembedding.logit_softcap:
            logits.div_(cap).tanh_().mul_(cap)
        return logits, lowered

    def _group(self, spans: Sequence[_Span]) -> _RowGroup:
        first, adapted = spans[0].start, [span for span in spans if span.owner != _NOBODY]
        shares = (
            replace(self.shares[each.owner], start=each.start - first, stop=each.stop - first) for each in adapted
        )
        return _RowGroup(slice(first, spans[-1].stop), tuple(shares), tuple(span.owner for span in adapted))


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, plan: _Plan, *_factors: Tensor) -> Tensor:
        totals = torch.empty(len(hidden), 1, dtype=_wide(hidden), device=hidden.device)
        logprobs = torch.empty(targets.shape, dtype=totals.dtype, device=hidden.device)
        for group in plan.groups:
            logits, _ = plan.logits(hidden, group)
            totals[group.rows] = logits.logsumexp(1, keepdim=True)
            logprobs[group.rows] = logits.gather(1, targets[group.rows]) - totals[group.rows]
        ctx.plan = plan
        ctx.save_for_backward(hidden, weight, targets, totals)
        return logprobs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        hidden, weight, targets, totals = ctx.saved_tensors
        plan: _Plan = ctx.plan
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=_wide(weight)) if wants_weight else None
        grad_factors = [torch.zeros_like(each) for each in factors_of(plan.shares)]
        for group in plan.groups:
            logits, lowered = plan.logits(hidden, group)
            own, rows = grad[group.rows], hidden[group.rows]
            cap = plan.unembedding.logit_softcap
            slope = 1 - (logits / cap) ** 2 if cap else None
            grad_logits = logits.sub_(totals[group.rows]).exp_().mul_(-own.sum(1, keepdim=True))
            grad_logits.scatter_add_(1, targets[group.rows], own)
            if slope is not None:
                grad_logits *= slope
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[group.rows] = back_product(grad_logits, weight)
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ rows
            onto = None if grad_hidden is None else grad_hidden[group.rows]
            made = share_gradients(grad_logits, rows, lowered, group.shares, onto)
            for place, owner in enumerate(group.owners):
                for factor in (0, 1):
                    grad_factors[2 * owner + factor] += made[2 * place + factor]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, *grad_factors


def _check(targets: Tensor, vocabulary: int) -> None:
    least, greatest = (int(each) for each in torch.aminmax(targets))
    if least < 0 or greatest >= vocabulary:
        wrong = least if least < 0 else greatest
        raise EngineError(f"the target token {wrong} is not among the {vocabulary} of the vocabulary")


def _spans(shares: Sequence[AdapterShare], rows: int, longest: int) -> Iterator[_Span]:
    """All rows, split where adapters begin and end, and each part split from its first row on."""
    parts: list[tuple[int, int, int]] = []
    done = 0
    for index, share in enumerate(shares):
        parts += [(done, share.start, _NOBODY), (share.start, share.stop, index)]
        done = share.stop
    for first, stop, owner in [*parts, (done, rows, _NOBODY)]:
        for start in range(first, stop, longest):
            yield _Span(start, min(start + longest, stop), owner)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)

"""Logprobs of tokens, without ever holding the logits of all rows.

A large vocabulary's logits are the largest thing that training makes. Here they are made for some rows at a time, and
once more for the gradients. All sums over the vocabulary are in float32 at least.

Rows are computed in groups of whole spans, and each adapter's spans begin with its own first row. So its gradient,
which is summed span by span, does not depend on whose rows come before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainmaster.engine.adapters import AdapterRows, Share, lowered_rows, share_gradients
from trainmaster.engine.model import Unembedding
from trainmaster.engine.products import back_product, wide_product
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
        hidden: [n, hidden], as `Transformer.hidden` gives it.
        targets: int64 [n], or [n, k] for k tokens at each row.
        unembedding: The model's.
        adapters: Whose the rows are.
        chunk: Rows whose logits are held at a time, about; None: as many as make LOGITS.

    Raises:
        EngineError: A target is not in the vocabulary.
    """
    if not targets.numel():
        return hidden.new_zeros(targets.shape, dtype=_wide(hidden))
    vocabulary = len(unembedding.weight)
    least, greatest = torch.stack(torch.aminmax(targets)).tolist()
    if least < 0 or greatest >= vocabulary:
        wrong = least if least < 0 else greatest
        raise EngineError(f"the target token {wrong} is not among the {vocabulary} of the vocabulary")
    plan = _Plan(unembedding, adapters, len(hidden), chunk)
    columns = targets.unsqueeze(1) if targets.dim() == 1 else targets
    factors = [each for share in plan.shares for each in (share.factors.a, share.factors.b)]
    logprobs: Tensor = _TargetLogprobs.apply(hidden, unembedding.weight, columns, plan, *factors)  # type: ignore[no-untyped-call]
    return logprobs.view(targets.shape)


@torch.no_grad()
def top_logprobs(
    hidden: Tensor, k: int, unembedding: Unembedding, adapters: AdapterRows | None = None, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens of each row, likeliest first, and their logprobs: int64 and float32 [n, k].

    Args:
        hidden: [n, hidden].
        k: At most the vocabulary's size.
        unembedding: The model's.
        adapters: Whose the rows are.
        chunk: As for `target_logprobs`.
    """
    plan = _Plan(unembedding, adapters, len(hidden), chunk)
    tokens = torch.empty(len(hidden), k, dtype=torch.int64, device=hidden.device)
    logprobs = torch.empty(len(hidden), k, dtype=_wide(hidden), device=hidden.device)
    for group in plan.groups:
        logits = plan.logits(hidden, group)
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
    return plan.logits(hidden, everything)


@dataclass(frozen=True, slots=True)
class _Span:
    """Consecutive rows of one adapter, or of the base model alone."""

    rows: slice
    share: int
    """Which of the shares; _NOBODY: none."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Consecutive spans, whose logits are made together."""

    spans: tuple[_Span, ...]

    @property
    def rows(self) -> slice:
        return slice(self.spans[0].rows.start, self.spans[-1].rows.stop)

    @property
    def adapted(self) -> tuple[_Span, ...]:
        return tuple(span for span in self.spans if span.share != _NOBODY)

    def within(self, span: _Span) -> slice:
        """A span's rows, counted from the group's first."""
        return slice(span.rows.start - self.rows.start, span.rows.stop - self.rows.start)


class _Plan:
    """Which rows' logits are made together, and how.

    A group ends with the span that fills it. So there are as many groups for many adapters as for one.
    """

    def __init__(self, unembedding: Unembedding, adapters: AdapterRows | None, rows: int, chunk: int | None) -> None:
        if adapters is not None and adapters.total != rows:
            raise ValueError(f"adapters of {adapters.total} rows cannot adapt {rows}")
        self.unembedding = unembedding
        self.shares = adapters.shares(unembedding.target) if adapters else ()
        chunk = chunk or max(1, LOGITS // len(unembedding.weight))
        self.groups: list[_Group] = []
        filling: list[_Span] = []
        for span in _spans(self.shares, rows, min(chunk, _SPAN)):
            filling.append(span)
            if span.rows.stop - filling[0].rows.start >= chunk:
                self.groups.append(_Group(tuple(filling)))
                filling = []
        if filling:
            self.groups.append(_Group(tuple(filling)))

    def logits(self, hidden: Tensor, group: _Group) -> Tensor:
        """[rows of the group, vocabulary], after the softcap."""
        logits = wide_product(hidden[group.rows], self.unembedding.weight)
        for span in group.adapted:
            share = self.shares[span.share]
            lowered = lowered_rows(hidden[span.rows], share, share.factors.a)
            logits[group.within(span)] += wide_product(lowered, share.factors.b.to(lowered.dtype))
        if cap := self.unembedding.logit_softcap:
            logits.div_(cap).tanh_().mul_(cap)
        return logits


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, plan: _Plan, *factors: Tensor) -> Tensor:
        totals = torch.empty(len(hidden), 1, dtype=_wide(hidden), device=hidden.device)
        logprobs = torch.empty(targets.shape, dtype=totals.dtype, device=hidden.device)
        for group in plan.groups:
            logits = plan.logits(hidden, group)
            totals[group.rows] = logits.logsumexp(1, keepdim=True)
            logprobs[group.rows] = logits.gather(1, targets[group.rows]) - totals[group.rows]
        ctx.plan = plan
        ctx.save_for_backward(hidden, weight, targets, totals, *factors)
        return logprobs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        hidden, weight, targets, totals, *factors = ctx.saved_tensors
        plan: _Plan = ctx.plan
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=_wide(weight)) if wants_weight else None
        grad_factors = [torch.zeros_like(each) for each in factors]
        for group in plan.groups:
            logits = plan.logits(hidden, group)
            own = grad[group.rows]
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
                grad_weight += grad_logits.t() @ hidden[group.rows]
            for span in group.adapted:
                share, rows = plan.shares[span.share], hidden[span.rows]
                own_factors = slice(2 * span.share, 2 * span.share + 2)
                onto = None if grad_hidden is None else grad_hidden[span.rows]
                lowered = lowered_rows(rows, share, factors[own_factors][0])
                made = share_gradients(
                    share, factors[own_factors], grad_logits[group.within(span)], rows, lowered, onto
                )
                for total, each in zip(grad_factors[own_factors], made, strict=True):
                    total += each
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, *grad_factors


def _spans(shares: Sequence[Share], rows: int, longest: int) -> Iterator[_Span]:
    """All rows, cut where adapters begin and end, and each part of them from its first row on."""
    parts: list[tuple[int, int, int]] = []
    done = 0
    for index, share in enumerate(shares):
        parts += [(done, share.start, _NOBODY), (share.start, share.stop, index)]
        done = share.stop
    for first, stop, owner in [*parts, (done, rows, _NOBODY)]:
        for start in range(first, stop, longest):
            yield _Span(slice(start, min(start + longest, stop)), owner)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)

"""Logprobs of tokens, without holding the logits of all rows, and the choice of the next token by them.

The logits of a large vocabulary are the largest tensor in training. Here they are computed for some rows at a time, and
again for the gradients. All sums over the vocabulary are at least in float32.

Rows are computed in groups of whole spans, and each adapter's spans begin with its own first row. So its gradient,
which is summed span by span, does not depend on the rows before it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainmaster.engine import kernels, products
from trainmaster.engine.adapters import AdapterRows
from trainmaster.engine.model import Unembedding
from trainmaster.engine.products import AdapterShare, add_shares, factors_of, share_gradients, wide_product

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
    """The logprobs of tokens, int64 [n] or [n, k], by rows of `hidden` [n, hidden]: float32, differentiable.

    The logits of about `chunk` rows are held at a time; None: of as many as make LOGITS.
    """
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
    """The k likeliest tokens of each row, likeliest first, and their logprobs: int64 and float32 [n, k]."""
    plan = _Plan(unembedding, adapters, len(hidden), chunk)
    tokens = torch.empty(len(hidden), k, dtype=torch.int64, device=hidden.device)
    logprobs = torch.empty(len(hidden), k, dtype=_wide(hidden), device=hidden.device)
    for group in plan.groups:
        tokens[group.rows], logprobs[group.rows] = likeliest(plan.logits(hidden, group)[0], k)
    return tokens, logprobs


@torch.no_grad()
def all_logits(hidden: Tensor, unembedding: Unembedding, adapters: AdapterRows | None = None) -> Tensor:
    """The logits of a few rows, float32 [n, vocabulary], without gradients: for sampling."""
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
    rows: slice
    shares: tuple[AdapterShare, ...]
    """The spans of adapters, counted from the group's first row."""
    owners: tuple[int, ...]


class _Plan:
    """Which rows' logits are computed together. The span that fills a group ends it: adapters make no more groups."""

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
            totals[group.rows], logprobs[group.rows] = _read(logits, targets[group.rows])
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
            grad_logits = _pulled(logits, totals[group.rows], targets[group.rows], own, cap, hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[group.rows] = products.back_product(grad_logits, weight)
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ rows
            onto = None if grad_hidden is None else grad_hidden[group.rows]
            made = share_gradients(grad_logits, rows, lowered, group.shares, onto)
            for place, owner in enumerate(group.owners):
                for factor in (0, 1):
                    grad_factors[2 * owner + factor] += made[2 * place + factor]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, *grad_factors


def _read(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's log of the sum of exponentials, [n, 1], and the logprobs of its targets."""
    if kernels.serve(logits):
        from trainmaster.engine.kernels.vocabulary import row_totals

        found = row_totals(logits, targets)
        return found.totals[:, None], found.logprobs
    totals = logits.logsumexp(1, keepdim=True)
    return totals, logits.gather(1, targets) - totals


def _pulled(
    logits: Tensor, totals: Tensor, targets: Tensor, grads: Tensor, softcap: float | None, dtype: torch.dtype
) -> Tensor:
    """The gradient of the logits before the softcap, by that of the logprobs; the logits are overwritten."""
    if kernels.serve(logits):
        from trainmaster.engine.kernels.vocabulary import pull_logits

        return pull_logits(logits, totals, targets, grads, torch.empty_like(logits, dtype=dtype), softcap)
    slope = 1 - (logits / softcap) ** 2 if softcap else None
    pulled = logits.sub_(totals).exp_().mul_(-grads.sum(1, keepdim=True))
    pulled.scatter_add_(1, targets, grads)
    if slope is not None:
        pulled *= slope
    return pulled.to(dtype)


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


# The choice of tokens. Every row is computed by itself, so a result does not depend on the rest of the batch.


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    temperature: float = 1.0
    """0: greedy."""
    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0 and below: from all."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that together have this probability."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    @property
    def is_filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1


def draws_of(seed: int | None, index: int) -> Callable[[], float]:
    """Makes numbers in [0, 1), one per token of sample `index`: by the seed, the same on all devices; else random."""
    known = secrets.randbits(64) if seed is None else seed % 2**64
    return np.random.default_rng([known, index]).random


def choose(logits: Tensor, rules: Sequence[Rule], draws: Sequence[float]) -> Tensor:
    """A token for each row of logits, float32 [rows, vocabulary], by its rule and a draw in [0, 1): int64 [rows]."""
    greedy = [row for row, rule in enumerate(rules) if rule.is_greedy]
    open_ = [row for row, rule in enumerate(rules) if not rule.is_greedy and not rule.is_filtered]
    filtered = [row for row, rule in enumerate(rules) if not rule.is_greedy and rule.is_filtered]
    tokens = torch.empty(len(rules), dtype=torch.int64, device=logits.device)
    for rows, how in ((greedy, _greedy), (open_, _open), (filtered, _filtered)):
        if rows:
            own_logits = logits if len(rows) == len(rules) else logits[rows]
            tokens[rows] = how(own_logits, [rules[row] for row in rows], [draws[row] for row in rows])
    return tokens


def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """The logprobs of one token in each row by the model's own distribution, at temperature 1: [rows]."""
    return logits.gather(1, tokens[:, None]).squeeze(1) - logits.logsumexp(dim=-1)


def tempered_logprobs_of(logits: Tensor, rules: Sequence[Rule], tokens: Tensor) -> Tensor:
    """The logprobs of tokens by the distribution they were drawn from: [rows]. A greedy choice is certain: 0."""
    found = torch.zeros(len(rules), dtype=torch.float32, device=logits.device)
    for row, rule in enumerate(rules):
        own, token = logits[row : row + 1], tokens[row]
        if rule.is_greedy:
            found[row] = own[0, token] - own[0, token]  # NaN where the model gives nothing but NaN
            continue
        weights, ids = _left(own, [rule]) if rule.is_filtered else (_weights(own, [rule]), None)
        place = token if ids is None else (ids[0] == token).nonzero()[0, 0]
        found[row] = (weights[0, place].double() / weights[0].sum(dtype=torch.float64)).log()
    return found


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens of each row, int64 [rows, count], and their logprobs."""
    values, tokens = logits.topk(count, dim=-1)
    return tokens, values - logits.logsumexp(dim=-1, keepdim=True)


def _greedy(logits: Tensor, rules: Sequence[Rule], draws: Sequence[float]) -> Tensor:  # noqa: ARG001
    return logits.argmax(dim=-1)


def _open(logits: Tensor, rules: Sequence[Rule], draws: Sequence[float]) -> Tensor:
    return _drawn(_weights(logits, rules).cumsum(dim=-1, dtype=torch.float64), draws)


def _filtered(logits: Tensor, rules: Sequence[Rule], draws: Sequence[float]) -> Tensor:
    weights, ids = _left(logits, rules)
    places = _drawn(weights.cumsum(dim=-1, dtype=torch.float64), draws)
    return ids.gather(1, places[:, None]).squeeze(1)


def _left(logits: Tensor, rules: Sequence[Rule]) -> tuple[Tensor, Tensor]:
    """The weights of the tokens that top_k and then top_p leave, the likeliest first, and their ids."""
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    weights = _weights(ordered, rules)
    size = logits.shape[-1]
    counts = _column([rule.top_k if 0 < rule.top_k < size else size for rule in rules], logits.device)
    weights = weights.masked_fill(torch.arange(size, device=logits.device) >= counts, 0.0)
    cumulated = weights.cumsum(dim=-1, dtype=torch.float64)
    # A rule without top_p must not lose tokens to rounding; and the first token is always left.
    shares = _column([rule.top_p if rule.top_p < 1 else float("inf") for rule in rules], logits.device)
    left_out = cumulated - weights >= cumulated[:, -1:] * shares
    left_out[:, 0] = False
    return weights.masked_fill(left_out, 0.0), ids


def _weights(logits: Tensor, rules: Sequence[Rule]) -> Tensor:
    """Probabilities relative to the likeliest token's: so no temperature is too small."""
    # Not below what float32 can divide by.
    temperatures = _column([max(rule.temperature, 1e-30) for rule in rules], logits.device).to(torch.float32)
    return ((logits - logits.amax(dim=-1, keepdim=True)) / temperatures).exp()


def _drawn(cumulated: Tensor, draws: Sequence[float]) -> Tensor:
    """For each row, the index at which the running sum of weights passes its draw."""
    totals = cumulated[:, -1:]
    thresholds = torch.minimum(totals * _column(draws, cumulated.device), totals.nextafter(torch.zeros_like(totals)))
    places = torch.searchsorted(cumulated, thresholds, right=True).squeeze(1)
    # Rows of a model that gives NaN have no such place.
    return places.clamp(max=cumulated.shape[-1] - 1)


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None].to(device)

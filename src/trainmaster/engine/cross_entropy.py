"""The mean cross-entropy of tokens with its gradients, computed in one pass over the logits of a few rows at a time.

`target_logprobs` serves every loss: it computes logits again for the gradients, as a loss may be any function of the
logprobs. Cross-entropy is known beforehand: each group's gradients are made while its logits are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainmaster.engine import kernels
from trainmaster.engine.logprobs import LOGITS
from trainmaster.engine.model import Unembedding
from trainmaster.engine.products import back_product, wide_product


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CrossEntropy:
    """Of some rows; each a tensor without an axis, on their device."""

    loss: Tensor
    """The sum of the tokens' losses, divided; differentiable."""
    entropy: Tensor
    """The sum of the entropies of the distributions."""
    correct: Tensor
    """How many of the tokens are the likeliest ones."""


def cross_entropy(
    hidden: Tensor, targets: Tensor, unembedding: Unembedding, divisor: Tensor, chunk: int | None = None
) -> CrossEntropy:
    """Of tokens, int64 [n], by rows of `hidden` [n, hidden]; `divisor` is a number on their device.

    The logits of `chunk` rows are held at a time; None: of as many as make LOGITS. An unembedding with an adapter is
    not supported.
    """
    weight = unembedding.weight
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    rows = chunk or max(1, LOGITS // len(weight))
    loss, entropy, correct = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, divisor, unembedding.logit_softcap, rows, wanted
    )
    return CrossEntropy(loss=loss, entropy=entropy, correct=correct)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        divisor: Tensor,
        softcap: float | None,
        rows: int,
        wanted: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss, entropy = torch.zeros(2, dtype=wide, device=hidden.device).unbind()
        correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if wanted and ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if wanted and ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), rows):
            own, columns = hidden[start : start + rows], targets[start : start + rows, None]
            logits = wide_product(own, weight)
            if softcap:
                logits.div_(softcap).tanh_().mul_(softcap)
            read = _read_by_kernel if kernels.serve(logits) else _read
            group, grad_logits = read(logits, columns, softcap, divisor if wanted else None, hidden.dtype)
            del logits
            loss += group.loss
            entropy += group.entropy
            correct += group.correct
            if grad_logits is None:
                continue
            if grad_hidden is not None:
                grad_hidden[start : start + rows] = back_product(grad_logits, weight)
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ own
        ctx.grads = grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)
        ctx.mark_non_differentiable(entropy, correct)
        return loss / divisor, entropy, correct

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_others: Tensor) -> tuple[Any, ...]:
        grad_hidden, grad_weight = ctx.grads
        ctx.grads = None
        return (
            None if grad_hidden is None else grad_hidden.mul_(grad),
            None if grad_weight is None else grad_weight.mul_(grad),
            *[None] * 5,
        )


def _read(
    logits: Tensor, columns: Tensor, softcap: float | None, divisor: Tensor | None, dtype: torch.dtype
) -> tuple[CrossEntropy, Tensor | None]:
    """What comes of some rows, undivided, and the gradient of their logits before the softcap, if there is a divisor.

    The targets are `columns`, [n, 1].
    """
    totals = logits.logsumexp(1, keepdim=True)
    loss = (totals - logits.gather(1, columns)).sum()
    correct = (logits.argmax(1, keepdim=True) == columns).sum()
    slope = 1 - (logits / softcap) ** 2 if softcap and divisor is not None else None
    weights = (logits - totals).exp_()
    found = CrossEntropy(loss=loss, entropy=totals.sum() - torch.linalg.vecdot(weights, logits).sum(), correct=correct)
    if divisor is None:
        return found, None
    grad_logits = weights.scatter_add_(1, columns, -torch.ones_like(totals)).div_(divisor)
    if slope is not None:
        grad_logits *= slope
    return found, grad_logits.to(dtype)


def _read_by_kernel(
    logits: Tensor, columns: Tensor, softcap: float | None, divisor: Tensor | None, dtype: torch.dtype
) -> tuple[CrossEntropy, Tensor | None]:
    from trainmaster.engine.kernels.vocabulary import pull_logits, row_measures

    measures = row_measures(logits, columns)
    found = CrossEntropy(
        loss=-measures.logprobs.sum(),
        entropy=measures.entropies.sum(),
        correct=(measures.likeliest[:, None] == columns).sum(),
    )
    if divisor is None:
        return found, None
    grads = (-1.0 / divisor.to(torch.float32)).expand(columns.shape)
    out = torch.empty_like(logits, dtype=dtype)
    return found, pull_logits(logits, measures.totals, columns, grads, out, softcap)

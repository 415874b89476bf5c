"""What a training minimizes, and what it measures of each batch beside that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from trainmaster.engine.cross_entropy import cross_entropy
from trainmaster.engine.logprobs import target_logprobs
from trainmaster.engine.model import Unembedding
from trainmaster.training.loop.batches import Batch
from trainmaster.training.loop.preference_losses import AnswerLoss, PairLoss

Losses = tuple[Tensor, ...]
"""The sum of a batch's losses, divided, and a sum for each measure: FSDP looks for tensors in tuples."""


class Per(Enum):
    """What a measure is a mean over."""

    TRAINED = "trained tokens"
    ROWS = "rows"


@dataclass(frozen=True, slots=True)
class Measure:
    name: str
    per: Per | str | None
    """The name of another measure, where it counts what this one is a mean over; None: it is such a count."""


class Objective(Protocol):
    @property
    def measures(self) -> Sequence[Measure]: ...

    @property
    def needs_reference(self) -> bool:
        """Whether it compares with the logprobs of the model that the training begins with."""

    def count(self, batch: Batch) -> int:
        """How many losses a batch has; their sum is divided by those of a step."""

    def losses(self, hidden: Tensor, batch: Batch, unembedding: Unembedding, divisor: Tensor) -> Losses:
        """Of a batch, by the hidden states of its tokens; `divisor` is a number on their device."""


class NextTokens:
    """Cross-entropy of the tokens that are trained on."""

    measures = (Measure("entropy", Per.TRAINED), Measure("mean_token_accuracy", Per.TRAINED))
    needs_reference = False

    def count(self, batch: Batch) -> int:
        return len(batch.targets)

    def losses(self, hidden: Tensor, batch: Batch, unembedding: Unembedding, divisor: Tensor) -> Losses:
        found = cross_entropy(hidden.index_select(0, batch.trained), batch.targets, unembedding, divisor)
        return found.loss, found.entropy, found.correct


class Preferences:
    """Pairs of sequences: a chosen answer, and then a rejected one."""

    measures = tuple(
        Measure(name, Per.ROWS)
        for name in (
            "reward_chosen",
            "reward_rejected",
            "reward_margin",
            "reward_accuracy",
            "logps_chosen",
            "logps_rejected",
        )
    )

    def __init__(self, loss: PairLoss) -> None:
        self.loss = loss

    @property
    def needs_reference(self) -> bool:
        return self.loss.needs_reference

    def count(self, batch: Batch) -> int:
        return batch.rows

    def losses(self, hidden: Tensor, batch: Batch, unembedding: Unembedding, divisor: Tensor) -> Losses:
        loss, logprobs = self.loss, answer_logprobs(hidden, batch, unembedding)
        compared, reference = logprobs, batch.reference
        if loss.takes_means:
            lengths = answer_lengths(batch)
            compared = logprobs / lengths
            reference = None if reference is None else reference / lengths
        rewards = loss.rewards(compared, reference)
        margins = rewards[:, 0] - rewards[:, 1]
        total = loss.losses(compared[:, 0], compared[:, 1], margins).sum() / divisor
        sums = (rewards[:, 0], rewards[:, 1], margins, (margins > 0).to(margins.dtype), logprobs[:, 0], logprobs[:, 1])
        return (total, *(each.detach().sum() for each in sums))


class Judgements:
    """Single answers, each with its prompt and another answer after it."""

    measures = (
        Measure("reward_chosen", "liked"),
        Measure("reward_rejected", "disliked"),
        Measure("logps_chosen", "liked"),
        Measure("logps_rejected", "disliked"),
        Measure("kl", Per.ROWS),
        Measure("liked", None),
        Measure("disliked", None),
    )
    needs_reference = True

    def __init__(self, loss: AnswerLoss) -> None:
        self.loss = loss

    def count(self, batch: Batch) -> int:
        return batch.rows

    def losses(self, hidden: Tensor, batch: Batch, unembedding: Unembedding, divisor: Tensor) -> Losses:
        logprobs, liked = answer_logprobs(hidden, batch, unembedding), batch.liked
        assert batch.reference is not None
        assert liked is not None
        moved = logprobs - batch.reference
        kl = moved[:, 1].detach().mean().clamp(min=0)
        rewards = self.loss.beta * moved[:, 0]
        total = self.loss.losses(rewards, self.loss.beta * kl, liked).sum() / divisor
        chosen = liked.to(rewards.dtype)
        rejected, sums = 1 - chosen, (rewards.detach(), logprobs[:, 0].detach())
        shares = [(each * of).sum() for each in sums for of in (chosen, rejected)]
        return total, *shares, kl * batch.rows, chosen.sum(), rejected.sum()


def answer_logprobs(hidden: Tensor, batch: Batch, unembedding: Unembedding) -> Tensor:
    """The sums of the logprobs of both answers of each row: [rows, 2], at least float32."""
    of_tokens = target_logprobs(hidden.index_select(0, batch.trained), batch.targets, unembedding)
    sums = of_tokens.new_zeros(len(batch.lengths)).index_add(0, _sequences(batch), of_tokens)
    return sums.view(-1, 2)


def answer_lengths(batch: Batch) -> Tensor:
    """How many tokens of each answer are trained on: [pairs, 2]."""
    ones = torch.ones(len(batch.trained), dtype=torch.float32, device=batch.trained.device)
    return ones.new_zeros(len(batch.lengths)).index_add(0, _sequences(batch), ones).view(-1, 2)


def _sequences(batch: Batch) -> Tensor:
    """The number of the sequence that each trained token is in."""
    return torch.searchsorted(batch.ends[1:].to(torch.int64), batch.trained, right=True)

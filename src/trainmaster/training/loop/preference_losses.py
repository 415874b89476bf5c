"""What answers cost, by the logprobs that the model gives them and that the reference gave them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from trainmaster.server.core.training.hyperparameters import Value
from trainmaster.server.core.training.preferences import LOSSES, PreferenceLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLoss:
    """A loss with its hyperparameters."""

    kind: PreferenceLoss
    beta: float
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.0

    @classmethod
    def of(cls, parameters: Mapping[str, Value]) -> PairLoss:
        numbers = {name: float(parameters[name] or 0) for name in ("beta", "label_smoothing", "simpo_gamma")}
        return cls(kind=PreferenceLoss(str(parameters["loss_type"])), **numbers)

    @property
    def needs_reference(self) -> bool:
        return LOSSES[self.kind].reference

    @property
    def takes_means(self) -> bool:
        return LOSSES[self.kind].mean

    def rewards(self, logprobs: Tensor, reference: Tensor | None) -> Tensor:
        """Of answers: how much likelier than by the reference, or just how likely, times beta."""
        return self.beta * (logprobs if reference is None else logprobs - reference)

    def losses(self, chosen: Tensor, rejected: Tensor, margins: Tensor) -> Tensor:
        """Of pairs [n], by the logprobs of their answers, sums or means, and the margins of their rewards."""
        match self.kind:
            case PreferenceLoss.SIGMOID_NORM:
                return -logsigmoid(margins)
            case PreferenceLoss.SIGMOID:
                wrong = self.label_smoothing
                return -(1 - wrong) * logsigmoid(margins) - wrong * logsigmoid(-margins)
            case PreferenceLoss.ROBUST:
                wrong = self.label_smoothing
                return (-(1 - wrong) * logsigmoid(margins) + wrong * logsigmoid(-margins)) / (1 - 2 * wrong)
            case PreferenceLoss.HINGE:
                return torch.relu(1 - margins)
            case PreferenceLoss.IPO:
                return (margins / self.beta - 1 / (2 * self.beta)) ** 2
            case PreferenceLoss.SIMPO:
                return -logsigmoid(margins - self.simpo_gamma)
            case PreferenceLoss.ORPO:
                return -chosen - self.beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))
            case PreferenceLoss.KTO:
                raise ValueError("kto is a loss of single answers")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLoss:
    """KTO: a liked answer gains by a reward above that of answers in general, another one by a lower one."""

    beta: float
    desirable_weight: float
    undesirable_weight: float

    @classmethod
    def of(cls, parameters: Mapping[str, Value]) -> AnswerLoss:
        names = ("beta", "desirable_weight", "undesirable_weight")
        return cls(**{name: float(parameters[name] or 0) for name in names})

    def losses(self, rewards: Tensor, general: Tensor, liked: Tensor) -> Tensor:
        """Of answers [n], by their rewards, the reward of answers in general, and whether they were liked."""
        gains = torch.where(liked, torch.sigmoid(rewards - general), torch.sigmoid(general - rewards))
        return torch.where(liked, self.desirable_weight, self.undesirable_weight) * (1 - gains)


def _log_odds(logprobs: Tensor) -> Tensor:
    """log(p / (1 - p)), for logprobs below 0."""
    return logprobs - torch.log(-torch.expm1(logprobs))

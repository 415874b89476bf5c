"""The losses of training on pairs of a chosen and a rejected answer, and the hyperparameters that each has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class PreferenceLoss(StrEnum):
    SIGMOID = "sigmoid"
    SIGMOID_NORM = "sigmoid_norm"
    IPO = "ipo"
    HINGE = "hinge"
    ROBUST = "robust"
    ORPO = "orpo"
    SIMPO = "simpo"
    KTO = "kto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    meaning: str
    reference: bool = True
    """Whether answers are compared with what the model gave them before the training."""
    mean: bool = False
    """Whether the logprob of an answer is the mean of its tokens', and not the sum."""
    unpaired: bool = False
    """Whether rows are single answers, liked or not, and not pairs."""
    options: frozenset[str] = frozenset()
    """Its hyperparameters beside `beta`."""


LOSSES: Mapping[PreferenceLoss, Loss] = {
    PreferenceLoss.SIGMOID: Loss(
        meaning="DPO: the chosen answer becomes likelier than the rejected one, relative to the reference",
        options=frozenset({"label_smoothing"}),
    ),
    PreferenceLoss.SIGMOID_NORM: Loss(
        meaning="DPO by the mean logprob of tokens: long answers count as short ones", mean=True
    ),
    PreferenceLoss.IPO: Loss(meaning="IPO: the margin goes to 1 / (2 beta), and no further", mean=True),
    PreferenceLoss.HINGE: Loss(meaning="SLiC: nothing is gained by a margin above 1 / beta"),
    PreferenceLoss.ROBUST: Loss(
        meaning="DPO that expects a share of wrong labels, which label_smoothing gives",
        options=frozenset({"label_smoothing"}),
    ),
    PreferenceLoss.ORPO: Loss(
        meaning="ORPO: learns the chosen answer as SFT does, and its odds against the rejected one; no reference",
        reference=False,
        mean=True,
    ),
    PreferenceLoss.SIMPO: Loss(
        meaning="SimPO: mean logprobs as rewards, which differ by simpo_gamma at least; no reference",
        reference=False,
        mean=True,
        options=frozenset({"simpo_gamma"}),
    ),
    PreferenceLoss.KTO: Loss(
        meaning="KTO: single answers, of which it is known whether they were liked",
        unpaired=True,
        options=frozenset({"desirable_weight", "undesirable_weight"}),
    ),
}
OPTIONS_OF_LOSSES = frozenset().union(*(loss.options for loss in LOSSES.values()))

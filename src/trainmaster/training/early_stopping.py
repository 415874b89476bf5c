"""Ends a training whose evaluations have stopped becoming better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from trainmaster.training.document import Document


@dataclass(slots=True, kw_only=True)
class Patience:
    """How many evaluations in a row were no better than the best one before them. Every checkpoint has it."""

    metric: str
    greater: bool
    """Whether a greater value is better."""
    most: int
    """Evaluations in a row after which the training ends; 0: it does not."""
    best: float | None = None
    waited: int = 0

    @classmethod
    def of(cls, document: Document, saved: Mapping[str, Any] | None) -> Self:
        """As the job asks for; `saved`: what `to_json` gave for the checkpoint that it resumes from."""
        checkpoint = document.output.checkpoint
        before = saved or {}
        return cls(
            metric=checkpoint.metric_for_best_model or "",
            greater=checkpoint.best_is_greater,
            most=int(document.hyperparameters["early_stopping_patience"] or 0),
            best=before.get("best"),
            waited=before.get("waited", 0),
        )

    @property
    def is_over(self) -> bool:
        return 0 < self.most <= self.waited

    def note(self, evaluated: Mapping[str, float]) -> None:
        """Take in an evaluation; a value that is no number is not better."""
        value = evaluated.get(self.metric)
        if value is None:
            return
        better = self.best is None or (value > self.best if self.greater else value < self.best)
        if math.isfinite(value) and better:
            self.best, self.waited = value, 0
        else:
            self.waited += 1

    def told(self, step: int, steps: int) -> str:
        times = "evaluation" if self.most == 1 else f"{self.most} evaluations"
        return f"the training ends at step {step:,} of {steps:,}: {self.metric} has not become better in {times}"

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name in ("best", "waited")}

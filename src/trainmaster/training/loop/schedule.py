"""At which steps a training logs, evaluates and saves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from trainmaster.server.core.spec.configs import SaveStrategy
from trainmaster.training.document import Document


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    steps: int
    """Of the whole training."""
    steps_per_epoch: int
    logging_steps: int
    eval_strategy: str
    eval_steps: int
    save_strategy: SaveStrategy
    save_steps: int

    @classmethod
    def of(cls, document: Document, *, steps_per_epoch: int) -> Self:
        parameters, checkpoint = document.hyperparameters, document.output.checkpoint
        most = int(parameters["max_steps"] or 0)
        epochs = float(parameters["num_train_epochs"] or 0)
        return cls(
            steps=most if most > 0 else math.ceil(epochs * steps_per_epoch),
            steps_per_epoch=steps_per_epoch,
            logging_steps=int(parameters["logging_steps"] or 1),
            eval_strategy=str(parameters["eval_strategy"] or "no"),
            eval_steps=int(parameters["eval_steps"] or checkpoint.save_steps),
            save_strategy=checkpoint.save_strategy,
            save_steps=checkpoint.save_steps,
        )

    def logs(self, step: int) -> bool:
        # A run shorter than logging_steps would otherwise never report its loss.
        return step % self.logging_steps == 0 or step == self.steps

    def evaluates(self, step: int) -> bool:
        if self.eval_strategy == "steps":
            return step % self.eval_steps == 0 or step == self.steps
        return self.eval_strategy == "epoch" and self._ends_epoch(step)

    def saves(self, step: int) -> bool:
        if self.save_strategy is SaveStrategy.STEPS:
            return step % self.save_steps == 0 or step == self.steps
        return self._ends_epoch(step)

    def _ends_epoch(self, step: int) -> bool:
        return step % self.steps_per_epoch == 0 or step == self.steps

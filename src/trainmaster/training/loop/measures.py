"""What is measured of batches. It stays on the device until it is asked for: a look at it waits for the steps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainmaster.engine.cross_entropy import CrossEntropy
from trainmaster.training.loop.batches import Batch
from trainmaster.training.loop.peers import Peers

_LOSS, _ENTROPY, _CORRECT, _TRAINED, _ROWS = range(5)


class Measures:
    """Of the batches of some steps, or of an evaluation. All ranks ask together, and get what all of them measured."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._values: list[Tensor] = []
        self._counts: list[tuple[int, int]] = []
        self._steps_before: list[int] = []
        self.steps = 0

    def add(self, batch: Batch, losses: CrossEntropy) -> None:
        values = (losses.loss, losses.entropy, losses.correct)
        self._values.append(torch.stack([each.detach().double() for each in values]))
        self._counts.append((len(batch.targets), batch.rows))
        self._steps_before.append(self.steps)

    def of_steps(self) -> dict[str, float]:
        """The mean loss of the steps, and means over batches. A loss that is not finite counts as those before it."""
        table = self._table(len(self._values))
        total = 0.0
        for loss, steps in zip(table[:, _LOSS].tolist(), self._steps_before, strict=True):
            total += loss if math.isfinite(loss) else total / (1 + steps)
        return {"loss": total / self.steps, **_means(table)}

    def of_evaluation(self, rounds: int) -> dict[str, float]:
        """The mean over rows of their batches' losses. `rounds`: the most batches that a rank has."""
        table = self._table(rounds, by_rows=True)
        return {"loss": float(table[:, _LOSS].sum() / table[:, _ROWS].sum()), **_means(table)}

    def _table(self, rounds: int, *, by_rows: bool = False) -> Tensor:
        """A line for each batch, summed over the ranks; with `by_rows`, losses count as often as there are rows."""
        table = torch.zeros(rounds, 5, dtype=torch.float64)
        if self._values:
            table[: len(self._values), :_TRAINED] = torch.stack(self._values).cpu()
            table[: len(self._values), _TRAINED:] = torch.tensor(self._counts)
        if by_rows:
            table[:, _LOSS] *= table[:, _ROWS]
        return self._peers.sum(table.to(self._peers.device)).cpu()


def _means(table: Tensor) -> dict[str, float]:
    trained = table[:, _TRAINED].clamp(min=1)
    names = {"entropy": _ENTROPY, "mean_token_accuracy": _CORRECT}
    return {name: float((table[:, column] / trained).mean()) for name, column in names.items()}

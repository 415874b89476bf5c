"""What is measured of batches. It stays on the device, and is brought to the host without waiting for the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trainmaster.training.loop.batches import Batch
from trainmaster.training.loop.objectives import Losses, Measure, Per
from trainmaster.training.loop.peers import Peers

_LOSS, _TRAINED, _TOKENS, _ROWS = 0, -3, -2, -1
"""Columns of the table; between the first two are the sums of the measures."""


class Measures:
    """Of the batches of some steps, or of an evaluation, on one rank."""

    def __init__(self, peers: Peers, measures: Sequence[Measure]) -> None:
        self._peers, self._measures = peers, measures
        self._values: list[Tensor] = []
        self._counts: list[tuple[int, int, int]] = []
        self._steps_before: list[int] = []
        self.steps = 0

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens, _ in self._counts)

    def add(self, batch: Batch, losses: Losses) -> None:
        self._values.append(torch.stack([each.detach().double() for each in losses]))
        self._counts.append((len(batch.targets), len(batch.tokens), batch.rows))
        self._steps_before.append(self.steps)

    def send(self, norm: Tensor) -> SentSteps:
        """Begin to bring to the host what all ranks have measured in the steps, with the last one's gradient norm."""
        return SentSteps(self._table(len(self._values)), self._measures, norm, self._steps_before, self.steps)

    def of_evaluation(self, rounds: int) -> dict[str, float]:
        """The mean over rows of their batches' losses. `rounds`: the most batches that a rank has."""
        table = self._table(rounds, by_rows=True).cpu()
        return {"loss": float(table[:, _LOSS].sum() / table[:, _ROWS].sum()), **_means(table, self._measures)}

    def _table(self, rounds: int, *, by_rows: bool = False) -> Tensor:
        """A line for each batch, summed over the ranks; with `by_rows`, losses count as often as there are rows."""
        device = self._peers.device
        table = torch.zeros(rounds, 4 + len(self._measures), dtype=torch.float64, device=device)
        if self._values:
            counts = torch.tensor(self._counts, dtype=torch.float64)
            counts = counts.pin_memory() if device.type == "cuda" else counts
            table[: len(self._values), :_TRAINED] = torch.stack(self._values)
            table[: len(self._values), _TRAINED:] = counts.to(device, non_blocking=True)
        if by_rows:
            table[:, _LOSS] *= table[:, _ROWS]
        return self._peers.sum(table)


class SentSteps:
    """The measures of some steps, on their way to the host."""

    def __init__(
        self, table: Tensor, measures: Sequence[Measure], norm: Tensor, steps_before: list[int], steps: int
    ) -> None:
        self._measures = measures
        self._table, self._norm = (each.to("cpu", non_blocking=True) for each in (table, norm))
        self._steps_before, self._steps = steps_before, steps
        self._arrived = torch.cuda.Event() if table.is_cuda else None  # type: ignore[no-untyped-call]
        if self._arrived is not None:
            self._arrived.record()

    def metrics(self) -> dict[str, float]:
        """The mean loss of the steps, and means over batches; `num_tokens` are those of the steps. Waits for them.

        A loss that is not finite counts as those before it.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        total = 0.0
        for loss, steps in zip(self._table[:, _LOSS].tolist(), self._steps_before, strict=True):
            total += loss if math.isfinite(loss) else total / (1 + steps)
        tokens = float(self._table[:, _TOKENS].sum())
        own = {"loss": total / self._steps, "grad_norm": float(self._norm), "num_tokens": tokens}
        return own | _means(self._table, self._measures)


def _means(table: Tensor, measures: Sequence[Measure]) -> dict[str, float]:
    counts = {Per.TRAINED: table[:, _TRAINED].clamp(min=1), Per.ROWS: table[:, _ROWS].clamp(min=1)}
    columns = {measure.name: column for column, measure in enumerate(measures, start=_LOSS + 1)}
    means: dict[str, float] = {}
    for measure in measures:
        values = table[:, columns[measure.name]]
        if isinstance(measure.per, Per):
            means[measure.name] = float((values / counts[measure.per]).mean())
        elif measure.per is not None and (count := float(table[:, columns[measure.per]].sum())):
            means[measure.name] = float(values.sum()) / count
    return means

"""From tokenized rows to batches: which rows a step trains on, laid end to end, ready for a device.

Rows come in the order in which TRL's loop takes them, and packs are TRL's, so that both loops take the same course.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from torch import Tensor

from trainmaster.training.data.dataset import IGNORED, LIKED, SEQ_LENGTHS

T = TypeVar("T")

ANY_ROW = np.zeros(1, dtype=np.int64)
"""A row for a rank that has no more rows, while the others need its shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Which rows a rank's batches have, in every epoch, and which batches make a step."""

    rows: int
    batch_size: int
    accumulation: int
    seed: int
    ranks: int
    rank: int

    @property
    def batches_per_epoch(self) -> int:
        return math.ceil(math.ceil(self.rows / self.batch_size) / self.ranks)

    @property
    def steps_per_epoch(self) -> int:
        return max(1, math.ceil(self.batches_per_epoch / self.accumulation))

    def step(self, number: int) -> list[np.ndarray]:
        """The rows of each of this rank's batches in a step, counted from 0 over all epochs."""
        epoch, place = divmod(number, self.steps_per_epoch)
        return self._batches(epoch)[place * self.accumulation : (place + 1) * self.accumulation]

    def epoch_after(self, steps: int) -> float:
        """How many epochs are done after so many steps."""
        epoch, place = divmod(steps, self.steps_per_epoch)
        return epoch + min(1.0, place * self.accumulation / self.batches_per_epoch)

    def _batches(self, epoch: int) -> list[np.ndarray]:
        order = _shuffled(self.rows, (self.seed + epoch) % 2**64)
        if self.ranks > 1:
            # Every rank has as many batches, and all are full: the first rows come again.
            first = order[: self.ranks * self.batch_size]
            missing = self.batches_per_epoch * self.ranks * self.batch_size - self.rows
            order = np.concatenate([order, np.resize(first, missing)])
        starts = range(self.rank * self.batch_size, len(order), self.ranks * self.batch_size)
        return [order[start : start + self.batch_size] for start in starts]


def evaluation_batches(rows: int, batch_size: int, *, ranks: int, rank: int) -> list[np.ndarray]:
    """The rows of a rank's batches in an evaluation: each row once, in its order."""
    starts = range(rank * batch_size, rows, ranks * batch_size)
    return [np.arange(start, min(start + batch_size, rows)) for start in starts]


_last_shuffled: tuple[tuple[int, int], np.ndarray] | None = None


def _shuffled(rows: int, seed: int) -> np.ndarray:
    """The order of an epoch, kept until another is asked for: of many rows it takes long to make."""
    global _last_shuffled
    if _last_shuffled is None or _last_shuffled[0] != (rows, seed):
        _last_shuffled = (rows, seed), torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).numpy()
    return _last_shuffled[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences end to end. Where a token is trained on, its place is that of the token before it."""

    tokens: Tensor
    positions: Tensor
    trained: Tensor
    """Places whose next token is trained on."""
    targets: Tensor
    """The tokens after them."""
    ends: Tensor
    """0 and the cumulative lengths, int32."""
    lengths: Sequence[int]
    rows: int
    reference: Tensor | None = None
    """Of each row's sequences, the logprob by the model that the training began with: [rows, sequences]."""
    liked: Tensor | None = None
    """Of single answers, whether they were: bool [rows]."""

    def pinned(self) -> Batch:
        """In page-locked memory, from which a copy to a device does not wait for it."""
        return self._each(Tensor.pin_memory)

    def to(self, device: torch.device) -> Batch:
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(
            tokens=change(self.tokens),
            positions=change(self.positions),
            trained=change(self.trained),
            targets=change(self.targets),
            ends=change(self.ends),
            lengths=self.lengths,
            rows=self.rows,
            reference=None if self.reference is None else change(self.reference),
            liked=None if self.liked is None else change(self.liked),
        )


class Rows:
    """Tokenized rows; packed ones and pairs are several sequences each."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset.with_format("arrow")
        self._several = SEQ_LENGTHS in dataset.column_names
        self.reference: np.ndarray | None = None
        """Of each row's sequences, the logprob by the model that the training begins with: [rows, sequences]."""

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, indices: np.ndarray) -> Batch:
        tokens, labels, lengths = self._sequences(indices)
        lengths = lengths[lengths > 0]
        ends = np.cumsum(lengths)
        following = np.append(labels[1:], IGNORED)
        following[ends - 1] = IGNORED
        trained = np.flatnonzero(following != IGNORED)
        positions = np.arange(len(tokens)) - np.repeat(ends - lengths, lengths)
        return Batch(
            tokens=torch.from_numpy(tokens),
            positions=torch.from_numpy(positions),
            trained=torch.from_numpy(trained),
            targets=torch.from_numpy(following[trained]),
            ends=torch.from_numpy(np.append(0, ends).astype(np.int32)),
            lengths=lengths.tolist(),
            rows=len(indices),
            reference=None if self.reference is None else torch.from_numpy(self.reference[indices]),
            liked=self._liked(indices),
        )

    def _sequences(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens and labels of some rows' sequences, end to end, and the sequences' lengths."""
        table: pa.Table = self._dataset[indices]
        lengths = _values(table, SEQ_LENGTHS) if self._several else _lengths(table, "input_ids")
        return _values(table, "input_ids"), _values(table, "labels"), lengths

    def _liked(self, indices: np.ndarray) -> Tensor | None:  # noqa: ARG002
        return None


class JudgedRows(Rows):
    """Single answers: each row is its answer, and then its prompt with the answer of the next row.

    How likely the model finds answers to other prompts tells how far it has moved as a whole.
    """

    def __init__(self, dataset: Dataset, longest: int) -> None:
        super().__init__(dataset)
        self._longest = longest

    def _sequences(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        own, others = self._answers(indices), self._answers((indices + 1) % len(self))
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        for (tokens, labels, start), (other_tokens, other_labels, other_start) in zip(own, others, strict=True):
            parts.append((tokens, labels))
            mixed = [
                np.concatenate([each[:start], other[other_start:]])[: self._longest]
                for each, other in ((tokens, other_tokens), (labels, other_labels))
            ]
            parts.append((mixed[0], mixed[1]))
        lengths = np.array([len(tokens) for tokens, _ in parts])
        return np.concatenate([each for each, _ in parts]), np.concatenate([each for _, each in parts]), lengths

    def _answers(self, indices: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, int]]:
        """Of some rows the tokens, the labels, and where the answer begins."""
        tokens, labels, lengths = super()._sequences(indices)
        cuts = np.cumsum(lengths)[:-1]
        rows = zip(np.split(tokens, cuts), np.split(labels, cuts), strict=True)
        return [(own, marks, int(np.argmax(marks != IGNORED))) for own, marks in rows]

    def _liked(self, indices: np.ndarray) -> Tensor | None:
        table: pa.Table = self._dataset[indices]
        return torch.tensor(table.column(LIKED).to_pylist())


def _values(table: pa.Table, name: str) -> np.ndarray:
    parts = [_flat(chunk) for chunk in table.column(name).chunks]
    return np.concatenate(parts).astype(np.int64)


def _flat(chunk: Any) -> np.ndarray:
    flat: np.ndarray = chunk.flatten().to_numpy()
    return flat


def _lengths(table: pa.Table, name: str) -> np.ndarray:
    return np.concatenate([chunk.value_lengths().to_numpy() for chunk in table.column(name).chunks]).astype(np.int64)


def read_ahead(values: Iterator[T]) -> Iterator[T]:
    """The same values, each made by a thread while the one before is worked on."""
    with ThreadPoolExecutor(1, thread_name_prefix="rows") as reader:
        coming = reader.submit(next, values, None)
        while (value := coming.result()) is not None:
            coming = reader.submit(next, values, None)
            yield value

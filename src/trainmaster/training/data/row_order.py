"""Which rows are trained on, which are kept for validation, and in which order. Pure.

Rows are ordered by a hash of the seed and their place, so that the choice is the same on every machine and with every
version of every library, and a larger part of a source holds a smaller one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainmaster.training.data.config import Sampling
from trainmaster.training.errors import InputError

Indices = NDArray[np.int64]
_SPLIT = 2**32  # above every index of a source: its own stream of hashes


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Rows by their place among all rows of all sources."""

    train: Indices
    evaluation: Indices
    used: tuple[int, ...]
    """How many rows of each source are used."""


def select(counts: Sequence[int], samplings: Sequence[Sampling], *, validation_split: float, seed: int) -> Selection:
    """Choose rows.

    `ratio` and then `max_samples` take a part of a source. Weights then cut sources down to their shares: the one that
    is shortest for its weight is used whole. No row is used twice.

    Args:
        counts: how many rows each source has.
        samplings: which part of each is wanted.
        validation_split: the share of the chosen rows that is kept for validation; above 0, at least one row.
        seed: another seed is another choice.

    Raises:
        InputError: nothing is left to train on.
    """
    wanted = _shares([_part(count, each) for count, each in zip(counts, samplings, strict=True)], samplings)
    starts = np.concatenate([[0], np.cumsum(counts)])
    chosen = [
        starts[source] + _order(seed, source, count)[:take]
        for source, (count, take) in enumerate(zip(counts, wanted, strict=True))
    ]
    together = np.concatenate(chosen) if chosen else np.empty(0, np.int64)
    shuffled = together[_order(seed, _SPLIT, len(together))]
    held_back = max(round(validation_split * len(shuffled)), 1 if validation_split else 0)
    if not len(shuffled):
        raise InputError("no row is left: the sources are empty, or their filters keep nothing")
    if validation_split and held_back >= len(shuffled):
        raise InputError(
            f"validation_split {validation_split:g} of {len(shuffled)} rows is {held_back}, which leaves nothing to "
            "train on; change it, or bring more rows"
        )
    return Selection(train=shuffled[held_back:], evaluation=shuffled[:held_back], used=tuple(wanted))


def _part(count: int, sampling: Sampling) -> int:
    take = count if sampling.ratio is None or not count else max(1, round(count * sampling.ratio))
    return take if sampling.max_samples is None else min(take, sampling.max_samples)


def _shares(available: Sequence[int], samplings: Sequence[Sampling]) -> list[int]:
    """What the weights leave of what there is; a source without a weight has 1."""
    if all(sampling.weight is None for sampling in samplings):
        return list(available)
    weights = [1.0 if sampling.weight is None else float(sampling.weight) for sampling in samplings]
    rows_for_weight_one = min(count / weight for count, weight in zip(available, weights, strict=True))
    return [min(count, round(weight * rows_for_weight_one)) for count, weight in zip(available, weights, strict=True)]


def _order(seed: int, stream: int, count: int) -> Indices:
    """A permutation: the places of `count` rows, by their hashes."""
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(np.uint64(seed)) ^ np.uint64(stream))
        keys = _mix(np.arange(count, dtype=np.uint64) ^ mixed)
    return np.argsort(keys, kind="stable")


def _mix(value: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64: every bit of the input changes half of the bits of the output."""
    value = np.asarray(value, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))

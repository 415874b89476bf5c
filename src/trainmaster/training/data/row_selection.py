"""Filters rows, and chooses those for training and for validation, and their order. Pure.

Rows are ordered by a hash of the seed and their index, so that the choice is the same on every machine and with every
version of every library, and a larger part of a source contains a smaller one.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainmaster.server.core.spec.data import Filter, FilterOp, Sampling
from trainmaster.training.data.formats import kind_of
from trainmaster.training.steps import InputError

Row = Mapping[str, Any]
MISSING = object()
"""What `value_at` gives for a column that a row does not have."""


class FilterError(Exception):
    """A filter cannot be applied to a row; the caller adds which row."""

    def __init__(self, column: str, problem: str) -> None:
        super().__init__(problem)
        self.column = column


def predicate(condition: Filter, *, textual: bool) -> Callable[[Row], bool]:
    """A function that tells whether a row is kept. Raises InputError where the filter itself makes no sense.

    A row without the column, or with null there, is kept by `is_null`, `ne`, `not_in` and `not_contains` alone.
    `textual`: every value of the source is text, as in CSV, and a number in the filter makes the row's text a number.
    """
    column, value = condition.column, condition.value
    test = _test(condition.op, column, value)
    read = _reader(value) if textual else _as_it_is

    def keeps(row: Row) -> bool:
        found = value_at(row, column)
        try:
            return test(None if found is MISSING or found is None else read(found))
        except _ConflictError as error:
            raise FilterError(column, str(error)) from None

    return keeps


def value_at(row: Row, column: str) -> Any:
    """The value of a column; a dotted name leads into objects where no column has that very name."""
    if column in row:
        return row[column]
    found: Any = row
    for part in column.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return MISSING
        found = found[part]
    return found


class _ConflictError(Exception):
    pass


_OPPOSITES: Mapping[FilterOp, FilterOp] = {
    FilterOp.NOT_NULL: FilterOp.IS_NULL,
    FilterOp.NE: FilterOp.EQ,
    FilterOp.NOT_IN: FilterOp.IN,
    FilterOp.NOT_CONTAINS: FilterOp.CONTAINS,
}
_ORDERS = {FilterOp.LT: operator.lt, FilterOp.LE: operator.le, FilterOp.GT: operator.gt, FilterOp.GE: operator.ge}


def _test(op: FilterOp, column: str, value: object) -> Callable[[Any], bool]:
    if op in _OPPOSITES:
        opposite = _test(_OPPOSITES[op], column, value)
        return lambda found: not opposite(found)
    match op:
        case FilterOp.IS_NULL:
            return lambda found: found is None
        case FilterOp.EQ:
            return lambda found: _same(found, value)
        case FilterOp.IN:
            values = value if isinstance(value, list) else [value]
            return lambda found: any(_same(found, each) for each in values)
        case FilterOp.CONTAINS:
            return lambda found: found is not None and _contains(found, value)
        case FilterOp.MATCHES:
            pattern = _pattern(column, value)
            return lambda found: found is not None and pattern.search(_text(found)) is not None
        case _:
            return lambda found: found is not None and _ORDERS[op](*_comparable(found, value))


def _as_it_is(found: Any) -> Any:
    return found


def _reader(value: Any) -> Callable[[Any], Any]:
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, bool):
        return lambda found: {"true": True, "false": False}.get(str(found).strip().lower(), found)
    return _number if isinstance(first, int | float) else _as_it_is


def _number(found: Any) -> Any:
    try:
        return int(found)
    except ValueError:
        try:
            return float(found)
        except ValueError:
            return found


def _same(found: Any, value: Any) -> bool:
    # In Python 1 equals True; in data it does not.
    return isinstance(found, bool) == isinstance(value, bool) and bool(found == value)


def _contains(found: Any, value: Any) -> bool:
    if isinstance(found, str):
        if not isinstance(value, str):
            raise _ConflictError(f"is text, and the filter looks in it for {value!r}, which is none")
        return value in found
    if isinstance(found, list):
        return any(_same(each, value) for each in found)
    raise _ConflictError(f"is {kind_of(found)}; `contains` needs text or a list")


def _comparable(found: Any, value: Any) -> tuple[Any, Any]:
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (found, value))
    if not numbers and not (isinstance(found, str) and isinstance(value, str)):
        raise _ConflictError(f"is {kind_of(found)} ({found!r:.80}), and the filter compares it with {value!r}")
    return found, value


def _text(found: Any) -> str:
    if not isinstance(found, str):
        raise _ConflictError(f"is {kind_of(found)}; `matches` needs text")
    return found


def _pattern(column: str, value: object) -> re.Pattern[str]:
    try:
        return re.compile(str(value))
    except re.error as error:
        raise InputError(f"filter on column '{column}': {value!r} is not a regular expression: {error}") from None


Indices = NDArray[np.int64]
_SPLIT = 2**32  # above every index of a source: a stream of hashes of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    train: Indices
    evaluation: Indices
    used: tuple[int, ...]


def select(
    counts: Sequence[int],
    samplings: Sequence[Sampling | None],
    *,
    validation_split: float,
    seed: int,
    validation: Sequence[bool] | None = None,
) -> Selection:
    """Choose the rows to train on and to validate with. Raises InputError where nothing is left to train on.

    `ratio` and then `max_samples` take a part of a source. Weights then cut sources down to their shares: the one that
    is shortest for its weight is used whole. No row is used twice. With a `validation_split`, at least one row is kept
    for validation. `validation` says of each source whether all of its rows are for that.
    """
    apart = [False] * len(counts) if validation is None else validation
    parts = [_part(count, each) for count, each in zip(counts, samplings, strict=True)]
    trained = [source for source, is_apart in enumerate(apart) if not is_apart]
    wanted = list(parts)
    shares = _shares([parts[each] for each in trained], [samplings[each] for each in trained])
    for source, share in zip(trained, shares, strict=True):
        wanted[source] = share
    starts = np.concatenate([[0], np.cumsum(counts)])
    chosen = [
        starts[source] + _order(seed, source, count)[:take]
        for source, (count, take) in enumerate(zip(counts, wanted, strict=True))
    ]
    together = np.concatenate([chosen[each] for each in trained]) if trained else np.empty(0, np.int64)
    shuffled = together[_order(seed, _SPLIT, len(together))]
    held_back = max(round(validation_split * len(shuffled)), 1 if validation_split else 0)
    if not len(shuffled):
        raise InputError("no row is left: the sources are empty, or their filters keep nothing")
    if validation_split and held_back >= len(shuffled):
        raise InputError(
            f"validation_split {validation_split:g} of {len(shuffled)} rows is {held_back}, which leaves nothing to "
            "train on; change it, or bring more rows"
        )
    if any(apart) and not sum(wanted[source] for source, is_apart in enumerate(apart) if is_apart):
        raise InputError("no row is left of the sources for validation: they are empty, or their filters keep nothing")
    others = [np.sort(chosen[source]) for source, is_apart in enumerate(apart) if is_apart]
    return Selection(
        train=shuffled[held_back:],
        evaluation=np.concatenate([shuffled[:held_back], *others]),
        used=tuple(wanted),
    )


def _part(count: int, sampling: Sampling | None) -> int:
    if sampling is None:
        return count
    take = count if sampling.ratio is None or not count else max(1, round(count * sampling.ratio))
    return take if sampling.max_samples is None else min(take, sampling.max_samples)


def _shares(available: Sequence[int], samplings: Sequence[Sampling | None]) -> list[int]:
    """Cut sources down to their weights; a source without a weight has 1."""
    given = [sampling.weight if sampling else None for sampling in samplings]
    if all(weight is None for weight in given):
        return list(available)
    weights = [1.0 if weight is None else weight for weight in given]
    rows_for_weight_one = min(count / weight for count, weight in zip(available, weights, strict=True))
    return [min(count, round(weight * rows_for_weight_one)) for count, weight in zip(available, weights, strict=True)]


def _order(seed: int, stream: int, count: int) -> Indices:
    with np.errstate(over="ignore"):
        keys = _mix(np.arange(count, dtype=np.uint64) ^ _mix(_mix(np.uint64(seed)) ^ np.uint64(stream)))
    return np.argsort(keys, kind="stable")


def _mix(value: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64."""
    value = np.asarray(value, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))

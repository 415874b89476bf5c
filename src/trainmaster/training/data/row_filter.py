"""`sources[].filters`: which rows are kept. Pure."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from trainmaster.training.data.config import Filter
from trainmaster.training.errors import InputError

Row = Mapping[str, Any]
MISSING = object()
"""What `value_at` gives for a column that a row does not have."""


class FilterError(Exception):
    """A filter makes no sense for a row; the message says why. The reader adds which row."""

    def __init__(self, column: str, problem: str) -> None:
        super().__init__(problem)
        self.column = column


def predicate(condition: Filter, *, textual: bool) -> Callable[[Row], bool]:
    """A function that says whether a row is kept.

    A row without the column, or with null there, is kept by `is_null`, `ne`, `not_in` and `not_contains` alone.

    Args:
        condition: the filter.
        textual: every value of the source is text, as in CSV: a number in the filter makes the row's text a number.

    Raises:
        InputError: the filter itself makes no sense.
    """
    column, value = condition.column, condition.value
    test = _test(condition)
    read = _reader(value) if textual else _as_it_is

    def keeps(row: Row) -> bool:
        found = value_at(row, column)
        try:
            return test(None if found is MISSING or found is None else read(found))
        except _ConflictError as error:
            raise FilterError(column, str(error)) from None

    return keeps


def value_at(row: Row, column: str) -> Any:
    """The value of a column; a name with dots leads into objects where no column has that very name."""
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


def _test(condition: Filter) -> Callable[[Any], bool]:
    op, value = condition.op, condition.value
    match op:
        case "is_null":
            return lambda found: found is None
        case "not_null":
            return lambda found: found is not None
        case "eq":
            return lambda found: _same(found, value)
        case "ne":
            return lambda found: not _same(found, value)
        case "in":
            return lambda found: found is not None and any(_same(found, each) for each in value)
        case "not_in":
            return lambda found: found is None or not any(_same(found, each) for each in value)
        case "contains":
            return lambda found: found is not None and _contains(found, value)
        case "not_contains":
            return lambda found: found is None or not _contains(found, value)
        case "matches":
            pattern = _pattern(condition.column, value)
            return lambda found: found is not None and pattern.search(_text(found)) is not None
        case "lt" | "le" | "gt" | "ge":
            compare = _ORDERS[op]
            return lambda found: found is not None and compare(*_comparable(found, value))
        case _:
            raise InputError(f"filter on column '{condition.column}': there is no op '{op}'")


_ORDERS: Mapping[str, Callable[[Any, Any], bool]] = MappingProxyType(
    {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
)


def _as_it_is(found: Any) -> Any:
    return found


def _reader(value: Any) -> Callable[[Any], Any]:
    """How a text cell is read so that it can be compared with the filter's value."""
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, bool):
        return lambda found: {"true": True, "false": False}.get(str(found).strip().lower(), found)
    if isinstance(first, int | float):
        return _number
    return _as_it_is


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


def _pattern(column: str, value: Any) -> re.Pattern[str]:
    try:
        return re.compile(value)
    except (re.error, TypeError) as error:
        raise InputError(f"filter on column '{column}': {value!r} is no regular expression: {error}") from None


def kind_of(value: Any) -> str:
    """What a value is, in words.

    >>> kind_of("a"), kind_of(1.5), kind_of([]), kind_of(None)
    ('text', 'a number', 'a list', 'null')
    """
    match value:
        case None:
            return "null"
        case bool():
            return "a truth value"
        case str():
            return "text"
        case int() | float():
            return "a number"
        case list() | tuple():
            return "a list"
        case Mapping():
            return "an object"
        case _:
            return f"a {type(value).__name__}"

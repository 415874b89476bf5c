"""Lists of any length in statements: databases limit the parameters of one (PostgreSQL: 65,535)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TypeVar

T = TypeVar("T")

VALUES_PER_STATEMENT = 500


def portions(values: Collection[T]) -> Iterator[list[T]]:
    """The values in lists that are short enough for one statement; none when there are no values."""
    listed = list(values)
    for start in range(0, len(listed), VALUES_PER_STATEMENT):
        yield listed[start : start + VALUES_PER_STATEMENT]

"""`split` of a data source: `train`, `train[:10%]`, `train[10:20]`, `train[-5%:]+test`. Pure.

The syntax is that of Hugging Face datasets: a split's name, optionally with a slice of its rows, several joined by `+`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

_BOUND = r"(-?[0-9]+%?)?"
_SLICE = re.compile(rf"{_BOUND}:{_BOUND}")
_PART = re.compile(r"(?P<name>[\w.-]+)(?:\[(?P<rows>[^\]]*)\])?")
_EXAMPLES = "write it like train, train[:1000], train[10%:20%] or train+test"


@dataclass(frozen=True, slots=True)
class Bound:
    """Where a slice begins or ends: a row, or a percentage of all rows; a negative one counts from the end."""

    value: int
    percent: bool = False

    @classmethod
    def read(cls, text: str) -> Self:
        """A bound as it is written."""
        percent = text.endswith("%")
        value = int(text.removesuffix("%"))
        if percent and abs(value) > 100:
            raise ValueError(f"{text} is more than 100%")
        return cls(value, percent)

    def __str__(self) -> str:
        return f"{self.value}%" if self.percent else str(self.value)

    @property
    def needs_count(self) -> bool:
        """Whether its place depends on how many rows there are."""
        return self.percent or self.value < 0

    def place(self, count: int) -> int:
        """Its place among so many rows. Half a row is rounded up."""
        place = (abs(self.value) * count * 2 + 100) // 200 if self.percent else abs(self.value)
        return max(0, min(count, count - place if self.value < 0 else place))


@dataclass(frozen=True, slots=True)
class Slice:
    """Some consecutive rows of a split; by default all of them."""

    start: Bound | None = None
    stop: Bound | None = None

    @classmethod
    def read(cls, text: str) -> Self:
        """A slice as it stands between brackets.

        Raises:
            ValueError: it is written otherwise.
        """
        found = _SLICE.fullmatch(text)
        if found is None:
            raise ValueError(f"[{text}] is no slice; {_EXAMPLES}")
        start, stop = (Bound.read(bound) if bound else None for bound in found.groups())
        return cls(start, stop)

    def __str__(self) -> str:
        return f"{'' if self.start is None else self.start}:{'' if self.stop is None else self.stop}"

    def places(self, count: Callable[[], int]) -> tuple[int, int | None]:
        """The first row, and the one after the last; None: until the end. Rows are counted only where that matters."""
        bounds = [bound for bound in (self.start, self.stop) if bound is not None]
        if any(bound.needs_count for bound in bounds):
            total = count()
            return (
                0 if self.start is None else self.start.place(total),
                total if self.stop is None else self.stop.place(total),
            )
        return 0 if self.start is None else self.start.value, None if self.stop is None else self.stop.value


ALL_ROWS = Slice()


@dataclass(frozen=True, slots=True)
class SplitPart:
    """One split, or some of its rows."""

    name: str
    rows: Slice = ALL_ROWS

    def __str__(self) -> str:
        return self.name if self.rows == ALL_ROWS else f"{self.name}[{self.rows}]"


def read_split(text: str) -> tuple[SplitPart, ...]:
    """The parts of a split.

    >>> [str(part) for part in read_split("train[:10%] + test")]
    ['train[:10%]', 'test']

    Raises:
        ValueError: it is written otherwise.
    """
    return tuple(_part(part.strip()) for part in text.split("+"))


def _part(text: str) -> SplitPart:
    found = _PART.fullmatch(text)
    if found is None:
        raise ValueError(f"'{text}' is no split; {_EXAMPLES}")
    return SplitPart(found["name"], ALL_ROWS if found["rows"] is None else Slice.read(found["rows"]))

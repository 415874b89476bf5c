"""Small plots of series, drawn with the dots of braille characters. Pure text: no colours, no terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from trainmaster.cli.human_units import number

Point = tuple[float, float]

_EMPTY = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of a dot, by its row and column in a character."""
_NARROWEST = 8
_GREATEST = 8e307
"""Twice as much is still a number."""
_LONGEST = 1e8
"""Greater numbers are labelled by their power of ten."""


def plot(points: Sequence[tuple[float | None, float | None]], *, width: int, height: int) -> list[str]:
    """A series of (x, y) as lines of text that are at most `width` wide: the curve, its y axis and its x axis.

    A point without a finite y is left out, and the curve is not drawn across it. Where a point has no x, the points
    are counted.
    """
    runs = _runs(points)
    every = [point for run in runs for point in run]
    if not every:
        return []
    low, high = _range([y for _, y in every])
    first, last = every[0][0], max(x for x, _ in every)
    top, bottom = _label(high), _label(low)
    gutter = max(len(top), len(bottom))
    columns = max(width - gutter - 2, _NARROWEST)
    canvas = _Canvas(columns, height)
    for run in runs:
        placed = [
            (
                round((x - first) / (last - first) * (canvas.right)) if last > first else canvas.right // 2,
                round((high - y) / (high - low) * canvas.bottom),
            )
            for x, y in run
        ]
        canvas.dot(*placed[0])
        for one, other in itertools.pairwise(placed):
            canvas.line(one, other)
    labels = [top, *[""] * (height - 2), bottom] if height > 1 else [top]
    lines = [
        f"{label:>{gutter}} {'┤' if label else '│'}{row}" for label, row in zip(labels, canvas.rows(), strict=True)
    ]
    return [*lines, *_x_axis(gutter, columns, first, last)]


def _runs(points: Sequence[tuple[float | None, float | None]]) -> list[list[Point]]:
    """The pieces of a curve, between the points that are none."""
    counted = any(x is None for x, _ in points)
    runs: list[list[Point]] = [[]]
    for index, (x, y) in enumerate(points):
        if y is None or not math.isfinite(y):
            runs.append([])
        else:
            runs[-1].append((float(index) if counted or x is None else float(x), min(max(y, -_GREATEST), _GREATEST)))
    return [run for run in runs if run]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low > 0 and math.isfinite(high - low):
        return low, high
    # A flat curve lies in the middle.
    room = abs(low) / 2 or 1.0
    return low - room, high + room


def _x_axis(gutter: int, columns: int, first: float, last: float) -> list[str]:
    begin, end = _label(first), _label(last)
    under = begin.center(columns).rstrip() if first == last else f"{begin} {end:>{columns - len(begin) - 1}}"
    return [f"{'':{gutter}} └{'─' * columns}", f"{'':{gutter}}  {under}"]


def _label(value: float) -> str:
    return number(value) if abs(value) < _LONGEST else f"{value:.3g}"


class _Canvas:
    """Dots in characters, each of which has two columns and four rows of them."""

    def __init__(self, columns: int, rows: int) -> None:
        self._cells = [[_EMPTY] * columns for _ in range(rows)]
        self.right = columns * 2 - 1
        self.bottom = rows * 4 - 1

    def dot(self, x: int, y: int) -> None:
        self._cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]

    def line(self, one: tuple[int, int], other: tuple[int, int]) -> None:
        steps = max(abs(other[0] - one[0]), abs(other[1] - one[1]), 1)
        for step in range(steps + 1):
            part = step / steps
            self.dot(round(one[0] + (other[0] - one[0]) * part), round(one[1] + (other[1] - one[1]) * part))

    def rows(self) -> list[str]:
        return ["".join(map(chr, row)) for row in self._cells]

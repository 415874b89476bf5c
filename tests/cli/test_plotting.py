"""Plots in a terminal."""

from __future__ import annotations

import math

import pytest

from trainmaster.cli.commands.metrics import plot


def dots(lines: list[str]) -> int:
    return sum((ord(character) - 0x2800).bit_count() for line in lines for character in line if character >= "\u2800")


def test_plot_has_its_axes_and_fits_its_width() -> None:
    points = [(step, math.exp(-step / 100)) for step in range(0, 500, 5)]
    for width in (30, 60, 100):
        lines = plot(points, width=width, height=6)
        assert len(lines) == 8
        assert max(map(len, lines)) <= width
        assert lines[0].lstrip().startswith("1 ┤")
        assert lines[-1].split() == ["0", "495"]
        # Falls: the first row begins with dots, the last one ends with them.
        assert lines[0].partition("┤")[2][0] > "\u2800"
        assert lines[5].partition("┤")[2][-1] > "\u2800"


def test_one_point_is_a_dot_in_the_middle() -> None:
    lines = plot([(7, 3.0)], width=40, height=4)
    assert dots(lines) == 1
    assert lines[-1].strip() == "7"


def test_flat_series_is_a_line() -> None:
    lines = plot([(1, 2.0), (9, 2.0)], width=40, height=4)
    assert dots(lines) > 30


@pytest.mark.parametrize("hole", [None, math.nan, math.inf, -math.inf])
def test_what_is_no_number_leaves_a_hole(hole: float | None) -> None:
    whole = [(step, float(step)) for step in range(100)]
    broken = [(step, hole if 30 < step < 60 else float(step)) for step in range(100)]
    assert 0 < dots(plot(broken, width=60, height=8)) < dots(plot(whole, width=60, height=8))


def test_nothing_but_holes_is_no_plot() -> None:
    assert plot([], width=40, height=4) == []
    assert plot([(1, None), (2, math.nan)], width=40, height=4) == []


def test_points_without_steps_are_counted() -> None:
    assert plot([(None, 1.0), (None, 2.0), (5, 3.0)], width=40, height=4)[-1].split() == ["0", "2"]


def test_huge_numbers_are_labelled_by_their_power() -> None:
    lines = plot([(0, 1e308), (1, -1e308)], width=40, height=4)
    assert max(map(len, lines)) <= 40
    assert "e+307" in lines[0]

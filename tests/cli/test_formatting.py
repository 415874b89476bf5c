from __future__ import annotations

import doctest

from trainmaster.cli import output


def test_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(output).failed == 0


def test_sparkline_of_many_points_has_its_width() -> None:
    assert len(output.sparkline([float(number) for number in range(1000)])) == 32


def test_seconds_between_counts_to_the_later_time() -> None:
    assert output.seconds_between("2026-01-01T00:00:00Z", "2026-01-01T01:00:00.5+00:00") == 3600.5

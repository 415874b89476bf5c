"""The command metrics, and the plots that it draws on a terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli.exits import UsageError
from trainmaster.cli.job_summary import PREPARED_PERCENT
from trainmaster.cli.options import JobArgument, JsonOption, connect, job_id_of
from trainmaster.cli.output import console, draw, number, print_json, print_json_line, sparkline, styled, table

if TYPE_CHECKING:
    from rich.table import Table

    from trainmaster.client.types import Metrics, MetricsReport, Series


PLOTTED = 6
"""Of more series than this only the first are drawn; the table has all."""
MOST_POINTS = 100_000
"""A plot shows the whole course, not its end alone."""
PLOT_HEIGHT = 8
WIDEST_PLOT = 80
NARROWEST_PLOT = 48
"""Two plots stand side by side where each has at least this much."""
_FIRST = ("loss", "eval_loss", "grad_norm", "learning_rate", "mean_token_accuracy", "tokens_per_s")
"""What a reader wants to see first, in this order."""


def metrics(
    job: JobArgument,
    name: Annotated[list[str], typer.Option("--name", help="Only this metric; may be repeated.")] = [],  # noqa: B006
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job has ended.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the numbers that a job reports: on a terminal as plots over the steps."""
    with connect() as client:
        job_id = job_id_of(client, job)
        if follow:
            for report in client.follow_metrics(job_id):
                if as_json:
                    print_json_line(report)
                elif values := _values(report, name):
                    typer.echo(f"step {report['step']}  {values}" if report["step"] is not None else values)
            return
        metrics = client.metrics(job_id, names=name, limit=None if as_json else MOST_POINTS)
    if as_json:
        print_json(metrics)
    elif metrics["series"]:
        _draw(metrics)
    elif metrics["notice"]:
        typer.echo(metrics["notice"])
    elif name and metrics["latest"]:
        raise UsageError(f"the job reports no metric {', '.join(name)}; it reports: {', '.join(metrics['latest'])}")
    else:
        typer.echo("No metrics yet." if metrics["status"] not in ("COMPLETED", "FAILED") else "No metrics.")


def _draw(metrics: Metrics) -> None:
    series = sorted(metrics["series"], key=_rank)
    out = console()
    if out.is_terminal:
        drawn = [each for each in series if any(value is not None for *_, value in each["points"])][:PLOTTED]
        abreast = 2 if len(drawn) > 1 and out.width >= 2 * NARROWEST_PLOT + 2 else 1
        width = min((out.width - 2 * (abreast - 1)) // abreast, WIDEST_PLOT)
        for start in range(0, len(drawn), abreast):
            _print_abreast(drawn[start : start + abreast], width)
    draw(_table(series, metrics))


def _rank(series: Series) -> tuple[int, str]:
    """By what a reader looks for; what was over before the training began comes last."""
    name = series["name"]
    if name == PREPARED_PERCENT:
        return len(_FIRST) + 1, name
    return _FIRST.index(name) if name in _FIRST else len(_FIRST), name


def _print_abreast(series: list[Series], width: int) -> None:
    out = console()
    plots = []
    for each in series:
        points = [(step, value) for step, _, value in each["points"]]
        plots.append([each["name"][:width], *plot(points, width=width, height=PLOT_HEIGHT), ""])
    for number_of_line, lines in enumerate(zip(*plots, strict=True)):
        style = "bold" if number_of_line == 0 else "cyan" if number_of_line <= PLOT_HEIGHT else "dim"
        text = "  ".join(f"{line:{width}}" for line in lines).rstrip()
        out.print(text, style=style, markup=False, no_wrap=True, crop=True)


def _table(series: list[Series], metrics: Metrics) -> Table:
    rows = []
    for each in series:
        values = [value for _, _, value in each["points"] if value is not None]
        if values:
            rows.append(
                (
                    each["name"],
                    styled(number(metrics["latest"].get(each["name"], values[-1])), "bold"),
                    number(min(values)),
                    number(max(values)),
                    styled(sparkline(values), "cyan"),
                )
            )
    return table(("METRIC", "LAST", "LEAST", "MOST", "COURSE"), rows, right=("LAST", "LEAST", "MOST"))


def _values(report: MetricsReport, names: list[str]) -> str:
    wanted = {name: value for name, value in report["values"].items() if not names or name in names}
    return "  ".join(f"{name} {number(value)}" for name, value in wanted.items())


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
    begin, end = _label(first), _label(last)
    under = begin.center(columns).rstrip() if first == last else f"{begin} {end:>{columns - len(begin) - 1}}"
    return [*lines, f"{'':{gutter}} └{'─' * columns}", f"{'':{gutter}}  {under}"]


def _runs(points: Sequence[tuple[float | None, float | None]]) -> list[list[Point]]:
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

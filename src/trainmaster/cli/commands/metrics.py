"""`trainmaster metrics`: the numbers that a job reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli.exits import UsageError
from trainmaster.cli.human_units import number, sparkline
from trainmaster.cli.options import JobArgument, JsonOption, job_id_of
from trainmaster.cli.output import console, draw, print_json, print_json_line, table
from trainmaster.cli.plot import plot
from trainmaster.cli.progress import PREPARED_PERCENT
from trainmaster.cli.session import connect

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


def run(
    job: JobArgument,
    name: Annotated[list[str], typer.Option("--name", help="Only this metric; may be repeated.")] = [],  # noqa: B006
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
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
            _print_abreast([_plot(each, width) for each in drawn[start : start + abreast]], width)
    draw(_table(series, metrics))


def _rank(series: Series) -> tuple[int, str]:
    """By what a reader looks for; what was over before the training began comes last."""
    name = series["name"]
    if name == PREPARED_PERCENT:
        return len(_FIRST) + 1, name
    return _FIRST.index(name) if name in _FIRST else len(_FIRST), name


def _plot(series: Series, width: int) -> list[str]:
    points = [(step, value) for step, _, value in series["points"]]
    return [series["name"][:width], *plot(points, width=width, height=PLOT_HEIGHT), ""]


def _print_abreast(plots: list[list[str]], width: int) -> None:
    out = console()
    for number_of_line, lines in enumerate(zip(*plots, strict=True)):
        style = "bold" if number_of_line == 0 else "cyan" if number_of_line <= PLOT_HEIGHT else "dim"
        text = "  ".join(f"{line:{width}}" for line in lines).rstrip()
        out.print(text, style=style, markup=False, no_wrap=True, crop=True)


def _table(series: list[Series], metrics: Metrics) -> Table:
    from rich.text import Text

    rows = []
    for each in series:
        values = [value for _, _, value in each["points"] if value is not None]
        if values:
            rows.append(
                (
                    Text(each["name"]),
                    Text(number(metrics["latest"].get(each["name"], values[-1])), style="bold"),
                    Text(number(min(values))),
                    Text(number(max(values))),
                    Text(sparkline(values), style="cyan"),
                )
            )
    return table(("METRIC", "LAST", "LEAST", "MOST", "COURSE"), rows, right=("LAST", "LEAST", "MOST"))


def _values(report: MetricsReport, names: list[str]) -> str:
    wanted = {name: value for name, value in report["values"].items() if not names or name in names}
    return "  ".join(f"{name} {number(value)}" for name, value in wanted.items())

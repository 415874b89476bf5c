"""`trainmaster metrics`: the numbers that a job reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli.formatting import number, sparkline
from trainmaster.cli.options import JobArgument, JsonOption, job_id_of
from trainmaster.cli.output import draw, print_json, print_json_line, table
from trainmaster.cli.session import connect

if TYPE_CHECKING:
    from trainmaster.sdk.types import Metrics, MetricsReport


def run(
    job: JobArgument,
    name: Annotated[list[str], typer.Option("--name", help="Only this metric; may be repeated.")] = [],  # noqa: B006
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the numbers that a job reports."""
    with connect() as client:
        job_id = job_id_of(client, job)
        if follow:
            for report in client.follow_metrics(job_id):
                if as_json:
                    print_json_line(report)
                elif values := _values(report, name):
                    typer.echo(f"step {report['step']}  {values}" if report["step"] is not None else values)
            return
        metrics = client.metrics(job_id, names=name)
    if as_json:
        print_json(metrics)
    elif metrics["series"]:
        _draw(metrics)
    else:
        typer.echo("No metrics yet." if metrics["status"] not in ("COMPLETED", "FAILED") else "No metrics.")


def _draw(metrics: Metrics) -> None:
    from rich.text import Text

    rows = []
    for series in metrics["series"]:
        values = [value for _, _, value in series["points"] if value is not None]
        if values:
            rows.append(
                (
                    Text(series["name"]),
                    Text(number(metrics["latest"].get(series["name"], values[-1])), style="bold"),
                    Text(number(min(values))),
                    Text(number(max(values))),
                    Text(sparkline(values), style="cyan"),
                )
            )
    draw(table(("METRIC", "LAST", "LEAST", "MOST", "COURSE"), rows, right=("LAST", "LEAST", "MOST")))


def _values(report: MetricsReport, names: list[str]) -> str:
    wanted = {name: value for name, value in report["values"].items() if not names or name in names}
    return "  ".join(f"{name} {number(value)}" for name, value in wanted.items())

"""`trainmaster usage`: what jobs held, and for how long."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli.exits import UsageError, say
from trainmaster.cli.human_units import clock
from trainmaster.cli.options import JsonOption
from trainmaster.cli.output import draw, print_json, table
from trainmaster.cli.session import connect

if TYPE_CHECKING:
    from rich.text import Text

    from trainmaster.client.types import UsageRow

_AGE = re.compile(r"(\d{1,6})([mhdw])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def run(
    since: Annotated[
        str, typer.Option("--since", metavar="WHEN", help="How far back: 30m, 12h, 7d, 4w, a date, or 'all'.")
    ] = "7d",
    until: Annotated[
        str | None, typer.Option("--until", metavar="WHEN", help="The same; by default up to now.", show_default=False)
    ] = None,
    by: Annotated[
        str, typer.Option("--by", metavar="WHAT", help="job, attempt, queue, account, day, or label:KEY.")
    ] = "queue",
    all_accounts: Annotated[bool, typer.Option("--all-accounts", help="Of every account.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what jobs used: GPUs and cores that they held, times how long they ran."""
    begin = None if since == "all" else _moment("--since", since)
    end = _moment("--until", until) if until else None
    with connect() as client:
        usage = client.results.usage(since=begin, until=end, group_by=by, all_accounts=all_accounts)
    if as_json:
        print_json(usage)
        return
    begun = "the beginning" if usage["from"] is None else clock(usage["from"])
    if not usage["rows"]:
        typer.echo(f"Nothing ran from {begun} to {clock(usage['to'])}.")
        return
    say(f"From {begun} to {clock(usage['to'])}; `--since` chooses another time.")
    from rich.text import Text

    rows = [_row(row, Text(row["key"] or "(none)")) for row in usage["rows"]]
    rows.append(_row(usage["total"], Text("total", style="dim")))
    heading = by.removeprefix("label:").upper()
    headings = (heading, "JOBS", "ATTEMPTS", "GPU-HOURS", "CPU-HOURS", "HOURS")
    draw(table(headings, rows, right=headings[1:]))
    if usage["truncated"]:
        typer.echo(f"Only the {len(usage['rows'])} greatest are shown; the total is of all.")


def _row(row: UsageRow, name: Text) -> tuple[Text, ...]:
    from rich.text import Text

    seconds = (row["gpu_seconds"], row["cpu_seconds"], row["wall_seconds"])
    return (
        name,
        Text(str(row["jobs"])),
        Text(str(row["attempts"])),
        *(Text(_hours(value)) for value in seconds),
    )


def _hours(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:,.2f}" if hours >= 0.1 or hours == 0 else f"{hours:.2g}"


def _moment(option: str, text: str) -> str:
    """A point in time, as the server reads it."""
    if ago := _AGE.fullmatch(text):
        return (datetime.now(UTC) - timedelta(**{_UNITS[ago[2]]: int(ago[1])})).isoformat()
    try:
        return datetime.fromisoformat(text).astimezone(UTC).isoformat()
    except (ValueError, OverflowError):
        raise UsageError(f"{option}: '{text}' is no time; write such as 7d, 12h or 2025-01-31") from None

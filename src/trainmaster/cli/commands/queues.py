"""Commands for queues, and for the usage of the cluster by queue, account or job."""

from __future__ import annotations

import itertools
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli.exits import UsageError, say
from trainmaster.cli.options import JsonOption, connect
from trainmaster.cli.output import clock, draw, duration, number, print_json, print_list, print_result, styled, table

if TYPE_CHECKING:
    from rich.text import Text

    from trainmaster.client.types import Queue, QueueEntry, UsageRow

SHOWN = 50

app = typer.Typer(
    help="List queues; show who waits in one; set weights and quotas.",
    invoke_without_command=True,
    rich_markup_mode=None,
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The queue.", show_default=False)]


@app.callback()
def list_queues(context: typer.Context, as_json: JsonOption = False) -> None:
    if context.invoked_subcommand is not None:
        return
    with connect() as client:
        queues = client.cluster.queues()
    headings = ("QUEUE", "WEIGHT", "QUOTA", "WAITING", "RUNNING", "PAUSED", "GPUS HELD", "LONGEST WAIT")
    print_list(queues, headings, _queue_row, as_json=as_json, right=headings[1:])


def _queue_row(queue: Queue) -> tuple[str, ...]:
    return (
        queue["name"],
        number(queue["weight"]),
        "" if queue["quota_gpus"] is None else str(queue["quota_gpus"]),
        str(queue["depth"]),
        str(queue["running"]),
        str(queue["paused"]),
        str(queue["gpus_held"]),
        "" if queue["oldest_wait_seconds"] is None else duration(int(queue["oldest_wait_seconds"])),
    )


@app.command("show")
def show(
    name: NameArgument = "default",
    limit: Annotated[int, typer.Option("--limit", min=1, metavar="N", help="At most N, the next ones.")] = SHOWN,
    as_json: JsonOption = False,
) -> None:
    """Show who waits in a queue, in the order in which they will be looked at."""
    with connect() as client:
        entries = list(itertools.islice(client.cluster.queue(name, page_size=min(limit, 100)), limit))
    print_list(
        entries,
        ("#", "JOB", "NAME", "PRIO", "GPUS", "WAITED", "STARTS IN", "WHY"),
        _entry_row,
        as_json=as_json,
        if_none=f"Nothing waits in queue {name}.",
        right=("#", "PRIO", "GPUS", "WAITED", "STARTS IN"),
        cut=("NAME", "WHY"),
    )


def _entry_row(entry: QueueEntry) -> tuple[str | Text, ...]:
    wait = entry["estimated_wait_seconds"]
    return (
        str(entry["position"]),
        entry["job_id"] or "-",
        styled(entry["name"] or "(another account's)", "" if entry["name"] else "dim"),
        str(entry["priority"]),
        str(entry["gpus"] or ""),
        duration(int(entry["wait_seconds"])),
        "?" if wait is None else "now" if wait < 1 else duration(int(wait)),
        styled(entry["reason"] or "", "dim"),
    )


@app.command("set")
def set_queue(
    name: NameArgument,
    weight: Annotated[
        float | None, typer.Option("--weight", metavar="W", help="Its share, in proportion to other queues.")
    ] = None,
    quota: Annotated[
        int | None, typer.Option("--quota", metavar="GPUS", help="The most GPUs that its jobs may hold.")
    ] = None,
    no_quota: Annotated[bool, typer.Option("--no-quota", help="Remove the quota.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a queue, or change its weight or quota; what is not named stays."""
    if quota is not None and no_quota:
        raise UsageError("--quota and --no-quota exclude each other")
    with connect() as client:
        before = next((queue for queue in client.cluster.queues() if queue["name"] == name), None)
        queue = client.cluster.put_queue(
            name,
            weight=weight if weight is not None else before["weight"] if before else 1.0,
            quota_gpus=None if no_quota else quota if quota is not None else before["quota_gpus"] if before else None,
        )
    quota_told = "no quota" if queue["quota_gpus"] is None else f"a quota of {queue['quota_gpus']} GPUs"
    told = f"Queue {name} {'has' if before else 'is new, with'} weight {number(queue['weight'])} and {quota_told}."
    print_result(queue, told, as_json=as_json)


@app.command("remove")
def remove(name: NameArgument, as_json: JsonOption = False) -> None:
    """Remove a queue in which no job waits or runs."""
    with connect() as client:
        client.cluster.delete_queue(name)
    print_result({"name": name}, f"Queue {name} is removed.", as_json=as_json)


_AGE = re.compile(r"(\d{1,6})([mhdw])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def usage(
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
    rows = [_usage_row(row, row["key"] or "(none)") for row in usage["rows"]]
    rows.append(_usage_row(usage["total"], styled("total", "dim")))
    headings = (by.removeprefix("label:").upper(), "JOBS", "ATTEMPTS", "GPU-HOURS", "CPU-HOURS", "HOURS")
    draw(table(headings, rows, right=headings[1:]))
    if usage["truncated"]:
        typer.echo(f"Only the {len(usage['rows'])} greatest are shown; the total is of all.")


def _usage_row(row: UsageRow, name: str | Text) -> tuple[str | Text, ...]:
    times = [row[unit] / 3600 for unit in ("gpu_seconds", "cpu_seconds", "wall_seconds")]
    hours = (f"{time:,.2f}" if time >= 0.1 or time == 0 else f"{time:.2g}" for time in times)
    return name, str(row["jobs"]), str(row["attempts"]), *hours


def _moment(option: str, text: str) -> str:
    if ago := _AGE.fullmatch(text):
        return (datetime.now(UTC) - timedelta(**{_UNITS[ago[2]]: int(ago[1])})).isoformat()
    try:
        return datetime.fromisoformat(text).astimezone(UTC).isoformat()
    except (ValueError, OverflowError):
        raise UsageError(f"{option}: '{text}' is no time; write such as 7d, 12h or 2025-01-31") from None

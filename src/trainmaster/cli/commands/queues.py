"""`trainmaster queues`: where jobs wait, how the cluster is shared among them, and who is next."""

from __future__ import annotations

import itertools
from typing import Annotated

import typer

from trainmaster.cli.exits import UsageError
from trainmaster.cli.human_units import duration, number
from trainmaster.cli.options import JsonOption
from trainmaster.cli.output import draw, print_json, table
from trainmaster.cli.session import connect

SHOWN = 50

app = typer.Typer(
    help="List queues; show who waits in one; set weights and quotas.",
    invoke_without_command=True,
    rich_markup_mode=None,
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The queue.", show_default=False)]


@app.callback()
def list_queues(context: typer.Context, as_json: JsonOption = False) -> None:
    """List queues; show who waits in one; set weights and quotas."""
    if context.invoked_subcommand is not None:
        return
    with connect() as client:
        queues = list(client.cluster.queues())
    if as_json:
        print_json(queues)
        return
    from rich.text import Text

    rows = [
        (
            Text(queue["name"]),
            Text(number(queue["weight"])),
            Text("" if queue["quota_gpus"] is None else str(queue["quota_gpus"])),
            Text(str(queue["depth"])),
            Text(str(queue["running"])),
            Text(str(queue["paused"])),
            Text(str(queue["gpus_held"])),
            Text("" if queue["oldest_wait_seconds"] is None else duration(int(queue["oldest_wait_seconds"]))),
        )
        for queue in queues
    ]
    headings = ("QUEUE", "WEIGHT", "QUOTA", "WAITING", "RUNNING", "PAUSED", "GPUS HELD", "LONGEST WAIT")
    draw(table(headings, rows, right=headings[1:]))


@app.command("show")
def show(
    name: NameArgument = "default",
    limit: Annotated[int, typer.Option("--limit", min=1, metavar="N", help="At most so many, the next ones.")] = SHOWN,
    as_json: JsonOption = False,
) -> None:
    """Show who waits in a queue, in the order in which they will be looked at."""
    with connect() as client:
        entries = list(itertools.islice(client.cluster.queue(name, page_size=min(limit, 100)), limit))
    if as_json:
        print_json(entries)
        return
    if not entries:
        typer.echo(f"Nothing waits in queue {name}.")
        return
    from rich.text import Text

    rows = [
        (
            Text(str(entry["position"])),
            Text(entry["job_id"] or "-"),
            Text(entry["name"] or "(another account's)", style="" if entry["name"] else "dim"),
            Text(str(entry["priority"])),
            Text(str(entry["gpus"]) if entry["gpus"] else ""),
            Text(duration(int(entry["wait_seconds"]))),
            Text(_starts_in(entry["estimated_wait_seconds"])),
            Text(entry["reason"] or "", style="dim"),
        )
        for entry in entries
    ]
    headings = ("#", "JOB", "NAME", "PRIO", "GPUS", "WAITED", "STARTS IN", "WHY")
    draw(table(headings, rows, right=("#", "PRIO", "GPUS", "WAITED", "STARTS IN"), cut=("NAME", "WHY")))


@app.command("set")
def set_queue(
    name: NameArgument,
    weight: Annotated[
        float | None, typer.Option("--weight", metavar="W", help="Its share, in proportion to other queues.")
    ] = None,
    quota: Annotated[
        int | None, typer.Option("--quota", metavar="GPUS", help="The most GPUs that its jobs may hold.")
    ] = None,
    no_quota: Annotated[bool, typer.Option("--no-quota", help="Take the quota away.")] = False,
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
    if as_json:
        print_json(queue)
        return
    quota_told = "no quota" if queue["quota_gpus"] is None else f"a quota of {queue['quota_gpus']} GPUs"
    typer.echo(f"Queue {name} {'has' if before else 'is new, with'} weight {number(queue['weight'])} and {quota_told}.")


@app.command("remove")
def remove(name: NameArgument, as_json: JsonOption = False) -> None:
    """Remove a queue in which no job waits or runs."""
    with connect() as client:
        client.cluster.delete_queue(name)
    if as_json:
        print_json({"name": name})
    else:
        typer.echo(f"Queue {name} is removed.")


def _starts_in(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return "now" if seconds < 1 else duration(int(seconds))

"""`trainmaster events`: what happened to a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli.human_units import clock
from trainmaster.cli.options import JobArgument, JsonOption, job_id_of
from trainmaster.cli.output import draw, print_json, print_json_line, table
from trainmaster.cli.session import connect

if TYPE_CHECKING:
    from trainmaster.client import Client
    from trainmaster.client.types import Event

PAGE = 500


def run(
    job: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what happened to a job."""
    with connect() as client:
        job_id = job_id_of(client, job)
        if follow:
            for event in client.follow_events(job_id):
                print_json_line(event) if as_json else typer.echo(_line(event))
            return
        events = list(_all(client, job_id))
    if as_json:
        print_json(events)
    else:
        from rich.text import Text

        rows = [
            (
                Text(clock(event["ts"]), style="dim"),
                Text(str(event["attempt"] or "")),
                Text(_what(event)),
                Text(event["reason"] or ""),
                Text(event["actor"], style="dim"),
                Text(event["message"]),
            )
            for event in events
        ]
        headings = ("TIME", "ATTEMPT", "EVENT", "REASON", "BY", "MESSAGE")
        draw(table(headings, rows, right=("ATTEMPT",), wrap=("MESSAGE",), spare=("BY", "ATTEMPT", "REASON")))


def _all(client: Client, job_id: str) -> list[Event]:
    events: list[Event] = []
    while True:
        page = client.events(job_id, after=events[-1]["seq"] if events else 0, limit=PAGE)["events"]
        events += page
        if len(page) < PAGE:
            return events


def _what(event: Event) -> str:
    if event["type"] != "status":
        return event["type"]
    return f"{event['from']} → {event['to']}" if event["from"] else str(event["to"])


def _line(event: Event) -> str:
    parts = (clock(event["ts"]), _what(event), event["reason"] or "", event["message"])
    return "  ".join(part for part in parts if part)

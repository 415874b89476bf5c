"""Commands that tell a job's history: logs, events, and why it waits or failed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainmaster.cli.exits import ExitCode, say
from trainmaster.cli.job_summary import brief, failure_lines, title
from trainmaster.cli.options import JobArgument, JsonOption, connect, job_id_of
from trainmaster.cli.output import about, clock, print_json, print_json_line, print_list, print_result, styled
from trainmaster.schema.jobs import TERMINAL

if TYPE_CHECKING:
    from rich.text import Text

    from trainmaster.client import Client
    from trainmaster.client.types import Blocker, Event, Job, Pending

LONGEST_TAIL = 10_000


def logs(
    job: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job has ended.")] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", min=0, max=LONGEST_TAIL, metavar="N", help="Only the last N lines.")
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", min=0, metavar="R", help="Only what this rank wrote.")] = None,
    stderr: Annotated[bool, typer.Option("--stderr", help="Only the standard error.")] = False,
    attempt: Annotated[
        str | None, typer.Option("--attempt", metavar="N", help="Of this attempt, or 'all'; by default the latest.")
    ] = None,
    times: Annotated[bool, typer.Option("--timestamps", "-t", help="Show when each line was written.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what a job wrote."""
    from trainmaster.cli.watch import has_several_ranks, pages, view_for, watch

    filters: dict[str, Any] = {"rank": rank, "stream": "stderr" if stderr else None, "attempt": attempt}
    with connect() as client:
        job_id = job_id_of(client, job)
        ranks = rank is None and has_several_ranks(client.get(job_id))
        if follow:
            view = view_for(as_json=as_json, ranks=ranks, times=times)
            try:
                watch(client, job_id, view, tail=tail, **filters)
            except KeyboardInterrupt:
                say(f"Detached; the job keeps running. End it with `trainmaster cancel {job_id}`.")
                raise typer.Exit(ExitCode.DETACHED) from None
        elif as_json:
            print_json([line for page in pages(client, job_id, tail=tail, **filters) for line in page])
        else:
            shown = False
            for part in client.log_texts(job_id, tail=tail, ranks=ranks, times=times, **filters):
                sys.stdout.write(part.text)
                shown = shown or bool(part.text)
            sys.stdout.flush()
            if not shown:
                filtered = tail == 0 or any(value is not None for value in filters.values())
                say(client.logs(job_id, limit=1)["notice"] or _empty_log(client.get(job_id), filtered=filtered))


def _empty_log(job: Job, *, filtered: bool) -> str:
    if filtered:
        return "No line of the log matches these options."
    if job["status"] in TERMINAL:
        return f"The job is {job['status']} and has written nothing."
    why = job["pending_reason"] if job["status"] == "QUEUED" else job["status_message"]
    return f"The job has written nothing yet; it is {job['status']}{f': {why}' if why else ''}."


PAGE = 500


def events(
    job: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job has ended.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what happened to a job."""
    with connect() as client:
        job_id = job_id_of(client, job)
        if follow:
            for event in client.follow_events(job_id):
                print_json_line(event) if as_json else typer.echo(_event_line(event))
            return
        events = _all_events(client, job_id)
    print_list(
        events,
        ("TIME", "ATTEMPT", "EVENT", "REASON", "BY", "MESSAGE"),
        _event_row,
        as_json=as_json,
        right=("ATTEMPT",),
        wrap=("MESSAGE",),
        spare=("BY", "ATTEMPT", "REASON"),
    )


def _event_row(event: Event) -> tuple[str | Text, ...]:
    return (
        styled(clock(event["ts"]), "dim"),
        str(event["attempt"] or ""),
        _event_title(event),
        event["reason"] or "",
        styled(event["actor"], "dim"),
        event["message"],
    )


def _all_events(client: Client, job_id: str) -> list[Event]:
    events: list[Event] = []
    while True:
        page = client.events(job_id, after=events[-1]["seq"] if events else 0, limit=PAGE)["events"]
        events += page
        if len(page) < PAGE:
            return events


def _event_title(event: Event) -> str:
    if event["type"] != "status":
        return event["type"]
    return f"{event['from']} → {event['to']}" if event["from"] else str(event["to"])


def _event_line(event: Event) -> str:
    parts = (clock(event["ts"]), _event_title(event), event["reason"] or "", event["message"])
    return "  ".join(part for part in parts if part)


BLOCKERS = 5
WHY = (
    "job_id",
    "status",
    "status_reason",
    "status_message",
    "queue",
    "queue_position",
    "estimated_wait_seconds",
    "pending",
    "error",
)
"""The fields of a job that `why --json` shows."""


def why(job: JobArgument, as_json: JsonOption = False) -> None:
    """Say why a job waits or failed, and what would help."""
    with connect() as client:
        found = client.get(job_id_of(client, job))
    print_result({field: dict(found)[field] for field in WHY}, *_explanation(found), as_json=as_json)


def _explanation(job: Job) -> Iterator[str]:
    name = title(job)
    pending = job["pending"]
    if pending is not None:
        yield f"{name} {pending['message']}."
        yield from _waiting_lines(job, pending)
    elif job["error"]:
        yield f"{name} {job['status']}"
        yield from failure_lines(job["error"])
        yield from (f"  │ {line}" for line in job["error"]["last_lines"])
    elif job["status"] == "PAUSED":
        yield f"{name} is paused; `trainmaster resume {job['handle'] or job['job_id']}` queues it again."
    elif job["finished_at"]:
        said = f": {job['status_message']}" if job["status_message"] and job["status"] != "COMPLETED" else ""
        yield f"{name} is {job['status']}{said}."
    elif job["desired"] != "run":
        yield f"{name} is being stopped ({job['desired']} was asked for)."
    elif job["status"] == "SCHEDULING" and job["status_message"]:
        yield f"{name} is SCHEDULING: {job['status_message']}."
    else:
        how_far = brief(job)
        yield f"{name} does not wait: it is {job['status']}{f', {how_far}' if how_far else ''}."


def _waiting_lines(job: Job, pending: Pending) -> Iterator[str]:
    if job["queue_position"]:
        yield f"  place       {job['queue_position']} in queue {job['queue']}, priority {job['priority']}"
    if job["status"] == "QUEUED":
        wait = job["estimated_wait_seconds"]
        unknown = "never, as things are" if pending["code"] == "IMPOSSIBLE" else "unknown when"
        yield f"  starts      {unknown if wait is None else 'now' if wait < 1 else f'in about {about(wait)}'}"
    yield f"  needs       {pending['needs']}"
    best = pending["best_node"]
    if best is not None:
        yield (
            f"  best node   {best['id']}: {best['gpus_free']} fitting GPUs, {best['cpu_cores_free']} cores, "
            f"{best['ram_mb_free'] / 1024:.1f} GiB and {best['slots_free']} slots free"
        )
    shown = pending["blockers"][:BLOCKERS]
    for index, blocker in enumerate(shown):
        yield f"  {'in the way' if index == 0 else '':<10}  {_blocker(blocker)}"
    if pending["blocker_count"] > len(shown):
        yield f"{'':14}and {pending['blocker_count'] - len(shown)} more"
    yield f"  would start if {pending['would_start_if']}"


def _blocker(blocker: Blocker) -> str:
    name = blocker["job_id"] or "a job of another account"
    gpus = f"{blocker['gpus']} GPU{'' if blocker['gpus'] == 1 else 's'}" if blocker["gpus"] else "no GPU"
    if blocker["queued"]:
        return f"{name} comes first (asks for {gpus})"
    ends = blocker["ends_in_seconds"]
    when = "end not known" if ends is None else "overdue" if ends == 0 else f"ends in about {about(ends)}"
    return f"{name} (holds {gpus}, {when})"

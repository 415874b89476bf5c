"""`trainmaster ps`: the jobs."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainmaster.cli import output
from trainmaster.cli.exits import UsageError
from trainmaster.cli.job_summary import brief
from trainmaster.cli.options import JsonOption, LabelOption, connect
from trainmaster.client import local
from trainmaster.client.errors import NotFoundError
from trainmaster.client.server_lookup import configured_url
from trainmaster.schema.jobs import STATUSES, TERMINAL

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from trainmaster.client import Client
    from trainmaster.client.types import JobSummary, Tombstone

NOT_ENDED = tuple(status for status in STATUSES if status not in TERMINAL)
NONE_LEFT = "No job waits or runs; `trainmaster ps -a` lists those that ended too."
WATCH_EVERY_S = 1.0
EXPLAINED = 100
"""Of each queue, so many are explained: those that are next."""
QUEUES = 5
HEADINGS = ("JOB", "NAME", "STATUS", "QUEUE", "PRIO", "PROGRESS", "LOSS", "AGE", "WHERE", "WHY")


def ps(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Jobs that have ended too.")] = False,
    status: Annotated[list[str], typer.Option("--status", "-s", help="Only these; may be repeated.")] = [],  # noqa: B006
    label: LabelOption = [],  # noqa: B006 - typer copies it
    queue: Annotated[str | None, typer.Option("--queue", help="Only this queue.")] = None,
    deleted: Annotated[bool, typer.Option("--deleted", help="Deleted jobs whose files are still there.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, metavar="N", help="At most N, the newest.")] = 200,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the ids.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Again every second, until Ctrl-C.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List jobs: those that have not ended, the newest first."""
    from trainmaster.cli.job_file import pairs

    if deleted:
        if everything or status or label or queue is not None or watch:
            raise UsageError("--deleted goes with --limit, --quiet and --json alone")
        _show_deleted(limit, quiet=quiet, as_json=as_json)
        return
    chosen = [word.upper() for word in status] or ([] if everything else list(NOT_ENDED))
    if not watch and _nothing_to_list(chosen):
        if as_json:
            output.print_json([])
        elif not quiet:
            typer.echo(f"{'No jobs.' if everything or status else NONE_LEFT} The local server does not run.")
        return
    query: dict[str, Any] = {"statuses": chosen, "labels": pairs(label, "--label"), "queue": queue}
    with connect() as client:
        if watch and sys.stdout.isatty() and not as_json and not quiet:
            _watch(client, query, limit)
        while True:
            jobs = _fetch(client, query, limit)
            if as_json:
                output.print_json_line(jobs) if watch else output.print_json(jobs)
            elif quiet:
                output.print_result(jobs, *(job["job_id"] for job in jobs), as_json=False)
            elif jobs:
                output.draw(_drawn(client, jobs))
            else:
                typer.echo("No jobs." if everything or status else NONE_LEFT)
            if not watch:
                return
            time.sleep(WATCH_EVERY_S)


def _nothing_to_list(statuses: list[str]) -> bool:
    """Whether the list is known to be empty without a server, which then is not started."""
    if configured_url() is not None:
        return False
    ended_too = not set(statuses) <= set(NOT_ENDED) or not statuses
    return local.running() is None and local.never_ran() if ended_too else local.has_nothing_to_do()


def _fetch(client: Client, query: dict[str, Any], limit: int) -> list[JobSummary]:
    return list(itertools.islice(client.list(**query, page_size=min(limit, 100)), limit))


def _show_deleted(limit: int, *, quiet: bool, as_json: bool) -> None:
    with connect() as client:
        found = list(itertools.islice(client.results.tombstones(page_size=min(limit, 100)), limit))
    if quiet and not as_json:
        output.print_result(found, *(each["job_id"] for each in found), as_json=False)
        return
    output.print_list(
        found,
        ("JOB", "HANDLE", "NAME", "STATUS", "DELETED", "SIZE"),
        _deleted_row,
        as_json=as_json,
        if_none="No deleted job has left files.",
        right=("DELETED", "SIZE"),
        cut=("NAME",),
        spare=("STATUS",),
    )


def _deleted_row(job: Tombstone) -> tuple[str | Text, ...]:
    return (
        job["job_id"],
        job["handle"] or "",
        job["name"],
        output.status_text(job["status"]),
        output.age(job["deleted_at"]),
        output.size(job["size_bytes"]),
    )


def _watch(client: Client, query: dict[str, Any], limit: int) -> None:
    from rich.live import Live

    with Live(console=output.console(), auto_refresh=False, screen=True) as live:
        while True:
            live.update(_drawn(client, _fetch(client, query, limit)), refresh=True)
            time.sleep(WATCH_EVERY_S)


def _drawn(client: Client, jobs: list[JobSummary]) -> Table:
    rows = [
        (
            job["handle"] or job["job_id"],
            job["name"],
            output.status_text(job["status"]),
            job["queue"],
            str(job["priority"]),
            brief(job),
            output.number(job["metrics"]["loss"]) if "loss" in job["metrics"] else "",
            output.age(job["created_at"]),
            _where(job),
            output.styled(why, "dim"),
        )
        for job, why in zip(jobs, _reasons(client, jobs), strict=True)
    ]
    right, cut, spare = ("PRIO", "LOSS", "AGE"), ("NAME", "WHERE", "WHY"), ("PRIO", "QUEUE", "WHERE", "LOSS")
    return output.table(HEADINGS, rows, right=right, cut=cut, spare=spare)


def _where(job: JobSummary) -> str:
    placement = job["placement"]
    if not placement:
        return ""
    gpus = len(placement["gpus"])
    return ",".join(dict.fromkeys(placement["nodes"])) + (f" {gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "")


def _reasons(client: Client, jobs: list[JobSummary]) -> Iterator[str]:
    """Why each job is where it is. A list does not say why a job waits: its queue does."""
    waiting = _why_they_wait(client, jobs)
    for job in jobs:
        if job["stalled"]:
            yield "stalled"
        elif job["status"] == "QUEUED":
            yield waiting.get(job["job_id"], "")
        elif job["desired"] != "run" and job["placement"]:
            yield "is being stopped"
        elif job["status"] == "COMPLETED" or job["status_reason"] == job["status"]:
            yield ""
        else:
            yield job["status_reason"] or ""


def _why_they_wait(client: Client, jobs: list[JobSummary]) -> dict[str, str]:
    reasons: dict[str, str] = {}
    for queue in list(dict.fromkeys(job["queue"] for job in jobs if job["status"] == "QUEUED"))[:QUEUES]:
        with contextlib.suppress(NotFoundError):  # removed meanwhile
            entries = itertools.islice(client.cluster.queue(queue, page_size=EXPLAINED), EXPLAINED)
            reasons |= {entry["job_id"]: entry["reason"] or "" for entry in entries if entry["job_id"]}
    return reasons

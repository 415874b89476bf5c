"""`trainmaster why`: why a job waits, or failed, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from trainmaster.cli.bulk import title
from trainmaster.cli.human_units import about
from trainmaster.cli.options import JobArgument, JsonOption, job_id_of
from trainmaster.cli.output import print_json
from trainmaster.cli.progress import brief
from trainmaster.cli.session import connect
from trainmaster.cli.summary import failure_lines

if TYPE_CHECKING:
    from trainmaster.client.types import Blocker, Job, Pending

BLOCKERS = 5


def run(job: JobArgument, as_json: JsonOption = False) -> None:
    """Say why a job waits or failed, and what would help."""
    with connect() as client:
        found = client.get(job_id_of(client, job))
    if as_json:
        print_json(_document(found))
        return
    for line in _lines(found):
        typer.echo(line)


def _document(job: Job) -> dict[str, object]:
    """What of the job is about that."""
    return {
        "job_id": job["job_id"],
        "status": job["status"],
        "status_reason": job["status_reason"],
        "status_message": job["status_message"],
        "queue": job["queue"],
        "queue_position": job["queue_position"],
        "estimated_wait_seconds": job["estimated_wait_seconds"],
        "pending": job["pending"],
        "error": job["error"],
    }


def _lines(job: Job) -> Iterator[str]:
    name = title(job)
    pending = job["pending"]
    if pending is not None:
        yield f"{name} {pending['message']}."
        yield from _waiting(job, pending)
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
    else:
        how_far = brief(job)
        yield f"{name} does not wait: it is {job['status']}{f', {how_far}' if how_far else ''}."


def _waiting(job: Job, pending: Pending) -> Iterator[str]:
    if job["queue_position"]:
        yield f"  place       {job['queue_position']} in queue {job['queue']}, priority {job['priority']}"
    if job["status"] == "QUEUED":
        wait = job["estimated_wait_seconds"]
        unknown = "never, as things are" if pending["code"] == "IMPOSSIBLE" else "nobody knows when"
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

"""`trainmaster logs`: what a job wrote."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainmaster.cli.exits import ExitCode, say
from trainmaster.cli.options import JobArgument, JsonOption, job_id_of
from trainmaster.cli.output import print_json
from trainmaster.cli.session import connect
from trainmaster.client.types import TERMINAL

if TYPE_CHECKING:
    from trainmaster.client.types import Job

LONGEST_TAIL = 10_000


def run(
    job: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
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
    from trainmaster.cli.views import has_several_ranks
    from trainmaster.cli.watch import pages, view_for, watch

    filters: dict[str, Any] = {"rank": rank, "stream": "stderr" if stderr else None, "attempt": attempt}
    with connect() as client:
        job_id = job_id_of(client, job)
        ranks = rank is None and has_several_ranks(client.get(job_id))
        if follow:
            view = view_for(as_json=as_json, ranks=ranks, times=times)
            try:
                watch(client, job_id, view, tail=tail, **filters)
            except KeyboardInterrupt:
                say(f"Detached; the job goes on. End it with `trainmaster cancel {job_id}`.")
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
                say(client.logs(job_id, limit=1)["notice"] or _empty(client.get(job_id), filtered=filtered))


def _empty(job: Job, *, filtered: bool) -> str:
    """Why there is nothing to show."""
    if filtered:
        return "No line of the log matches these options."
    if job["status"] in TERMINAL:
        return f"The job is {job['status']} and has written nothing."
    why = job["pending_reason"] if job["status"] == "QUEUED" else job["status_message"]
    return f"The job has written nothing yet; it is {job['status']}{f': {why}' if why else ''}."

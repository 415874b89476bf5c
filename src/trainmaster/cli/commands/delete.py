"""`trainmaster delete`: stop jobs and hide them; remove what deleted ones left."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli.bulk import for_each
from trainmaster.cli.exits import UsageError
from trainmaster.cli.options import JobsArgument, JsonOption, job_id_of, job_with_files

if TYPE_CHECKING:
    from trainmaster.client.types import Job


def run(
    jobs: JobsArgument,
    purge: Annotated[
        bool, typer.Option("--purge", help="Remove their files and checkpoints too; also of jobs deleted before.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Stop jobs and hide them. Their checkpoints stay, unless you say --purge."""
    if not yes and (as_json or not sys.stdin.isatty()):
        raise UsageError("deleting needs your word: say --yes")

    def ask(count: int) -> None:
        if not yes:
            what = "this job" if count == 1 else f"these {count} jobs"
            typer.confirm(f"Delete {what}{' and all their checkpoints' if purge else ''}?", abort=True, err=True)

    for_each(
        jobs,
        lambda client, job: client.delete(job, purge=purge),
        lambda job: _said(job, purge),
        as_json=as_json,
        find=job_with_files if purge else job_id_of,
        ask=ask,
    )


def _said(job: Job, purge: bool) -> str:
    with_it = ", with its checkpoints" if purge else ""
    ended = job["status"] in ("COMPLETED", "FAILED", "CANCELLED", "PREEMPTED")
    return f"is deleted{with_it}" if ended else f"is being stopped, and will then be deleted{with_it}"

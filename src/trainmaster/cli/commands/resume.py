"""`trainmaster resume`: queue parked jobs again."""

from __future__ import annotations

from typing import Annotated

import typer

from trainmaster.cli.bulk import for_each, from_checkpoint
from trainmaster.cli.options import JobsArgument, JsonOption


def run(
    jobs: JobsArgument,
    checkpoint: Annotated[str, typer.Option("--checkpoint", metavar="ID", help="Instead of the latest one.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Queue parked jobs again, from their latest checkpoint."""
    for_each(
        jobs,
        lambda client, job: client.resume(job, checkpoint_id=checkpoint),
        lambda job: f"is {job['status']} again, {from_checkpoint(job)}",
        as_json=as_json,
    )

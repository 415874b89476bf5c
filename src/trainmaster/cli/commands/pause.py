"""`trainmaster pause`: park running jobs."""

from __future__ import annotations

from typing import Annotated

import typer

from trainmaster.cli.bulk import for_each
from trainmaster.cli.options import JobsArgument, JsonOption


def run(
    jobs: JobsArgument,
    save: Annotated[bool, typer.Option("--save/--no-save", help="Write a checkpoint before it stops.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Park running jobs; they give their resources back."""
    for_each(
        jobs,
        lambda client, job: client.pause(job, save_checkpoint=save),
        lambda job: "is paused" if job["status"] == "PAUSED" else "saves and stops" if save else "stops without saving",
        as_json=as_json,
    )

"""`trainmaster cancel`: end jobs for good."""

from __future__ import annotations

from typing import Annotated

import typer

from trainmaster.cli.bulk import for_each
from trainmaster.cli.options import JobsArgument, JsonOption


def run(
    jobs: JobsArgument,
    reason: Annotated[str, typer.Option("--reason", help="Why; kept with the job.")] = "",
    as_json: JsonOption = False,
) -> None:
    """End jobs for good."""
    for_each(
        jobs,
        lambda client, job: client.cancel(job, reason=reason),
        lambda job: "is cancelled" if job["status"] == "CANCELLED" else "is being cancelled",
        as_json=as_json,
    )

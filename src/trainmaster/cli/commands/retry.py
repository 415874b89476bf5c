"""`trainmaster retry`: another try at a job that ended, as a job of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainmaster.cli.bulk import for_each, from_checkpoint
from trainmaster.cli.options import JobsArgument, JsonOption, SetOption

if TYPE_CHECKING:
    from trainmaster.client import Client
    from trainmaster.client.types import Job

RESOURCES = "resource_config."


def run(
    jobs: JobsArgument,
    checkpoint: Annotated[str, typer.Option("--checkpoint", metavar="ID", help="Instead of the latest one.")] = "",
    settings: SetOption = [],  # noqa: B006 - typer copies it
    as_json: JsonOption = False,
) -> None:
    """Try jobs that ended again, each as a new job.

    --set changes what the new job needs, such as --set gpu_count=2 or --set ram_min_mb=64000.
    """
    for_each(
        jobs,
        lambda client, job: client.retry(
            job, checkpoint_id=checkpoint, new_resource_config=_changed(client, job, settings) if settings else None
        ),
        lambda job: f"tries {job['parent_job_id']} again, {from_checkpoint(job)}",
        as_json=as_json,
    )


def _changed(client: Client, job: str, settings: list[str]) -> dict[str, Any]:
    from trainmaster.cli.job_file import set_values

    before: Job = client.get(job)
    return set_values(before["resource_config"], [setting.removeprefix(RESOURCES) for setting in settings])

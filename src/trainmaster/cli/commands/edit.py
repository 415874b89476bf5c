"""`trainmaster edit`: change priority, queue or labels of jobs that have not ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli.bulk import for_each
from trainmaster.cli.exits import UsageError
from trainmaster.cli.options import JobsArgument, JsonOption, LabelOption

if TYPE_CHECKING:
    from trainmaster.client import Client


def run(
    jobs: JobsArgument,
    priority: Annotated[int | None, typer.Option("--priority", min=0, max=10, help="Higher goes first.")] = None,
    queue: Annotated[str | None, typer.Option("--queue", help="The queue to wait in.")] = None,
    label: LabelOption = [],  # noqa: B006 - typer copies it
    unlabel: Annotated[list[str], typer.Option("--unlabel", metavar="KEY", help="Remove a label.")] = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """Change priority, queue or labels of jobs that have not ended."""
    from trainmaster.cli.job_file import pairs

    if priority is None and queue is None and not label and not unlabel:
        raise UsageError("nothing to change: give --priority, --queue, --label or --unlabel")
    added = pairs(label, "--label")

    def labels_of(client: Client, job: str) -> dict[str, str] | None:
        if not added and not unlabel:
            return None
        kept = {key: value for key, value in client.get(job)["labels"].items() if key not in unlabel}
        return kept | added

    for_each(
        jobs,
        lambda client, job: client.edit(job, priority=priority, queue=queue, labels=labels_of(client, job)),
        lambda job: f"has priority {job['priority']} in queue {job['queue']}",
        as_json=as_json,
    )

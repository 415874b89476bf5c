"""`trainmaster clone`: a changed copy of a job, as a new job."""

from __future__ import annotations

from typing import Annotated

import typer

from trainmaster.cli.commands.submit import conclude
from trainmaster.cli.options import JobArgument, JsonOption, LabelOption, SetOption, job_id_of
from trainmaster.cli.session import connect


def run(
    job: JobArgument,
    settings: SetOption = [],  # noqa: B006 - typer copies it
    name: Annotated[str | None, typer.Option("--name", help="The new job's name, instead of the old one's.")] = None,
    label: LabelOption = [],  # noqa: B006
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show its log and progress until it ends.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Submit a changed copy of a job, which may be in any state. It runs from the start, as a new job.

    --set changes a field of the copy, such as --set training_config.hyperparameters.learning_rate=1e-4; `trainmaster
    show --json JOB` has all fields. The copy has the old job's files and secrets.
    """
    from trainmaster.cli.job_file import changed
    from trainmaster.client.clone import request_of

    with connect() as client:
        earlier = client.get(job_id_of(client, job))
        document = changed(request_of(earlier), settings, name=name, labels=label)
        submitted = client.clone(earlier["job_id"], document)
        raise typer.Exit(conclude(client, submitted, follow=follow, as_json=as_json))

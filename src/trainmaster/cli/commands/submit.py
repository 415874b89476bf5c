"""`trainmaster submit`: hand a job in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli.exits import EXIT_OF_STATUS, ExitCode, say
from trainmaster.cli.options import JsonOption, LabelOption, SetOption
from trainmaster.cli.output import print_json, print_json_line
from trainmaster.cli.session import connect

if TYPE_CHECKING:
    from trainmaster.sdk import Client
    from trainmaster.sdk.types import Submitted


def run(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A job file, YAML or JSON; - is the standard input.")],
    settings: SetOption = [],  # noqa: B006 - typer copies it
    name: Annotated[str | None, typer.Option("--name", help="The job's name, instead of the file's.")] = None,
    label: LabelOption = [],  # noqa: B006
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show its log and progress until it ends.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Hand a job in.

    Files that the job names and that are here (workload.files[].source, or the path of a script) are sent along.
    """
    from trainmaster.cli.jobfile import load, pairs, set_values
    from trainmaster.sdk.shipping import ship

    document, base = load(file)
    document = set_values(document, settings)
    if name is not None:
        document["name"] = name
    if label:
        document["labels"] = {**(document.get("labels") or {}), **pairs(label, "--label")}
    with connect() as client:
        submitted = client.submit(ship(client, document, base))
        if not follow:
            _tell(submitted, document, as_json)
            return
        if as_json:
            print_json_line({"job": submitted})
        else:
            say(f"Submitted {submitted['job_id']} ({document.get('name')})")
        raise typer.Exit(follow_to_the_end(client, submitted["job_id"], as_json=as_json))


def follow_to_the_end(client: Client, job_id: str, *, as_json: bool) -> ExitCode:
    """Watch a job until it comes to rest; the exit code says how. Ctrl-C leaves it running."""
    from trainmaster.cli.views import has_several_ranks
    from trainmaster.cli.watching import view_for, watch

    view = view_for(as_json=as_json, with_job=True, ranks=has_several_ranks(client.get(job_id)))
    try:
        job = watch(client, job_id, view, until_paused=True)
    except KeyboardInterrupt:
        say(f"Detached; the job goes on. Follow it with `trainmaster logs -f {job_id}`,")
        say(f"end it with `trainmaster cancel {job_id}`.")
        return ExitCode.DETACHED
    return EXIT_OF_STATUS[job["status"]]


def _tell(submitted: Submitted, document: dict[str, object], as_json: bool) -> None:
    if as_json:
        print_json(submitted)
        return
    typer.echo(f"{submitted['job_id']} ({document.get('name')}) is {submitted['status']}")
    say(f"Follow it with `trainmaster logs -f {submitted['job_id']}`.")

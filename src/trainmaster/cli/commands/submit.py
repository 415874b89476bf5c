"""`trainmaster submit`: hand a job in."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli.exits import EXIT_OF_STATUS, ExitCode, UsageError, say
from trainmaster.cli.options import JsonOption, LabelOption, SetOption
from trainmaster.cli.output import print_json, print_json_line
from trainmaster.cli.session import connect

if TYPE_CHECKING:
    from trainmaster.client import Client
    from trainmaster.client.types import Job, Submitted

PENDING = "PENDING"
QUEUED = "QUEUED"
STARTING = "STARTING"
"""Why a job waits that is about to be placed: nothing to speak of."""
ADMISSION_WAIT_S = 3.0
"""How long a command waits to see whether the job is let in, and can start; a moment is enough unless the server is
busy."""


def run(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A job file, YAML or JSON; - is the standard input.")],
    settings: SetOption = [],  # noqa: B006 - typer copies it
    name: Annotated[str | None, typer.Option("--name", help="The job's name, instead of the file's.")] = None,
    label: LabelOption = [],  # noqa: B006
    restore: Annotated[
        str | None,
        typer.Option("--restore", metavar="REL_PATH", help="For a job class: begin from another run's checkpoint."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show its log and progress until it ends.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Hand a job in.

    Files that the job names and that are here (workload.files[].source, the path of a script, the module of a job
    class, data and models of a training) are sent along, or found where they are by the local server.

    FILE may also be a job as `trainmaster show --json` prints it, which is submitted again as a new job; the server
    takes the values of its secrets from the old job.
    """
    from trainmaster.cli.job_file import changed, load
    from trainmaster.client.clone import is_job, request_of
    from trainmaster.client.file_upload import submit

    document, base = load(file)
    earlier = document["job_id"] if is_job(document) else None
    document = changed(request_of(document) if earlier else document, settings, name=name, labels=label)
    if restore is not None:
        document["workload"] = _restored(document.get("workload"), restore)
    with connect() as client:
        submitted = client.clone(earlier, document) if earlier else submit(client, document, base, tell=say)
        raise typer.Exit(conclude(client, submitted, follow=follow, as_json=as_json))


def conclude(client: Client, submitted: Submitted, *, follow: bool, as_json: bool) -> ExitCode:
    """Tell about a job that was submitted, or follow it to its end; the exit code says how that was."""
    if not follow:
        return _tell(client, submitted, as_json)
    if as_json:
        print_json_line({"job": submitted})
    else:
        say(f"Submitted {submitted['job_id']} ({submitted['name']})")
    return follow_to_the_end(client, submitted["job_id"], as_json=as_json)


def _restored(workload: object, rel_path: str) -> dict[str, object]:
    if not isinstance(workload, dict) or workload.get("kind") != "job_class":
        raise UsageError("--restore is for jobs with a workload of kind job_class")
    return {**workload, "restore": rel_path}


def follow_to_the_end(client: Client, job_id: str, *, as_json: bool) -> ExitCode:
    """Watch a job until it comes to rest; the exit code says how. Ctrl-C leaves it running."""
    from trainmaster.cli.views import has_several_ranks
    from trainmaster.cli.watch import view_for, watch

    view = view_for(as_json=as_json, with_job=True, ranks=has_several_ranks(client.get(job_id)))
    try:
        job = watch(client, job_id, view, until_paused=True)
    except KeyboardInterrupt:
        say(f"Detached; the job goes on. Follow it with `trainmaster logs -f {job_id}`,")
        say(f"end it with `trainmaster cancel {job_id}`.")
        return ExitCode.DETACHED
    return EXIT_OF_STATUS[job["status"]]


def _tell(client: Client, submitted: Submitted, as_json: bool) -> ExitCode:
    """Say what became of the job; one that is refused at admission is so at once, and its owner is still here."""
    if as_json:
        print_json(submitted)
        return ExitCode.OK
    job = _once_admitted(client, submitted["job_id"])
    typer.echo(f"{job['job_id']} ({job['name']}) is {job['status']}")
    if job["error"]:
        from trainmaster.cli.summary import failure_lines

        say("\n".join(failure_lines(job["error"])))
        return EXIT_OF_STATUS.get(job["status"], ExitCode.OK)
    if job["pending"] and job["pending"]["code"] != STARTING:
        say(f"It {job['pending']['message']}.")
    say(f"Follow it with `trainmaster logs -f {submitted['job_id']}`.")
    return ExitCode.OK


def _once_admitted(client: Client, job_id: str) -> Job:
    deadline = time.monotonic() + ADMISSION_WAIT_S
    while True:
        job = client.get(job_id)
        decided = job["status"] != PENDING and (job["status"] != QUEUED or job["pending"] is not None)
        if decided or time.monotonic() > deadline:
            return job
        time.sleep(0.05)

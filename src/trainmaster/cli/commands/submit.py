"""Commands that start a job: submit, clone, and run in this process."""

from __future__ import annotations

import os
import shlex
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli.exits import EXIT_OF_STATUS, CommandError, ExitCode, UsageError, say
from trainmaster.cli.job_summary import failure_lines
from trainmaster.cli.options import JobArgument, JsonOption, LabelOption, SetOption, connect, job_id_of
from trainmaster.cli.output import print_json, print_json_line, print_result
from trainmaster.protocol.reasons import EXIT_STOPPED

if TYPE_CHECKING:
    from trainmaster.client import Client
    from trainmaster.client.types import Submitted

PENDING, QUEUED = "PENDING", "QUEUED"
STARTING = "STARTING"
"""Why a job waits that is about to be placed: nothing to speak of."""
ADMISSION_WAIT_S = 3.0
"""How long a command waits to see whether the job is let in, and can start; a moment is enough unless the server is
busy."""


def submit(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A job file, YAML or JSON; - is the standard input.")],
    settings: SetOption = [],  # noqa: B006 - typer copies it
    name: Annotated[str | None, typer.Option("--name", help="The job's name, instead of the file's.")] = None,
    label: LabelOption = [],  # noqa: B006
    restore: Annotated[
        str | None,
        typer.Option("--restore", metavar="REL_PATH", help="For a job class: begin from another run's checkpoint."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show its log and progress until it ends.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check the job, and print what would be sent to its engine.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Submit a job.

    Files that the job names and that are here (workload.files[].source, the path of a script, the module of a job
    class, data and models of a training) are sent along, or found where they are by the local server.

    FILE may also be a job as `trainmaster show --json` prints it, which is submitted again as a new job; the server
    takes the values of its secrets from the old job.
    """
    from trainmaster.cli.job_file import changed, load
    from trainmaster.client.file_upload import pack, submit
    from trainmaster.client.types import is_job, request_of

    document, base = load(file)
    earlier = document["job_id"] if is_job(document) else None
    document = changed(request_of(document) if earlier else document, settings, name=name, labels=label)
    if restore is not None:
        workload = document.get("workload")
        if not isinstance(workload, dict) or workload.get("kind") != "job_class":
            raise UsageError("--restore is for jobs with a workload of kind job_class")
        workload["restore"] = restore
    with connect() as client:
        if dry_run:
            checked = client.validate(pack(client, document, base).document, render=True)
            print_result(checked, checked["rendered"] or "This server would accept the job.", as_json=as_json)
            return
        submitted = client.clone(earlier, document) if earlier else submit(client, document, base, tell=say)
        raise typer.Exit(conclude(client, submitted, follow=follow, as_json=as_json))


def conclude(client: Client, submitted: Submitted, *, follow: bool, as_json: bool) -> ExitCode:
    """Tell about a job that was submitted, or follow it to its end; the exit code says how that was."""
    if follow:
        return _follow_to_the_end(client, submitted, as_json)
    if as_json:
        print_json(submitted)
        return ExitCode.OK
    return _tell(client, submitted["job_id"])


def _follow_to_the_end(client: Client, submitted: Submitted, as_json: bool) -> ExitCode:
    from trainmaster.cli.watch import has_several_ranks, view_for, watch

    job_id = submitted["job_id"]
    if as_json:
        print_json_line({"job": submitted})
    else:
        say(f"Submitted {job_id} ({submitted['name']})")
    view = view_for(as_json=as_json, with_job=True, ranks=has_several_ranks(client.get(job_id)))
    try:
        job = watch(client, job_id, view, until_paused=True)
    except KeyboardInterrupt:
        say(f"Detached; the job keeps running. Follow it with `trainmaster logs -f {job_id}`,")
        say(f"end it with `trainmaster cancel {job_id}`.")
        return ExitCode.DETACHED
    return EXIT_OF_STATUS[job["status"]]


def _tell(client: Client, job_id: str) -> ExitCode:
    """Say what became of the job; one that is refused at admission is so at once, and its owner is still here."""
    deadline = time.monotonic() + ADMISSION_WAIT_S
    while True:
        job = client.get(job_id)
        decided = job["status"] != PENDING and (job["status"] != QUEUED or job["pending"] is not None)
        if decided or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    typer.echo(f"{job_id} ({job['name']}) is {job['status']}")
    if job["error"]:
        say("\n".join(failure_lines(job["error"])))
        return EXIT_OF_STATUS.get(job["status"], ExitCode.OK)
    if job["pending"] and job["pending"]["code"] != STARTING:
        say(f"It {job['pending']['message']}.")
    say(f"Follow it with `trainmaster logs -f {job_id}`.")
    return ExitCode.OK


def clone(
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
    from trainmaster.client.types import request_of

    with connect() as client:
        earlier = client.get(job_id_of(client, job))
        submitted = client.clone(earlier["job_id"], changed(request_of(earlier), settings, name=name, labels=label))
        raise typer.Exit(conclude(client, submitted, follow=follow, as_json=as_json))


DEFAULT_ROOT = "runs"


def run(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="The class, as module:Class, or the name of a registered one.")
    ],
    overrides: Annotated[
        list[str], typer.Argument(metavar="[KEY=VALUE]...", help="Values over the configuration's; keys have dots.")
    ] = [],  # noqa: B006 - typer copies it
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Its configuration, YAML or JSON.")
    ] = None,
    module: Annotated[
        str | None, typer.Option("--module", help="Imported first, so that a registered name is known.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Who it is; by default the class's name.")] = None,
    project: Annotated[str, typer.Option("--project", help="The project it belongs to.")] = "general",
    group: Annotated[str, typer.Option("--group", help="The group it belongs to.")] = "default",
    root: Annotated[
        str, typer.Option("--root", metavar="DIR", help="Where its files lie; checkpoints may lie below an s3:// URI.")
    ] = DEFAULT_ROOT,
    restore: Annotated[
        str | None,
        typer.Option("--restore", metavar="REL_PATH", help="Begin from another run's checkpoint, as this job."),
    ] = None,
    overlay: Annotated[
        bool, typer.Option("--overlay", help="Continue with another configuration than the checkpoint's.")
    ] = False,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic", help="Go on with another number of processes, without their random-number generators."
        ),
    ] = False,
    tracker: Annotated[
        str, typer.Option("--tracker", help="Mirror its metrics to an experiment tracker: none, trackio or wandb.")
    ] = "none",
) -> None:
    """Run a job class here, in the foreground, without a server.

    It continues from its latest checkpoint, if it has one. SIGTERM or Ctrl-C makes it save and stop, with exit code 85;
    run again, it continues.
    """
    from trainmaster.jobs import runner
    from trainmaster.jobs.config_document import ConfigurationError, from_yaml
    from trainmaster.jobs.objects import ObjectStoreError
    from trainmaster.jobs.runner import RunError, RunRequest
    from trainmaster.jobs.spec import Cluster
    from trainmaster.jobs.tracker import TRACKERS

    if Path(target).suffix in (".yaml", ".yml", ".json"):
        instead = f"`trainmaster submit {shlex.quote(target)} --follow` runs a job file"
        raise UsageError(f"{target} is not a job class; {instead}")
    if tracker not in TRACKERS:
        raise UsageError(f"--tracker {tracker}: there are {', '.join(TRACKERS)}")
    sys.path.insert(0, os.getcwd())
    try:
        document = from_yaml(config.read_text(), str(config)) if config is not None else {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {config}: {getattr(error, 'strerror', None) or error}") from error
    except ConfigurationError as error:
        raise UsageError(str(error)) from error
    request = RunRequest(
        target=target,
        module=module,
        config=document,
        overrides=tuple(overrides),
        name=name or target.rpartition(":")[2].replace("/", "-"),
        project=project,
        group=group,
        restore=restore,
        overlay=overlay,
        elastic=elastic,
        tracker=tracker,
    )
    cluster = Cluster(root=os.path.abspath(root))
    if "://" in root:
        cluster = Cluster(root=os.path.abspath(DEFAULT_ROOT), checkpoints=f"{root.rstrip('/')}/checkpoints")
    try:
        runner.run(request, cluster, shows_progress=True)
    except (RunError, ObjectStoreError) as error:
        raise CommandError(str(error)) from error
    except SystemExit as stopped:
        if stopped.code == EXIT_STOPPED:
            say("Saved; the same command continues from there.")
        raise
    except Exception as error:
        # The class's own: who wrote it wants to see where, and nothing of what called it.
        traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        raise typer.Exit(ExitCode.REFUSED) from None
    say(f"Complete; its files lie below {root}.")

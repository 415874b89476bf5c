"""Commands that change jobs: pause, resume, cancel, retry, rerun, edit and delete."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainmaster.cli.exits import CommandError, ExitCode, UsageError, error_document, report
from trainmaster.cli.job_summary import title
from trainmaster.cli.options import JobsArgument, JsonOption, LabelOption, SetOption, connect, job_id_of, job_with_files
from trainmaster.cli.output import print_json
from trainmaster.client.errors import ApiError
from trainmaster.schema.jobs import TERMINAL

if TYPE_CHECKING:
    from trainmaster.client import Client
    from trainmaster.client.types import Job


def for_each(
    names: Sequence[str],
    action: Callable[[Client, str], Job],
    what_happened: Callable[[Job], str],
    *,
    as_json: bool,
    find: Callable[[Client, str], str] = job_id_of,
    ask: Callable[[int], None] = lambda _: None,
) -> None:
    """Carry an action out on each job, and tell about each. One that is refused does not keep the others from it.

    In JSON, an error takes the place of each job that was refused. `find` makes an id of a name. `ask` is called with
    the number of jobs found, before the first action; what it raises ends everything.
    """
    documents: list[Job | dict[str, Any]] = []
    refused: list[str] = []

    def refuse(name: str, error: ApiError | CommandError) -> None:
        refused.append(name)
        report(error)
        documents.append({"job": name, **error_document(error)})

    with connect() as client:
        found: list[tuple[str, str]] = []
        for name in names:
            try:
                found.append((name, find(client, name)))
            except (ApiError, CommandError) as error:
                refuse(name, error)
        if found:
            ask(len(found))
        for name, job_id in found:
            try:
                job = action(client, job_id)
            except (ApiError, CommandError) as error:
                refuse(name, error)
                continue
            documents.append(job)
            if not as_json:
                typer.echo(f"{title(job)} {what_happened(job)}")
    if as_json:
        print_json(documents[0] if len(names) == 1 else documents)
    if refused:
        raise typer.Exit(ExitCode.REFUSED)


def from_checkpoint(job: Job) -> str:
    checkpoint_id = job.get("checkpoint_id")
    return f"from checkpoint {checkpoint_id}" if checkpoint_id else "from the start: it has no checkpoint"


def pause(
    jobs: JobsArgument,
    save: Annotated[bool, typer.Option("--save/--no-save", help="Write a checkpoint before it stops.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Pause running jobs and release their resources."""
    for_each(
        jobs,
        lambda client, job: client.pause(job, save_checkpoint=save),
        lambda job: "is paused" if job["status"] == "PAUSED" else "saves and stops" if save else "stops without saving",
        as_json=as_json,
    )


def resume(
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


def cancel(
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


def retry(
    jobs: JobsArgument,
    checkpoint: Annotated[str, typer.Option("--checkpoint", metavar="ID", help="Instead of the latest one.")] = "",
    settings: SetOption = [],  # noqa: B006 - typer copies it
    as_json: JsonOption = False,
) -> None:
    """Try jobs that ended again, each as a new job.

    --set changes what the new job needs, such as --set gpu_count=2 or --set ram_min_mb=64000.
    """
    from trainmaster.cli.job_file import set_values

    def retried(client: Client, job: str) -> Job:
        changes = [setting.removeprefix("resource_config.") for setting in settings]
        resources = set_values(client.get(job)["resource_config"], changes) if changes else None
        return client.retry(job, checkpoint_id=checkpoint, new_resource_config=resources)

    for_each(jobs, retried, lambda job: f"tries {job['parent_job_id']} again, {from_checkpoint(job)}", as_json=as_json)


def rerun(jobs: JobsArgument, as_json: JsonOption = False) -> None:
    """Run jobs again from the start, each as a new job with the same request. They may be in any state.

    `retry` continues from the checkpoint of a job that failed; `clone` runs a changed copy.
    """
    for_each(
        jobs,
        lambda client, job: client.get(client.clone(job)["job_id"]),
        lambda _: "is submitted, and runs from the start",
        as_json=as_json,
    )


def edit(
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

    def edited(client: Client, job: str) -> Job:
        labels = None
        if added or unlabel:
            labels = {key: value for key, value in client.get(job)["labels"].items() if key not in unlabel} | added
        return client.edit(job, priority=priority, queue=queue, labels=labels)

    for_each(jobs, edited, lambda job: f"has priority {job['priority']} in queue {job['queue']}", as_json=as_json)


def delete(
    jobs: JobsArgument,
    purge: Annotated[
        bool, typer.Option("--purge", help="Remove their files and checkpoints too; also of jobs deleted before.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Stop jobs and hide them. Their checkpoints stay, unless you say --purge."""
    if not yes and (as_json or not sys.stdin.isatty()):
        raise UsageError("deleting needs a confirmation: give --yes")

    def ask(count: int) -> None:
        if not yes:
            what = "this job" if count == 1 else f"these {count} jobs"
            typer.confirm(f"Delete {what}{' and all their checkpoints' if purge else ''}?", abort=True, err=True)

    def deleted(job: Job) -> str:
        done = "is deleted" if job["status"] in TERMINAL else "is being stopped, and will then be deleted"
        return f"{done}{', with its checkpoints' if purge else ''}"

    for_each(
        jobs,
        lambda client, job: client.delete(job, purge=purge),
        deleted,
        as_json=as_json,
        find=job_with_files if purge else job_id_of,
        ask=ask,
    )

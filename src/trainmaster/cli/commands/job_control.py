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

    Args:
        names: the jobs, as a person named them.
        action: what to do with each id.
        what_happened: what to tell about a job afterwards.
        as_json: print the jobs as JSON, an error in the place of each job that was refused.
        find: makes an id of a name.
        ask: called with how many jobs were found, before the first action; what it raises ends all.
    """
    documents: list[Job | dict[str, Any]] = []
    refused = False

    def refuse(name: str, error: ApiError | CommandError) -> None:
        nonlocal refused
        refused = True
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
    """Park running jobs; they give their resources back."""
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


RESOURCES = "resource_config."


def retry(
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
            job,
            checkpoint_id=checkpoint,
            new_resource_config=_changed_resources(client, job, settings) if settings else None,
        ),
        lambda job: f"tries {job['parent_job_id']} again, {from_checkpoint(job)}",
        as_json=as_json,
    )


def _changed_resources(client: Client, job: str, settings: list[str]) -> dict[str, Any]:
    from trainmaster.cli.job_file import set_values

    before: Job = client.get(job)
    return set_values(before["resource_config"], [setting.removeprefix(RESOURCES) for setting in settings])


def rerun(jobs: JobsArgument, as_json: JsonOption = False) -> None:
    """Run jobs again from the start, each as a new job with the same request. They may be in any state.

    `retry` goes on from the checkpoint of a job that failed; `clone` runs a changed copy.
    """
    for_each(jobs, _submit_again, lambda _: "is submitted, and runs from the start", as_json=as_json)


def _submit_again(client: Client, job: str) -> Job:
    return client.get(client.clone(job)["job_id"])


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
        raise UsageError("deleting needs your word: say --yes")

    def ask(count: int) -> None:
        if not yes:
            what = "this job" if count == 1 else f"these {count} jobs"
            typer.confirm(f"Delete {what}{' and all their checkpoints' if purge else ''}?", abort=True, err=True)

    for_each(
        jobs,
        lambda client, job: client.delete(job, purge=purge),
        lambda job: _deletion_message(job, purge),
        as_json=as_json,
        find=job_with_files if purge else job_id_of,
        ask=ask,
    )


def _deletion_message(job: Job, purge: bool) -> str:
    with_it = ", with its checkpoints" if purge else ""
    return (
        f"is deleted{with_it}" if job["status"] in TERMINAL else f"is being stopped, and will then be deleted{with_it}"
    )

"""The same command for several jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import typer

from trainmaster.cli.exits import CommandError, ExitCode, error_document, report
from trainmaster.cli.options import job_id_of
from trainmaster.cli.output import print_json
from trainmaster.cli.session import connect
from trainmaster.client.errors import ApiError

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


def title(job: Job) -> str:
    """A job as a person knows it."""
    return f"{job['handle'] or job['job_id']} ({job['name']})"


def from_checkpoint(job: Job) -> str:
    """Where a job goes on."""
    checkpoint_id = job.get("checkpoint_id")
    return f"from checkpoint {checkpoint_id}" if checkpoint_id else "from the start: it has no checkpoint"

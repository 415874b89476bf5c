"""Options and arguments that several commands have, and how a JOB is found and completed."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli.exits import CommandError
from trainmaster.sdk.errors import NotFoundError, SdkError

if TYPE_CHECKING:
    from trainmaster.sdk import Client

ID_PREFIX = "job-"
"""Ids begin with this, and nobody wants to type it."""
SHORTEST_PREFIX = 3
"""Of a job's id; anything shorter is more likely a slip."""
SEARCHED = 2000
"""How many of the newest jobs a prefix is looked for in."""
COMPLETED = 50


def complete_job(incomplete: str) -> list[tuple[str, str]]:
    """Jobs for the shell: handles and ids that begin with what was typed. Silent and quick, or nothing."""
    from trainmaster.sdk import Client, local

    try:
        if not os.environ.get("TRAINMASTER_URL") and local.find() is None:
            return []
        with Client(timeout=1.0) as client:
            jobs = list(itertools.islice(client.list(page_size=100), SEARCHED // 10))
    except (SdkError, OSError):
        return []
    named = [
        (name, f"{job['name']} ({job['status']})") for job in jobs for name in (job["handle"], job["job_id"]) if name
    ]
    return [(name, help_text) for name, help_text in named if name.startswith(incomplete)][:COMPLETED]


JOB_HELP = "A job's id, its handle, or a unique beginning of its id."
JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", help=JOB_HELP, autocompletion=complete_job, show_default=False)
]
JobsArgument = Annotated[
    list[str], typer.Argument(metavar="JOB", help=JOB_HELP, autocompletion=complete_job, show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON to the standard output, and nothing else.")]
SetOption = Annotated[
    list[str], typer.Option("--set", metavar="PATH=VALUE", help="Set a field, by its dotted path; may be repeated.")
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="The settings file; by default TRAINMASTER_CONFIG, else config.toml in the data directory.",
    ),
]
DataDirOption = Annotated[
    Path | None,
    typer.Option("--data-dir", help="All of its state; by default TRAINMASTER_HOME, else ~/.trainmaster."),
]
DataRootOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--data-root",
        metavar="PATH",
        help="Where paths that jobs name may lie; by default your home. May be repeated.",
        show_default=False,
    ),
]
LabelOption = Annotated[list[str], typer.Option("--label", "-l", metavar="KEY=VALUE", help="May be repeated.")]


def job_id_of(client: Client, name: str) -> str:
    """The id of the job that a person named.

    Raises:
        NotFoundError: there is none.
        CommandError: several ids begin like that.
    """
    try:
        return client.get(name)["job_id"]
    except NotFoundError:
        if len(name) < SHORTEST_PREFIX:
            raise
        newest = itertools.islice(client.list(), SEARCHED)
        found = [job for job in newest if job["job_id"].startswith((name, f"{ID_PREFIX}{name}"))]
        if not found:
            raise
    if len(found) > 1:
        some = ", ".join(f"{job['job_id']} ({job['name']})" for job in found[:5])
        raise CommandError(f"{len(found)} jobs begin with '{name}': {some}{', ...' if len(found) > 5 else ''}")
    return found[0]["job_id"]

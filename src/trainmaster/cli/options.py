"""The options and arguments of commands, the server that they call, and how a job is found by its name."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from trainmaster.cli.exits import CommandError, say
from trainmaster.cli.output import clock
from trainmaster.client import local
from trainmaster.client.errors import ClientError, NotFoundError
from trainmaster.client.server_lookup import configured_url

if TYPE_CHECKING:
    from trainmaster.client import Client
    from trainmaster.client.types import JobSummary, Tombstone


ID_PREFIX = "job-"
"""Ids begin with this, and nobody wants to type it."""
SHORTEST_PREFIX = 3
"""Of a job's id; anything shorter is more likely a slip."""
SEARCHED = 2000
"""How many of the newest jobs a prefix is looked for in."""
COMPLETED = 50
SHOWN = 5
"""Jobs that are named when several are meant by one name."""

Named = TypeVar("Named", "JobSummary", "Tombstone")


def complete_job(incomplete: str) -> list[tuple[str, str]]:
    """Jobs for the shell: handles, ids and names that begin with what was typed. Silent and quick, or nothing."""
    from trainmaster.client import Client

    try:
        if configured_url() is None and local.find() is None:
            return []
        with Client(timeout=1.0) as client:
            jobs = list(itertools.islice(client.list(page_size=100), SEARCHED // 10))
    except (ClientError, OSError):
        return []
    named = [
        (name, f"{job['name']} ({job['status']})")
        for job in jobs
        for name in (job["handle"], job["job_id"], job["name"])
        if name
    ]
    return [(name, help_text) for name, help_text in named if name.startswith(incomplete)][:COMPLETED]


JOB_HELP = "A job's id, handle or name, or the beginning of its id, where only one job has it."
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
    """The id of the job that a person named: by its id or handle, else by its name, else by a beginning of its id.

    Raises NotFoundError if there is none, and CommandError if there are several.
    """
    try:
        return client.get(name)["job_id"]
    except NotFoundError:
        if named := list(itertools.islice(client.list(name=name, page_size=SHOWN), SHOWN + 1)):
            return _only(named, f"are called '{name}'")["job_id"]
        if len(name) < SHORTEST_PREFIX:
            raise
        newest = itertools.islice(client.list(), SEARCHED)
        found = [job for job in newest if job["job_id"].startswith((name, f"{ID_PREFIX}{name}"))]
        if not found:
            raise
    return _only(found, f"have an id that begins with '{name}'")["job_id"]


def job_with_files(client: Client, name: str) -> str:
    """The id of the job that a person named or, where there is none, of a deleted one whose files are still there.

    Of several that had the handle it is the last deleted. The person is told, before anything is done. Raises
    NotFoundError if there is none, or its files are gone, and CommandError if several ids begin like that.
    """
    try:
        return job_id_of(client, name)
    except NotFoundError:
        exact, alike = _tombstones(client, name)
        if not exact and not alike:
            raise
    found = exact[0] if exact else _only(alike, f"that were deleted are called '{name}', or have an id that begins so")
    several = f", the last of {len(exact)} with this handle" if len(exact) > 1 else ""
    handle = f" ({found['handle']})" if found["handle"] else ""
    say(f"{found['job_id']}{handle} was deleted at {clock(found['deleted_at'])}{several}.")
    if several:
        say("`trainmaster ps --deleted` lists them all; name another by its id.")
    return found["job_id"]


def _tombstones(client: Client, name: str) -> tuple[list[Tombstone], list[Tombstone]]:
    """Deleted jobs with this id or handle, the id first; else those with this name, or whose ids begin so."""
    found = list(itertools.islice(client.results.tombstones(job=name), SEARCHED))
    by_id = [each for each in found if each["job_id"] == name]
    exact = by_id or [each for each in found if each["handle"] == name]
    if exact:
        return exact, []
    if named := [each for each in itertools.islice(client.results.tombstones(), SEARCHED) if each["name"] == name]:
        return [], named
    if len(name) < SHORTEST_PREFIX:
        return [], []
    return [], found or list(itertools.islice(client.results.tombstones(job=f"{ID_PREFIX}{name}"), SEARCHED))


def _only(found: Sequence[Named], what_they_share: str) -> Named:
    if len(found) > 1:
        some = ", ".join(f"{job['job_id']} ({job['name']}, {job['status']})" for job in found[:SHOWN])
        count, more = (len(found), "") if len(found) <= SHOWN else ("several", ", ...")
        raise CommandError(f"{count} jobs {what_they_share}; name one by its id: {some}{more}")
    return found[0]


def connect() -> Client:
    """The server that a variable or a login names, else the local one, started when it does not run."""
    from trainmaster.client import Client

    if configured_url() is None and local.running() is None:
        say(f"Starting the local server (its state is in {local.data_dir()}).")
    return Client()

"""Commands for the files that jobs leave: download and gc."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli.exits import CommandError
from trainmaster.cli.human_units import size
from trainmaster.cli.options import JobArgument, JsonOption, connect, job_with_files
from trainmaster.cli.output import byte_bar, draw, print_json, table
from trainmaster.client.errors import NotFoundError
from trainmaster.schema.jobs import TERMINAL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainmaster.client import Client


NAMED = 5
"""Files that are named when none of them was meant."""
PATTERN_HELP = "Only these files: a path, '*.safetensors', or a directory."


def download(
    job: JobArgument,
    patterns: Annotated[list[str], typer.Argument(metavar="[PATTERN]...", help=PATTERN_HELP, show_default=False)] = [],  # noqa: B006
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", metavar="ID", help="Of this checkpoint, 'latest' or 'best'; else the output."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Where to; by default ./JOB, or ./CHECKPOINT.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch the output of a job, or a checkpoint. What broke off goes on, and what is here already stays."""
    with connect() as client:
        job_id = job_with_files(client, job)
        if checkpoint is not None:
            checkpoint = client.results.checkpoint_id(job_id, checkpoint)
        directory = output or Path(checkpoint or job_id)
        wanted = client.results.targets(job_id, directory, patterns=patterns, checkpoint=checkpoint)
        if not wanted:
            every = client.results.targets(job_id, directory, checkpoint=checkpoint) if patterns else []
            there = [str(target.path.relative_to(directory)) for target in every]
            saved = client.results.has_checkpoints(job_id)
            raise CommandError(_no_files_message(client, job_id, checkpoint, patterns, there, has_checkpoints=saved))
        total = sum(target.artifact["size_bytes"] for target in wanted)
        stopped = "Stopped; the same command goes on from here."
        with byte_bar(total, quiet=as_json, interrupted=stopped) as progress:
            client.results.fetch(job_id, wanted, directory, progress=progress)
    if as_json:
        print_json([{**target.artifact, "file": str(target.path)} for target in wanted])
    else:
        files = "1 file" if len(wanted) == 1 else f"{len(wanted)} files"
        typer.echo(f"{files}, {size(total)}, in {directory}")


def _no_files_message(
    client: Client,
    job_id: str,
    checkpoint: str | None,
    patterns: Sequence[str],
    there: Sequence[str],
    *,
    has_checkpoints: bool,
) -> str:
    if there:
        more = f" and {len(there) - NAMED} more" if len(there) > NAMED else ""
        return f"no file matches {' '.join(patterns)}; there are {', '.join(there[:NAMED])}{more}"
    if checkpoint is not None:
        return f"the job has no files of a checkpoint {checkpoint}; `trainmaster checkpoints {job_id}` lists all"
    if has_checkpoints:
        advice = f"; `trainmaster download {job_id} --checkpoint latest` fetches a checkpoint"
        return _without_output(client, job_id, "output") + advice
    return _without_output(client, job_id, "output and no checkpoints")


def _without_output(client: Client, job_id: str, what: str) -> str:
    try:
        status = client.get(job_id)["status"]
    except NotFoundError:  # deleted
        return f"the job has left no {what}"
    if status in TERMINAL:
        return f"the job is {status} and has left no {what}"
    return f"the job is {status} and has no {what} yet; `trainmaster logs -f {job_id}` follows it to its end"


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only tell what would go.")] = False,
    orphans: Annotated[
        bool, typer.Option("--orphans", help="Also directories of jobs that the server does not know, after a day.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove what the server's settings do not keep any longer. It does so by itself, now and then."""
    with connect() as client:
        collection = client.results.collect(dry_run=dry_run, orphans=orphans)
    if as_json:
        print_json(collection)
        return
    stay = [] if orphans else [kind for kind in collection["kinds"] if kind["what"] == "orphan"]
    failed = [kind for kind in collection["kinds"] if kind["what"] == "failed"]
    gone = [kind for kind in collection["kinds"] if kind not in (*stay, *failed)]
    if gone:
        rows = [
            (
                kind["what"],
                str(kind["count"]),
                size(kind["size_bytes"]),
                ", ".join(kind["names"]),
            )
            for kind in gone
        ]
        headings = ("WOULD GO" if dry_run else "GONE", "HOW MANY", "BYTES", "WHICH")
        draw(table(headings, rows, right=("HOW MANY", "BYTES"), cut=("WHICH",)))
    else:
        typer.echo("Nothing to remove: all that is here is kept.")
    for kind in stay:
        directories = "directory belongs" if kind["count"] == 1 else "directories belong"
        typer.echo(f"{kind['count']} {directories} to no job that the server knows ({size(kind['size_bytes'])}):")
        for name in kind["names"]:
            typer.echo(f"  {name}")
        typer.echo("What belongs to nobody stays, unless you say `trainmaster gc --orphans`.")
    for name in (name for kind in failed for name in kind["names"]):
        typer.echo(f"Not collected: {name}", err=True)

"""`trainmaster download`: the files that a job left, brought here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli.bars import byte_bar
from trainmaster.cli.exits import CommandError
from trainmaster.cli.human_units import size
from trainmaster.cli.options import JobArgument, JsonOption, job_with_files
from trainmaster.cli.output import print_json
from trainmaster.cli.session import connect
from trainmaster.client.errors import NotFoundError
from trainmaster.client.types import TERMINAL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainmaster.client import Client

NAMED = 5
"""Files that are named when none of them was meant."""
PATTERN_HELP = "Only these files: a path, '*.safetensors', or a directory."


def run(
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
            raise CommandError(_nothing(client, job_id, checkpoint, patterns, there, has_checkpoints=saved))
        total = sum(target.artifact["size_bytes"] for target in wanted)
        stopped = "Stopped; the same command goes on from here."
        with byte_bar(total, quiet=as_json, interrupted=stopped) as progress:
            client.results.fetch(job_id, wanted, directory, progress=progress)
    if as_json:
        print_json([{**target.artifact, "file": str(target.path)} for target in wanted])
    else:
        files = "1 file" if len(wanted) == 1 else f"{len(wanted)} files"
        typer.echo(f"{files}, {size(total)}, in {directory}")


def _nothing(
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

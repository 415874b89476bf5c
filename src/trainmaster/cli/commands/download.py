"""`trainmaster download`: the files that a job left, brought here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli.exits import CommandError, say
from trainmaster.cli.formatting import size
from trainmaster.cli.options import JobArgument, JsonOption, job_id_of
from trainmaster.cli.output import print_json
from trainmaster.cli.session import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
        job_id = job_id_of(client, job)
        if checkpoint is not None:
            checkpoint = client.results.checkpoint_id(job_id, checkpoint)
        directory = output or Path(checkpoint or job_id)
        wanted = client.results.targets(job_id, directory, patterns=patterns, checkpoint=checkpoint)
        if not wanted:
            raise CommandError(_nothing(job, checkpoint, patterns))
        total = sum(target.artifact["size_bytes"] for target in wanted)
        with _bar(total, quiet=as_json) as progress:
            client.results.fetch(job_id, wanted, directory, progress=progress)
    if as_json:
        print_json([{**target.artifact, "file": str(target.path)} for target in wanted])
    else:
        files = "1 file" if len(wanted) == 1 else f"{len(wanted)} files"
        typer.echo(f"{files}, {size(total)}, in {directory}")


def _nothing(job: str, checkpoint: str | None, patterns: Sequence[str]) -> str:
    if patterns:
        return f"no file matches {' '.join(patterns)}"
    if checkpoint is not None:
        return f"the job has no files of a checkpoint {checkpoint}; `trainmaster checkpoints {job}` lists all"
    return f"the job has left no output; `trainmaster download {job} --checkpoint latest` fetches a checkpoint"


@contextmanager
def _bar(total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on the other output, where a person sees it."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        try:
            yield lambda count: bar.advance(task, count)
        except KeyboardInterrupt:
            bar.stop()
            say("Stopped; the same command goes on from here.")
            raise

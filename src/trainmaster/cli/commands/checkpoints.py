"""`trainmaster checkpoints`: what a job can be resumed from; pinned, unpinned, deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli.exits import UsageError
from trainmaster.cli.formatting import age, number, size
from trainmaster.cli.options import JobArgument, JsonOption, job_id_of
from trainmaster.cli.output import draw, print_json, table
from trainmaster.cli.session import connect

if TYPE_CHECKING:
    from trainmaster.sdk.types import Checkpoint


def run(
    job: JobArgument,
    pin: Annotated[list[str], typer.Option("--pin", metavar="ID", help="Keep this one; may be repeated.")] = [],  # noqa: B006
    unpin: Annotated[list[str], typer.Option("--unpin", metavar="ID", help="Treat it like the others again.")] = [],  # noqa: B006
    delete: Annotated[list[str], typer.Option("--delete", metavar="ID", help="Remove it, with its files.")] = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """List the committed checkpoints of a job; pin, unpin or delete some of them first."""
    if set(pin) & set(unpin) or set(delete) & {*pin, *unpin}:
        raise UsageError("each checkpoint can be pinned, unpinned or deleted, not two of these at once")
    with connect() as client:
        job_id = job_id_of(client, job)
        for ids, action in (
            (pin, client.results.pin),
            (unpin, client.results.unpin),
            (delete, client.results.delete_checkpoint),
        ):
            for checkpoint_id in ids:
                action(job_id, checkpoint_id)
        checkpoints = client.get(job_id)["checkpoints"]
    if as_json:
        print_json(checkpoints)
    elif checkpoints:
        _draw(checkpoints)
    else:
        typer.echo("No checkpoints.")


def _draw(checkpoints: list[Checkpoint]) -> None:
    from rich.text import Text

    rows = [
        (
            Text(checkpoint["checkpoint_id"]),
            Text(str(checkpoint["step"])),
            Text("" if checkpoint["epoch"] is None else number(checkpoint["epoch"])),
            Text("  ".join(f"{name} {number(value)}" for name, value in checkpoint["metrics"].items())),
            Text(size(checkpoint["size_bytes"])),
            Text(age(checkpoint["created_at"])),
            Text(checkpoint["uri"], style="dim"),
            Text(_marks(checkpoint), style="green"),
        )
        for checkpoint in checkpoints
    ]
    headings = ("CHECKPOINT", "STEP", "EPOCH", "METRICS", "SIZE", "AGE", "WHERE", "")
    draw(table(headings, rows, right=("STEP", "EPOCH", "SIZE", "AGE"), cut=("METRICS", "WHERE"), spare=("WHERE",)))


def _marks(checkpoint: Checkpoint) -> str:
    marks = {"latest": checkpoint["is_latest"], "best": checkpoint["is_best"], "pinned": checkpoint["pinned"]}
    return ", ".join(word for word, is_so in marks.items() if is_so)

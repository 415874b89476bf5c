"""`trainmaster checkpoints`: what a job can be resumed from."""

from __future__ import annotations

import typer

from trainmaster.cli.formatting import age, number, size
from trainmaster.cli.options import JobArgument, JsonOption, job_id_of
from trainmaster.cli.output import draw, print_json, table
from trainmaster.cli.session import connect


def run(job: JobArgument, as_json: JsonOption = False) -> None:
    """List the committed checkpoints of a job."""
    with connect() as client:
        found = client.get(job_id_of(client, job))
    checkpoints = found["checkpoints"]
    if as_json:
        print_json(checkpoints)
        return
    if not checkpoints:
        typer.echo("No checkpoints.")
        return
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
            Text(
                ", ".join(
                    word
                    for word, is_so in (
                        ("latest", checkpoint["is_latest"]),
                        ("best", checkpoint["is_best"]),
                    )
                    if is_so
                ),
                style="green",
            ),
        )
        for checkpoint in checkpoints
    ]
    headings = ("CHECKPOINT", "STEP", "EPOCH", "METRICS", "SIZE", "AGE", "WHERE", "")
    draw(table(headings, rows, right=("STEP", "EPOCH", "SIZE", "AGE"), cut=("METRICS", "WHERE")))

"""`trainmaster gc`: remove what has outlived its job."""

from __future__ import annotations

from typing import Annotated

import typer

from trainmaster.cli.human_units import size
from trainmaster.cli.options import JsonOption
from trainmaster.cli.output import draw, print_json, table
from trainmaster.cli.session import connect


def run(
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
        from rich.text import Text

        rows = [
            (
                Text(kind["what"]),
                Text(str(kind["count"])),
                Text(size(kind["size_bytes"])),
                Text(", ".join(kind["names"])),
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

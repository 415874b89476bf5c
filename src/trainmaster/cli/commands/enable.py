"""`trainmaster enable`: give a drained node work again."""

from __future__ import annotations

from typing import Annotated

import typer

from trainmaster.cli.options import JsonOption
from trainmaster.cli.output import print_json
from trainmaster.cli.session import connect


def run(
    node: Annotated[str, typer.Argument(metavar="NODE", help="As `trainmaster nodes` lists it.")],
    as_json: JsonOption = False,
) -> None:
    """Give a drained node work again."""
    with connect() as client:
        found = client.cluster.enable(node)
    if as_json:
        print_json(found)
    elif found["state"] == "READY":
        typer.echo(f"{found['id']} takes work.")
    else:
        typer.echo(f"{found['id']} is {found['state']}: it takes work when it is seen again.")

"""`trainmaster down`: stop the local server."""

from __future__ import annotations

import typer

from trainmaster.cli.options import JsonOption
from trainmaster.cli.output import print_json


def run(as_json: JsonOption = False) -> None:
    """Stop the local server; running jobs go on."""
    from trainmaster.client import local

    stopped = local.stop()
    if as_json:
        print_json({"stopped": stopped, "data_dir": str(local.data_dir())})
    elif stopped:
        typer.echo("The local server is down. Running jobs go on; `trainmaster up` finds them again.")
    else:
        typer.echo("No local server runs.")

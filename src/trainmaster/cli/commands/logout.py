"""`trainmaster logout`: forget the server of `trainmaster login`."""

from __future__ import annotations

import typer

from trainmaster.cli.options import JsonOption
from trainmaster.cli.output import print_json


def run(as_json: JsonOption = False) -> None:
    """Forget the server and the key that `trainmaster login` saved. The key itself stays valid."""
    from trainmaster.client import login

    there = login.path().exists()
    login.remove()
    if as_json:
        print_json({"logged_out": there})
    elif there:
        typer.echo("Logged out; commands use the local server again, unless TRAINMASTER_URL is set.")
    else:
        typer.echo("Not logged in.")

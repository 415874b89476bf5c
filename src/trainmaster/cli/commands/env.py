"""`trainmaster env`: the variables by which public clients find the server."""

from __future__ import annotations

import shlex

import typer

from trainmaster.cli.options import JsonOption
from trainmaster.cli.output import print_json
from trainmaster.cli.session import connect


def run(as_json: JsonOption = False) -> None:
    """Print the variables by which the public clients of Tinker find this server, with its API key.

    For a shell: eval "$(trainmaster env)"
    """
    with connect() as client:
        client.admin.own_key()  # before a client is sent there, see that the server answers and takes the key
        variables = {"TINKER_BASE_URL": client.url, "TINKER_API_KEY": client.api_key}
    if as_json:
        print_json(variables)
        return
    for name, value in variables.items():
        typer.echo(f"export {name}={shlex.quote(value)}")

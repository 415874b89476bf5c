"""`trainmaster up`: start the local server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainmaster.cli.exits import say
from trainmaster.cli.options import ConfigOption, DataRootOption, JsonOption
from trainmaster.cli.output import print_json


def run(
    config: ConfigOption = None,
    data_root: DataRootOption = None,
    model_alias: Annotated[
        list[str],
        typer.Option(
            "--model-alias",
            metavar="NAME=DIRECTORY",
            help="What clients of a trainer service call the model in a directory. May be repeated.",
        ),
    ] = [],  # noqa: B006 - typer copies it
    as_json: JsonOption = False,
) -> None:
    """Start the local server, unless it runs.

    The options are for this start. What shall hold whenever it is started belongs into its settings file.
    """
    from trainmaster.cli.job_file import pairs
    from trainmaster.client import local

    aliases = {name: Path(directory).absolute() for name, directory in pairs(model_alias, "--model-alias").items()}
    named = ",".join(f"{name}={directory}" for name, directory in aliases.items())
    before = local.find()
    server = before or local.start(
        config, data_roots=data_root or (), settings={"model_aliases": named} if named else {}, asked=True
    )
    if before and (config or data_root or model_alias):
        say("It runs with the settings of its start; for others, run `trainmaster down` first.")
    if as_json:
        print_json(
            {
                "url": server.url,
                "data_dir": str(server.data_dir),
                "pid": server.process.pid,
                "version": server.version,
                "started": before is None,
            }
        )
        return
    typer.echo(f"The local server {'runs already' if before else 'is up'} at {server.url}")
    typer.echo(f"  state    {server.data_dir}")
    typer.echo(f"  log      {local.log_file()}")
    typer.echo("Submit a job with `trainmaster submit FILE`; stop the server with `trainmaster down`.")

"""`trainmaster up`: start the local server."""

from __future__ import annotations

import typer

from trainmaster.cli.exits import say
from trainmaster.cli.options import ConfigOption, DataRootOption, JsonOption
from trainmaster.cli.output import print_json


def run(config: ConfigOption = None, data_root: DataRootOption = None, as_json: JsonOption = False) -> None:
    """Start the local server, unless it runs.

    The options are for this start. What shall hold whenever it is started belongs into its settings file.
    """
    from trainmaster.sdk import local

    before = local.find()
    server = before or local.start(config, data_roots=data_root or (), asked=True)
    if before and (config or data_root):
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

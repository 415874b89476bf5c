"""The server that a command talks to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainmaster.cli.exits import say

if TYPE_CHECKING:
    from trainmaster.client import Client


def connect() -> Client:
    """The server that a variable or a login names, else the local one, started when it does not run."""
    from trainmaster.client import Client, local
    from trainmaster.client.server_lookup import configured_url

    if configured_url() is None and local.running() is None:
        say(f"Starting the local server (its state is in {local.data_dir()}).")
    return Client()

"""The server that a command talks to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from trainmaster.cli.exits import say

if TYPE_CHECKING:
    from trainmaster.sdk import Client


def connect() -> Client:
    """The server that the environment names, else the local one, started when it does not run."""
    from trainmaster.sdk import Client, local

    if not os.environ.get("TRAINMASTER_URL") and local.running() is None:
        say(f"Starting the local server (its state is in {local.data_dir()}).")
    return Client()

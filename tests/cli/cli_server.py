"""Servers for the tests of the command line, and waiting for what they do."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.main import get_command

from patience import PATIENCE_S
from trainmaster.cli.app import app
from trainmaster.protocol.sockets import reachable

TRAINMASTER = get_command(app)
"""Made once: that takes longer than most commands."""

VARIABLES = ("TRAINMASTER_URL", "TRAINMASTER_API_KEY", "TRAINMASTER_HOME", "TRAINMASTER_DEBUG")


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server that runs."""

    url: str
    api_key: str
    directory: Path
    """All of its state."""


def wait_for(condition: Callable[[], Any]) -> Any:
    """What a condition gives once it gives something."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise TimeoutError(f"{condition} gave nothing in {PATIENCE_S:g} s")


def retire_fork_server(directory: Path) -> None:
    """The fork server outlives its server on purpose; a test has no use for that."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE_S)
        with reachable(directory / "forkserver" / "socket") as short:
            connection.connect(short)
        connection.sendall(b'{"op": "retire"}\n')
        connection.recv(100)

"""Whether the server is well."""

from __future__ import annotations

from typing import Literal

from trainmaster.server.http.envelope import Wire


class Alive(Wire):
    """The server answers."""

    alive: Literal[True] = True
    version: str


class Ready(Wire):
    """The server can do its work."""

    ready: Literal[True] = True
    version: str

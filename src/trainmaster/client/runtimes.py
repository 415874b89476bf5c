"""`client.runtimes`: the training runtimes that lie beside the server, as they were written."""

from __future__ import annotations

from typing import Any, TypedDict, cast
from urllib.parse import quote

from trainmaster.client.connection import Connection


class RuntimeDocument(TypedDict):
    """One runtime, and the file that it is in."""

    name: str
    kind: str
    file: str
    document: dict[str, Any]


class RuntimeProblem(TypedDict):
    """What is wrong with a file."""

    file: str
    message: str


class RuntimeList(TypedDict):
    """All runtimes, and what cannot be used."""

    runtimes: list[RuntimeDocument]
    problems: list[RuntimeProblem]


class Runtimes:
    """The server's runtimes. Those that are built in, and those of a client's own sources, are not among them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def list(self) -> RuntimeList:
        """Every runtime, and which files cannot be used."""
        return cast(RuntimeList, self._connection.call("GET", "/v1/runtimes"))

    def get(self, name: str) -> RuntimeDocument:
        """One runtime."""
        return cast(RuntimeDocument, self._connection.call("GET", f"/v1/runtimes/{quote(name, safe='')}"))

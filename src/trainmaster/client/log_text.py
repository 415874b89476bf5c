"""Logs as plain text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

from trainmaster.client.connection import Connection, Params
from trainmaster.client.types import LogLine

PLAIN = "text/plain"
NEXT_CURSOR, AT_END = "X-Next-Cursor", "X-Log-End"
_START = ("tail", "since")
"""Where a log begins; a cursor takes the place of both."""


class LogLines(TypedDict, total=False):
    """Which lines of a log are wanted; all of them where nothing is said."""

    tail: int | None
    """The last so many."""
    since: str | None
    """Those since a time (ISO 8601)."""
    step: str | None
    node: int | None
    rank: int | None
    stream: str | None
    attempt: int | str | None
    """A number, or "all"; the latest attempt where nothing is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogText:
    """A part of a log."""

    text: str
    """Lines, each with its line end."""
    cursor: str
    """Where it ends; `follow_logs` goes on from there."""

    def lines(self) -> list[str]:
        """The lines, without their ends. Only a newline ends a line: a message may hold other characters that might."""
        return self.text.removesuffix("\n").split("\n") if self.text else []


def log_texts(connection: Connection, path: str, params: Params) -> Iterator[LogText]:
    """A log up to its present end, part by part."""
    chosen = {name: value for name, value in params.items() if name not in _START}
    while True:
        response = connection.answer("GET", path, params=params, headers={"Accept": PLAIN})
        cursor = response.headers[NEXT_CURSOR]
        yield LogText(text=response.content.decode("utf-8", "replace"), cursor=cursor)
        if response.headers[AT_END] == "true":
            return
        params = {**chosen, "cursor": cursor}


class Shown:
    """What was shown of lines that are being overwritten, for those who show each state as a line of its own."""

    def __init__(self) -> None:
        self._states: dict[tuple[str, int, str], str] = {}

    def is_new(self, line: LogLine) -> bool:
        """Whether a followed line says something else than the state of it that came before."""
        source = (line["step"], line["rank"], line["stream"])
        before = self._states.pop(source, None)
        if line.get("open"):
            self._states[source] = line["message"]
        return before != line["message"]

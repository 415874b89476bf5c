"""Streams: server-sent events, followed without losing or repeating one over reconnects; and logs as plain text."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Self, TypedDict, TypeVar, cast

from trainmaster.client.connection import Connection, Params
from trainmaster.client.errors import UnavailableError, UnreachableError, error_from_answer
from trainmaster.client.types import LogLine

_LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEvent:
    event: str
    data: str
    id: str
    """The last id that the stream has named; empty before the first."""


def parse_events(chunks: Iterable[bytes]) -> Iterator[ServerEvent]:
    """The events of a response's body. One that was cut off is dropped; comments only keep the line alive."""
    kind, last_id = "", ""
    data: list[str] = []
    for line in _decoded_lines(chunks):
        if not line:
            if data:
                yield ServerEvent(event=kind or "message", data="\n".join(data), id=last_id)
            kind = ""
            data.clear()
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data.append(value)
        elif name == "event":
            kind = value
        elif name == "id" and "\0" not in value:
            last_id = value


def _decoded_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    # Only the three line ends that the format knows: a log message may well hold the others that Unicode has.
    rest = b""
    for chunk in chunks:
        rest += chunk
        held = b"\r" if rest.endswith(b"\r") else b""  # the \n that belongs to it may come with the next chunk
        *lines, rest = _LINE_END.split(rest.removesuffix(held))
        rest += held
        for line in lines:
            yield line.decode("utf-8", "replace")


SILENCE_S = 30.0
"""A stream sends something every ten seconds: after this long without a byte the connection is dead."""
PATIENCE_S = 60.0
"""A server may be restarted or moved; after this long without one the follower gives up."""
RECONNECT_DELAYS_S = (0.0, 0.1, 0.3, 1.0)
"""The last one repeats."""
UNAVAILABLE = "UNAVAILABLE"
"""The code of an error that goes away by itself."""

ItemT = TypeVar("ItemT")


class Following(Generic[ItemT]):
    """The items of a stream until its end.

    Iterating raises `ApiError` when the server refuses, and `UnreachableError` when it stays away for too long.
    """

    def __init__(self, connection: Connection, path: str, params: Params, *, cursor: str | None = None) -> None:
        self._connection = connection
        self._path = path
        self._params = params
        self._cursor = cursor
        self._socket: socket.socket | None = None
        self._closed = threading.Event()
        self._items = self._follow()
        self.notice: str | None = None
        """What the server said at the end, where it had something to say."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ItemT:
        return next(self._items)

    @property
    def cursor(self) -> str | None:
        """The position of the last item; following from here continues after it."""
        return self._cursor

    def close(self) -> None:
        """End the iteration; from any thread."""
        self._closed.set()
        if self._socket is not None:
            # Also wakes a thread that waits for more.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _follow(self) -> Iterator[ItemT]:
        given_up_at: float | None = None
        losses = 0
        while not self._closed.wait(RECONNECT_DELAYS_S[min(losses, len(RECONNECT_DELAYS_S) - 1)]):
            headers = {"Accept": "text/event-stream", **({"Last-Event-ID": self._cursor} if self._cursor else {})}
            try:
                with self._connection.fetch(
                    self._path, params=self._params, headers=headers, silence_s=SILENCE_S
                ) as response:
                    network = response.extensions.get("network_stream")
                    self._socket = network.get_extra_info("socket") if network else None
                    given_up_at = None
                    for event in parse_events(response.iter_bytes()):
                        if self._closed.is_set():
                            break
                        if event.event == "error":
                            error = json.loads(event.data)
                            raise error_from_answer(503 if error.get("code") == UNAVAILABLE else 500, {"error": error})
                        if event.event == "end":
                            self.notice = json.loads(event.data).get("notice")
                            return
                        losses = 0
                        self._cursor = event.id or self._cursor
                        yield cast(ItemT, json.loads(event.data))
            except (UnreachableError, UnavailableError):
                given_up_at = given_up_at or time.monotonic() + PATIENCE_S
                if time.monotonic() > given_up_at and not self._closed.is_set():
                    raise
            losses += 1
            self._connection.find_again()


PLAIN = "text/plain"
NEXT_CURSOR, AT_END = "X-Next-Cursor", "X-Log-End"
_START = ("tail", "since")
"""Where a log begins; a cursor takes the place of both."""


class LogLines(TypedDict, total=False):
    """Which lines of a log are wanted; all of them where nothing is said."""

    tail: int | None
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
    """Where it ends; `follow_logs` continues from there."""

    def lines(self) -> list[str]:
        """The lines, without their ends. Only a newline ends a line: a message may hold other characters that might."""
        return self.text.removesuffix("\n").split("\n") if self.text else []


def log_texts(connection: Connection, path: str, params: Params) -> Iterator[LogText]:
    chosen = {name: value for name, value in params.items() if name not in _START}
    while True:
        response = connection.answer("GET", path, params=params, headers={"Accept": PLAIN})
        cursor = response.headers[NEXT_CURSOR]
        yield LogText(text=response.content.decode("utf-8", "replace"), cursor=cursor)
        if response.headers[AT_END] == "true":
            return
        params = {**chosen, "cursor": cursor}


class OpenLineStates:
    """The last state of each line that is being overwritten, for views that show each state as a line."""

    def __init__(self) -> None:
        self._states: dict[tuple[str, int, str], str] = {}

    def is_new(self, line: LogLine) -> bool:
        source = (line["step"], line["rank"], line["stream"])
        before = self._states.pop(source, None)
        if line.get("open"):
            self._states[source] = line["message"]
        return before != line["message"]

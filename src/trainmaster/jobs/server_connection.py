"""Requests of a rank to the server, repeated until they are answered: a server that is away costs only time."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import ssl
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from trainmaster.protocol import environment

TIMEOUT_S = 60.0
"""Of one request, between two of its bytes."""
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_AGAIN = frozenset({408, 429, 500, 502, 503, 504})


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    """By their names in lower case."""
    body: bytes

    @property
    def data(self) -> Any:
        """The data of a good answer."""
        return json.loads(self.body)["data"]

    @property
    def error(self) -> dict[str, Any]:
        """What a refusal says; empty if it says nothing."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return dict(json.loads(self.body)["error"])
        return {}


class NoAnswerError(Exception):
    """The server is away, or something else answered in its place."""


class ServerConnection:
    """Thread-safe. Connections are kept alive for later requests."""

    def __init__(self, server_url: str) -> None:
        """Raises ValueError outside a job, where there is no token."""
        parts = urlsplit(server_url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"no http or https address: {server_url!r}")
        if not (token_file := os.environ.get(environment.TOKEN_FILE)):
            raise ValueError(f"{server_url}: only a job's own processes may open its files at the server")
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._prefix = parts.path.rstrip("/")
        self._authorization = f"Bearer {Path(token_file).read_text().strip()}"
        self._context = ssl.create_default_context(cafile=os.environ.get(environment.CA)) if self._secure else None
        self._idle: list[http.client.HTTPConnection] = []
        self._pid = os.getpid()
        self._told = False
        weakref.finalize(self, _close_all, self._idle)

    def ask(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | memoryview | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Answer:
        """The answer, however long the server is away. A request may arrive twice."""
        for _ in self.tries():
            with self.trying(), self._sent(method, path, headers, body, timeout_s) as response:
                with _network():
                    content = response.read()
                return Answer(response.status, _headers(response), content)
        raise AssertionError("tries never end")

    @contextlib.contextmanager
    def receiving(self, path: str, headers: Mapping[str, str]) -> Iterator[tuple[Answer, Iterator[bytes]]]:
        """The head of an answer, and the pieces of its body, once. Raises NoAnswerError if the server is away."""
        with self._sent("GET", path, headers, None, TIMEOUT_S) as response:
            if response.status >= 300:
                with _network():
                    body = response.read()
                yield Answer(response.status, _headers(response), body), iter(())
            else:
                yield Answer(response.status, _headers(response), b""), _pieces(response)

    def tries(self) -> Iterator[None]:
        """Forever, with growing pauses; a caller that makes progress starts anew."""
        pause_s = _FIRST_PAUSE_S
        yield
        while True:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            yield

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Pass over a request that was not answered, and say once what is waited for."""
        try:
            yield
        except NoAnswerError as error:
            if not self._told:
                self._told = True
                sys.stderr.write(f"trainmaster: no answer from the server, trying on: {error}\n")

    @contextlib.contextmanager
    def _sent(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None,
        body: bytes | memoryview | None,
        timeout_s: float,
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer of our server, which is read to its end in the block; else NoAnswerError."""
        connection, was_idle = self._taken(timeout_s)
        given = {"Authorization": self._authorization, **(headers or {})}
        complete = False
        try:
            try:
                response = _answer_of(connection, method, self._prefix + path, body, given)
            except NoAnswerError:
                if not was_idle:
                    raise
                # The server may just have closed an idle connection.
                connection.close()
                connection = self._made(timeout_s)
                response = _answer_of(connection, method, self._prefix + path, body, given)
            ours = response.status < 300 or response.getheader("X-Request-Id")
            if response.status in _AGAIN or not ours:
                raise NoAnswerError(f"{method} {path}: status {response.status}")
            yield response
            complete = response.isclosed()
        finally:
            if complete and connection.sock is not None:
                self._idle.append(connection)
            else:
                connection.close()

    def _taken(self, timeout_s: float) -> tuple[http.client.HTTPConnection, bool]:
        """A connection, and whether it was used before."""
        if self._pid != os.getpid():
            # A child that was forked must not use its parent's connections.
            _close_all(self._idle)
            self._pid = os.getpid()
        with contextlib.suppress(IndexError):
            connection = self._idle.pop()
            connection.sock.settimeout(timeout_s)
            return connection, True
        return self._made(timeout_s), False

    def _made(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._context is not None:
            return http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=self._context)
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)


def _answer_of(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | memoryview | None,
    headers: Mapping[str, str],
) -> http.client.HTTPResponse:
    with _network():
        connection.request(method, path, body=body, headers=dict(headers))
        return connection.getresponse()


def _close_all(connections: list[http.client.HTTPConnection]) -> None:
    while connections:
        connections.pop().close()


def _pieces(response: http.client.HTTPResponse) -> Iterator[bytes]:
    while True:
        with _network():
            piece = response.read(1 << 20)
        if not piece:
            if response.length:  # which is what did not come
                raise NoAnswerError("the answer broke off")
            return
        yield piece


def _headers(response: http.client.HTTPResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.getheaders()}


@contextlib.contextmanager
def _network() -> Iterator[None]:
    # Kept apart from errors of our own disk, which no repetition helps against.
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswerError(repr(error)) from error

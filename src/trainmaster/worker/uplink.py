"""A kept-alive connection to the server, on which requests, all idempotent, are repeated until they are answered."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from trainmaster.protocol.documents import decoded
from trainmaster.protocol.environment import CA
from trainmaster.protocol.run_directory import StreamGapError

CHUNK = 1 << 20

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_REFUSALS = frozenset({401, 403, 404, 410})
_WRONG = frozenset({409, 413, 422})
_DOWNLOAD_TRIES = 3
"""A digest that is wrong this often is wrong at the server."""

_Answer = TypeVar("_Answer")


class AttemptRefusedError(Exception):
    """The server does not want this attempt any more: it is gone, or its token is invalid."""

    def __init__(self, status: int) -> None:
        super().__init__(f"refused with status {status}")
        self.status = status


class RequestRefusedError(Exception):
    """The server will never take this request, whatever it thinks of the attempt."""


class ClosedError(Exception):
    """The connection was closed from this side."""


class _NoAnswerError(Exception):
    """The server is away, or answered as no server of ours does. Try again."""


class _CutError(_NoAnswerError):
    """The connection broke. The server may just have closed an idle one."""


class Uplink:
    """A client of the worker routes, for one thread; `close` may come from any. `on_wait` may raise to give up.

    With `raises_wrong`, a request that is wrong in itself raises RequestRefusedError, and is not sent again.
    """

    def __init__(
        self,
        server_url: str,
        token: str,
        *,
        timeout_s: float = 30.0,
        on_wait: Callable[[], object] = lambda: None,
        raises_wrong: bool = False,
    ) -> None:
        parts = urlsplit(server_url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"no http or https address: {server_url!r}")
        self._connection = _connection(parts.scheme, parts.hostname, parts.port, timeout_s)
        self._prefix = parts.path.rstrip("/")
        self._authorization = f"Bearer {token}"
        self._on_wait = on_wait
        self._raises_wrong = raises_wrong
        self._closed = threading.Event()

    def ask(self, method: str, path: str, *, document: object = None, data: bytes | None = None) -> Any:
        """The `data` of the answer, however long the server is away, unless it refuses or `close` was called."""
        body = json.dumps(document).encode() if document is not None else data
        content_type = "application/json" if data is None else "application/octet-stream"
        return self._persist(lambda: self._ask_once(method, path, body, content_type))

    def download(self, path: str, target: Path, sha256: str) -> bool:
        """Fetch a file whose digest is known, atomically; False if the server does not have it."""
        partial = target.with_name(f".{target.name}.partial")
        for _ in range(_DOWNLOAD_TRIES):
            digest = self._persist(lambda: self._download_once(path, partial))
            if digest == sha256:
                os.replace(partial, target)
                return True
            if digest is None:
                break
        partial.unlink(missing_ok=True)
        return False

    def pause(self, seconds: float) -> None:
        """Raises ClosedError if `close` was called."""
        if self._closed.wait(seconds):
            raise ClosedError

    def disconnect(self) -> None:
        self._connection.close()

    def close(self) -> None:
        """Interrupt a waiting request, and refuse all others."""
        self._closed.set()
        if (waiting := self._connection.sock) is not None:
            with contextlib.suppress(OSError):
                waiting.shutdown(socket.SHUT_RDWR)

    def _persist(self, attempt: Callable[[], _Answer]) -> _Answer:
        pause_s = _FIRST_PAUSE_S
        while True:
            self.pause(0)
            was_idle = self._connection.sock is not None
            try:
                return attempt()
            except _NoAnswerError as error:
                self.disconnect()
                self.pause(0)
                if was_idle and isinstance(error, _CutError):
                    continue
                if pause_s == _FIRST_PAUSE_S:
                    sys.stderr.write(f"courier: no answer from the server, trying on: {error}\n")
            self._on_wait()
            self.pause(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _ask_once(self, method: str, path: str, body: bytes | None, content_type: str) -> Any:
        response = self._send(method, path, body, content_type)
        envelope = decoded(_read(response)) or {}
        if response.status in (200, 201) and envelope.get("status") == "ok":
            return envelope.get("data")
        error = envelope.get("error")
        if envelope.get("status") == "error" and isinstance(error, dict):
            if response.status == 409 and error.get("code") == "STREAM_GAP" and "next_offset" in error:
                raise StreamGapError(int(error["next_offset"]))
            if response.status in _REFUSALS:
                raise AttemptRefusedError(response.status)
            if self._raises_wrong and response.status in _WRONG:
                raise RequestRefusedError(str(error.get("message")))
        raise _NoAnswerError(f"{method} {path}: status {response.status}")

    def _download_once(self, path: str, target: Path) -> str | None:
        response = self._send("GET", path, None, "application/json")
        if response.status != 200:
            _read(response)
            if response.status in _REFUSALS:
                return None
            raise _NoAnswerError(f"GET {path}: status {response.status}")
        digest = hashlib.sha256()
        with open(target, "wb") as file:
            while chunk := _read(response, CHUNK):
                file.write(chunk)
                digest.update(chunk)
                self._on_wait()
        return digest.hexdigest()

    def _send(self, method: str, path: str, body: bytes | None, content_type: str) -> http.client.HTTPResponse:
        headers = {"Authorization": self._authorization, "Content-Type": content_type}
        with _network():
            if self._connection.sock is None:
                self._connection.connect()
            # Checked once there is a socket for `close` to shut down: it may have been called before.
            self.pause(0)
            self._connection.request(method, self._prefix + path, body=body, headers=headers)
            return self._connection.getresponse()


def _connection(scheme: str, host: str, port: int | None, timeout_s: float) -> http.client.HTTPConnection:
    if scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=timeout_s)
    trusted = ssl.create_default_context(cafile=os.environ.get(CA))
    return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=trusted)


@contextlib.contextmanager
def _network() -> Iterator[None]:
    # Kept apart from errors of our own disk, which no repetition helps against.
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise _CutError(repr(error)) from error


def _read(response: http.client.HTTPResponse, limit: int | None = None) -> bytes:
    with _network():
        return response.read(limit)

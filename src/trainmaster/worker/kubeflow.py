"""A small HTTP listener that turns Kubeflow's progress reports into our metrics.

Code written for Kubeflow's trainer posts `{"trainerStatus": {...}}` to the address in its environment. The listener
lives in the worker's selector and never blocks.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import re
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from trainmaster.worker.records import append

_MAX_HEAD_BYTES = 16 << 10
_MAX_BODY_BYTES = 1 << 20
_MAX_CONNECTIONS = 64
_CONTENT_LENGTH = re.compile(rb"^content-length:([^\n]*)", re.IGNORECASE | re.MULTILINE)
_BEARER = re.compile(rb"^authorization:[ \t]*bearer[ \t]+(\S+)[ \t]*$", re.IGNORECASE | re.MULTILINE)
_SANE_LENGTH = re.compile(rb"[0-9]{1,9}")
"""`int` is slow for many digits, and refuses more than a few thousand."""


class KubeflowListener:
    """Listens on the loopback interface and appends reports to a metrics stream."""

    def __init__(self, selector: selectors.BaseSelector, token: str, metrics_file: str) -> None:
        self._selector = selector
        self._token = token.encode()
        self._metrics_file = metrics_file
        self._connections: list[_Connection] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        selector.register(self._socket, selectors.EVENT_READ, self._accept)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}/"

    def close(self) -> None:
        for connection in list(self._connections):
            connection.close()
        self._selector.unregister(self._socket)
        self._socket.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._socket.accept()
        except OSError:
            return
        if len(self._connections) >= _MAX_CONNECTIONS:
            # The oldest has had the most time.
            self._connections[0].close()
        self._connections.append(_Connection(self._selector, accepted, self._answer, self._connections.remove))

    def _answer(self, head: bytes, body: bytes) -> int:
        """Take a report; returns the HTTP status."""
        bearer = _BEARER.search(head)
        if bearer is None or not hmac.compare_digest(bearer[1], self._token):
            return 401
        if not head.startswith(b"POST "):
            return 405
        try:
            record = metrics_from_status(json.loads(body), now=time.time())
        except (ValueError, RecursionError):
            return 400
        try:
            append(self._metrics_file, json.dumps(record, separators=(",", ":")).encode() + b"\n")
        except OSError:
            return 503  # the disk is full; the sender may try again
        return 200


def metrics_from_status(document: object, *, now: float) -> dict[str, Any]:
    """The metrics record of a status report, without metrics that are no finite numbers.

    Raises:
        ValueError: the document is no status report.
    """
    status = document.get("trainerStatus") if isinstance(document, Mapping) else None
    if not isinstance(status, Mapping):
        raise ValueError("no trainerStatus")
    record: dict[str, Any] = {"t": now}
    for name, theirs in (("percent", "progressPercentage"), ("eta_s", "estimatedRemainingSeconds")):
        number = _number(status.get(theirs))
        if number is not None:
            record[name] = number
    metrics = status.get("metrics")
    values = {}
    for metric in metrics if isinstance(metrics, list) else ():
        if isinstance(metric, Mapping) and isinstance(metric.get("name"), str):
            number = _number(metric.get("value"))
            if number is not None:
                values[metric["name"]] = number
    record["values"] = values
    return record


def _number(value: object) -> float | None:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


class _Connection:
    def __init__(
        self,
        selector: selectors.BaseSelector,
        accepted: socket.socket,
        answer: Callable[[bytes, bytes], int],
        on_close: Callable[[_Connection], None],
    ) -> None:
        self._selector = selector
        self._socket = accepted
        self._answer = answer
        self._on_close = on_close
        self._received = bytearray()
        self._head: bytes | None = None
        """Once it is complete; what follows is the body."""
        self._expected = 0
        accepted.setblocking(False)
        selector.register(accepted, selectors.EVENT_READ, self._read)

    def close(self) -> None:
        """May be repeated."""
        if self._socket.fileno() < 0:
            return
        self._selector.unregister(self._socket)
        self._socket.close()
        self._on_close(self)

    def _read(self) -> None:
        if self._socket.fileno() < 0:
            # Closed to make room, in the same round of the selector.
            return
        try:
            data = self._socket.recv(64 << 10)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received += data
        status = self._status()
        if status is not None:
            answer = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
                "Content-Length: 2\r\nConnection: close\r\n\r\n{}"
            )
            with contextlib.suppress(OSError):
                self._socket.sendall(answer.encode())
        if status is not None or not data or (self._head is None and len(self._received) > _MAX_HEAD_BYTES):
            self.close()

    def _status(self) -> int | None:
        """The status of the answer; None while the request is incomplete."""
        if self._head is None:
            head, blank, body = self._received.partition(b"\r\n\r\n")
            if not blank:
                return None
            text = bytes(head).replace(b"\r\n", b"\n")
            lengths = [found.strip() for found in _CONTENT_LENGTH.findall(text)] or [b"0"]
            if len(lengths) > 1 or not lengths[0].isdigit():
                return 400
            if not _SANE_LENGTH.fullmatch(lengths[0]) or int(lengths[0]) > _MAX_BODY_BYTES:
                return 413
            self._head, self._expected, self._received = text, int(lengths[0]), body
        if len(self._received) < self._expected:
            return None
        return self._answer(self._head, bytes(self._received[: self._expected]))

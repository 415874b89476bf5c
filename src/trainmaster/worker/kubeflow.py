"""A small HTTP listener that turns Kubeflow's progress reports into our metrics.

Code written for Kubeflow's trainer posts `{"trainerStatus": {...}}` to the address in its environment. The listener
lives in the worker's selector and never blocks.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import re
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

_MAX_HEAD_BYTES = 16 << 10
_MAX_BODY_BYTES = 1 << 20
_MAX_CONNECTIONS = 64
_CONTENT_LENGTH = re.compile(rb"^content-length:([^\n]*)", re.IGNORECASE | re.MULTILINE)
_BEARER = re.compile(rb"^authorization:[ \t]*bearer[ \t]+(\S+)[ \t]*$", re.IGNORECASE | re.MULTILINE)
_SANE_LENGTH = re.compile(rb"[0-9]{1,9}")
"""`int` is slow for many digits, and refuses more than a few thousand."""
_ANSWERS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 405: "Method Not Allowed", 413: "Payload Too Large"}


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
        bearer = _BEARER.search(head)
        if bearer is None or not hmac.compare_digest(bearer[1], self._token):
            return 401
        if not head.startswith(b"POST "):
            return 405
        try:
            record = metrics_from_status(json.loads(body), now=time.time())
        except (ValueError, RecursionError):
            return 400
        descriptor = os.open(self._metrics_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, json.dumps(record, separators=(",", ":")).encode() + b"\n")
        finally:
            os.close(descriptor)
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
        if self._head is None:
            self._read_head()
        if self._socket.fileno() < 0:
            return
        if self._head is not None and len(self._received) >= self._expected:
            self._reply(self._safe_answer(self._head, bytes(self._received[: self._expected])))
        elif not data or (self._head is None and len(self._received) > _MAX_HEAD_BYTES):
            self.close()

    def _read_head(self) -> None:
        head, blank, body = self._received.partition(b"\r\n\r\n")
        if not blank:
            return
        text = bytes(head).replace(b"\r\n", b"\n")
        lengths = [found.strip() for found in _CONTENT_LENGTH.findall(text)] or [b"0"]
        if len(lengths) > 1 or not lengths[0].isdigit():
            self._reply(400)
        elif not _SANE_LENGTH.fullmatch(lengths[0]) or int(lengths[0]) > _MAX_BODY_BYTES:
            self._reply(413)
        else:
            self._head, self._expected, self._received = text, int(lengths[0]), body

    def _safe_answer(self, head: bytes, body: bytes) -> int:
        try:
            return self._answer(head, body)
        except OSError:
            # The disk is full; the sender may try again.
            return 503

    def _reply(self, status: int) -> None:
        phrase = _ANSWERS.get(status, "Service Unavailable")
        answer = (
            f"HTTP/1.1 {status} {phrase}\r\nContent-Type: application/json\r\n"
            "Content-Length: 2\r\nConnection: close\r\n\r\n{}"
        )
        try:
            self._socket.sendall(answer.encode())
        except OSError:
            pass
        finally:
            self.close()

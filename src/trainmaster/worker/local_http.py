"""HTTP between a worker and its ranks, in the worker's selector: readiness probes, and Kubeflow's progress reports."""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import math
import os
import re
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from trainmaster.protocol.launch import Readiness
from trainmaster.protocol.sockets import untrusted_listener
from trainmaster.worker.records import append

_ANSWER_WITHIN_S = 5.0
"""A service that is busy starting may take this long to answer before it is asked again."""

_LONGEST_LINE = 64 << 10


class ReadinessProbe:
    """Sends `GET path` until the status is below 400. Its sockets live in the caller's selector."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        host: str,
        port: int,
        readiness: Readiness,
        now: float,
        *,
        uid: int | None = None,
    ) -> None:
        """`uid`: the user that the service runs as; None: this process's. Answers of others do not count."""
        self._selector = selector
        self.address = (host, port)
        self._readiness = readiness
        self._uid = uid
        self._socket: socket.socket | None = None
        self._asked_at = 0.0
        self._received = b""
        self._until = now + readiness.timeout_s
        self.next_due = 0.0
        """When `advance` has something to do."""
        self.is_ready = False
        self._last_answer = "it was not asked"

    def advance(self, now: float) -> None:
        """Ask if it is due, and give up on an answer that takes too long."""
        if self.is_ready or now < self.next_due:
            return
        if self._socket is not None:
            self._conclude("no answer in time")
        self._ask(now)

    def failure(self, now: float) -> str | None:
        """Why the service did not become ready in time; None before its time is over."""
        if self.is_ready or now < self._until:
            return None
        host, port = self.address
        return f"the service did not answer at http://{host}:{port} in time: {self._last_answer}"

    def close(self) -> None:
        if self._socket is not None:
            self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None

    def _ask(self, now: float) -> None:
        self._asked_at = now
        self._received = b""
        self.next_due = now + _ANSWER_WITHIN_S
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(*self.address, type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(family, kind, protocol)
        except OSError as error:
            self._socket = None
            self._conclude(str(error))
            return
        self._socket.setblocking(False)
        outcome = self._socket.connect_ex(address)
        self._selector.register(self._socket, selectors.EVENT_WRITE, self._send)
        if outcome not in (0, errno.EINPROGRESS):
            self._conclude(os.strerror(outcome))

    def _send(self) -> None:
        assert self._socket is not None
        if outcome := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._conclude(os.strerror(outcome))
            return
        host, port = self.address
        question = f"GET {self._readiness.path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n"
        try:
            stranger = untrusted_listener(self._socket.getpeername()[:2], self._socket.getsockname()[:2], self._uid)
            if stranger is not None:
                self._conclude(f"port {port} is taken by another user, with uid {stranger}")
                return
            # Fits into the empty buffer of a new connection.
            self._socket.sendall(question.encode())
        except OSError as error:
            self._conclude(str(error))
            return
        self._selector.modify(self._socket, selectors.EVENT_READ, self._receive)

    def _receive(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(4096)
        except BlockingIOError:
            return
        except OSError as error:
            self._conclude(str(error))
            return
        self._received += data
        if data and b"\n" not in self._received and len(self._received) <= _LONGEST_LINE:
            return
        status_line = self._received.partition(b"\n")[0].split()
        if len(status_line) < 2 or not status_line[0].startswith(b"HTTP/"):
            self._conclude("the answer is not HTTP")
            return
        status = status_line[1][:32].decode(errors="replace")
        self.is_ready = len(status) == 3 and status.isascii() and status.isdecimal() and int(status) < 400
        self._conclude(f"status {status}")

    def _conclude(self, answer: str) -> None:
        self.close()
        self._last_answer = answer
        self.next_due = self._asked_at + self._readiness.interval_s


_MAX_HEAD_BYTES = 16 << 10
_MAX_BODY_BYTES = 1 << 20
_MAX_CONNECTIONS = 64
_CONTENT_LENGTH = re.compile(rb"^content-length:([^\n]*)", re.IGNORECASE | re.MULTILINE)
_BEARER = re.compile(rb"^authorization:[ \t]*bearer[ \t]+(\S+)[ \t]*$", re.IGNORECASE | re.MULTILINE)
_SANE_LENGTH = re.compile(rb"[0-9]{1,9}")
"""`int` is slow for many digits, and refuses more than a few thousand."""


class KubeflowListener:
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
        if (bearer := _BEARER.search(head)) is None or not hmac.compare_digest(bearer[1], self._token):
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
    """The metrics record of a status report (ValueError if it is none), without metrics that are no finite numbers."""
    status = document.get("trainerStatus") if isinstance(document, Mapping) else None
    if not isinstance(status, Mapping):
        raise ValueError("no trainerStatus")
    record: dict[str, Any] = {"t": now}
    for name, theirs in (("percent", "progressPercentage"), ("eta_s", "estimatedRemainingSeconds")):
        if (number := _number(status.get(theirs))) is not None:
            record[name] = number
    metrics = status.get("metrics")
    record["values"] = {
        metric["name"]: number
        for metric in (metrics if isinstance(metrics, list) else ())
        if isinstance(metric, Mapping) and isinstance(metric.get("name"), str)
        if (number := _number(metric.get("value"))) is not None
    }
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
        if (status := self._status()) is not None:
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

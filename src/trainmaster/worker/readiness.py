"""The readiness of a node's service: a non-blocking probe, repeated until it succeeds."""

from __future__ import annotations

import errno
import os
import selectors
import socket

from trainmaster.protocol.launch import Readiness
from trainmaster.protocol.sockets import stranger_at

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
        outcome = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if outcome:
            self._conclude(os.strerror(outcome))
            return
        host, port = self.address
        try:
            stranger = stranger_at(self._socket.getpeername()[:2], self._socket.getsockname()[:2], self._uid)
        except OSError as error:
            self._conclude(str(error))
            return
        if stranger is not None:
            self._conclude(f"port {port} is taken by another user, with uid {stranger}")
            return
        question = f"GET {self._readiness.path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n"
        try:
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

"""Load on a server: many connections, each of which sends its next request when the last one was answered."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import uvloop

from benchmarks.apart import apart
from benchmarks.report import WrongResultError, percentile
from benchmarks.server import Server, cpu_s

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked."""

    requests: Sequence[bytes]
    """Each connection sends all of them, again and again; every one begins with another."""
    connections: int
    seconds: float
    status: int = 200
    """That every answer must have."""
    keep: bool = False
    """Whether the bodies of the answers are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What came of it."""

    delays_s: list[float]
    bodies: list[bytes]
    wall_s: float
    client_cpu_s: float
    server_cpu_s: float = 0.0

    @property
    def per_s(self) -> float:
        """Answers a second."""
        return len(self.delays_s) / self.wall_s

    def in_words(self) -> str:
        """How long an answer took, and what it cost."""
        p50_s, p99_s = percentile(self.delays_s, 50), percentile(self.delays_s, 99)
        return (
            f"p50 {p50_s * 1000:.0f} ms, p99 {p99_s * 1000:.0f} ms; processor time of an answer"
            f" {self.server_cpu_s / len(self.delays_s) * 1000:.2f} ms; a core is 100 %: server"
            f" {self.server_cpu_s / self.wall_s:.0%}, client {self.client_cpu_s / self.wall_s:.0%}"
        )


def request_to(server: Server, method: str, path: str, document: object = None) -> bytes:
    """A request with the server's key, as it goes over the connection."""
    body = b"" if document is None else json.dumps(document).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: {server.host}:{server.port}\r\nAuthorization: Bearer {server.key}\r\n"
    if body:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


def put_on(server: Server, load: Load) -> Round:
    """Put load on a server, from a process of its own."""
    before_s = cpu_s(server.pid)
    (done,) = apart(send, [(server.host, server.port, load)])
    return Round(
        delays_s=done.delays_s,
        bodies=done.bodies,
        wall_s=done.wall_s,
        client_cpu_s=done.client_cpu_s,
        server_cpu_s=cpu_s(server.pid) - before_s,
    )


def send(host: str, port: int, load: Load) -> Round:
    """Send requests over all connections for some time."""
    return uvloop.run(_send(host, port, load))


async def _send(host: str, port: int, load: Load) -> Round:
    loop = asyncio.get_running_loop()
    senders = [
        (await loop.create_connection(functools.partial(_Sender, load, number), host, port))[1]
        for number in range(load.connections)
    ]
    cpu_before_s, began = time.process_time(), time.perf_counter()
    for sender in senders:
        sender.begin(until=began + load.seconds)
    await asyncio.gather(*(sender.done for sender in senders))
    return Round(
        wall_s=time.perf_counter() - began,
        client_cpu_s=time.process_time() - cpu_before_s,
        delays_s=[delay for sender in senders for delay in sender.delays_s],
        bodies=[body for sender in senders for body in sender.bodies],
    )


class _Sender(asyncio.Protocol):
    """One connection."""

    def __init__(self, load: Load, number: int) -> None:
        self._load = load
        self._next = number
        self._pieces: list[bytes] = []
        self._missing = 0
        self._sent_at = self._until = 0.0
        self.delays_s: list[float] = []
        self.bodies: list[bytes] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def begin(self, *, until: float) -> None:
        self._until = until
        self._send()

    def data_received(self, data: bytes) -> None:
        if self._pieces:
            self._missing -= len(data)
        else:
            head, _, body = data.partition(b"\r\n\r\n")
            length = _LENGTH.search(head)
            if not head.startswith(b"HTTP/1.1 %d " % self._load.status) or length is None:
                self._fail(f"a request was answered with {data[:500]!r}")
                return
            self._missing = int(length[1]) - len(body)
        self._pieces.append(data)
        if self._missing:
            return
        self.delays_s.append(time.perf_counter() - self._sent_at)
        if self._load.keep:
            self.bodies.append(b"".join(self._pieces).partition(b"\r\n\r\n")[2])
        self._pieces.clear()
        if time.perf_counter() < self._until:
            self._send()
        else:
            self.done.set_result(None)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the server closed a connection: {exc}")

    def _send(self) -> None:
        self._sent_at = time.perf_counter()
        self._transport.write(self._load.requests[self._next % len(self._load.requests)])
        self._next += 1

    def _fail(self, message: str) -> None:
        if not self.done.done():
            self.done.set_exception(WrongResultError(message))

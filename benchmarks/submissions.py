"""Durable submissions: 32 connections submit jobs that have to wait, as fast as the server answers.

Each answer means that the job is on disk. At the end the server is killed, and every job that it accepted
must be there after the next start, once.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import uvloop

from benchmarks.apart import apart
from benchmarks.report import Figure, Progress, WrongResultError, percentile
from benchmarks.server import Client, Server, cpu_s, held_job, running_server

CONNECTIONS = 32
ROUNDS = 3
ROUND_S = 5.0
TARGET_PER_S = 1000.0

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one round of submissions came to."""

    job_ids: list[str]
    wall_s: float
    client_cpu_s: float
    delays_s: list[float]

    @property
    def per_s(self) -> float:
        """Submissions a second."""
        return len(self.job_ids) / self.wall_s


def measure(directory: Path, progress: Progress) -> Sequence[Figure]:
    """Submissions a second: the median of some rounds."""
    rounds: list[Round] = []
    server_cpu = []
    with running_server(directory) as server:
        for number in range(1, ROUNDS + 1):
            before_s = cpu_s(server.pid)
            (done,) = apart(submit_for, [(server.host, server.port, server.key, ROUND_S)])
            server_cpu.append((cpu_s(server.pid) - before_s) / done.wall_s)
            rounds.append(done)
            progress(f"round {number} of {ROUNDS}: {done.per_s:,.0f} a second")
        progress("the server is killed; what it accepted must be there when it is back")
        _check(server, [job_id for done in rounds for job_id in done.job_ids])
    median = sorted(rounds, key=lambda done: done.per_s)[len(rounds) // 2]
    return [
        Figure(
            name="durable submissions",
            measured=median.per_s,
            unit="/s",
            target=TARGET_PER_S,
            at_least=True,
            note=f"median of {ROUNDS} rounds, slowest {min(done.per_s for done in rounds):,.0f} /s;"
            f" p50 {percentile(median.delays_s, 50) * 1000:.0f} ms,"
            f" p99 {percentile(median.delays_s, 99) * 1000:.0f} ms;"
            f" a core is 100 %: server {statistics.median(server_cpu):.0%}, client"
            f" {median.client_cpu_s / median.wall_s:.0%};"
            f" all {sum(len(done.job_ids) for done in rounds):,} there after kill -9",
        )
    ]


def submit_for(host: str, port: int, key: str, seconds: float) -> Round:
    """Submit jobs over all connections for some time."""
    return uvloop.run(_submit_for(host, port, key, seconds))


async def _submit_for(host: str, port: int, key: str, seconds: float) -> Round:
    loop = asyncio.get_running_loop()
    body = json.dumps(held_job()).encode()
    head = (
        f"POST /v1/jobs HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connections = [
        (await loop.create_connection(lambda: _Submitter(head.encode() + body), host, port))[1]
        for _ in range(CONNECTIONS)
    ]
    cpu_before_s, began = time.process_time(), time.perf_counter()
    for connection in connections:
        connection.begin(until=began + seconds)
    await asyncio.gather(*(connection.done for connection in connections))
    wall_s, used_s = time.perf_counter() - began, time.process_time() - cpu_before_s
    answers = [answer for connection in connections for answer in connection.answers]
    return Round(
        job_ids=[json.loads(answer)["data"]["job_id"] for answer in answers],
        wall_s=wall_s,
        client_cpu_s=used_s,
        delays_s=[delay for connection in connections for delay in connection.delays_s],
    )


class _Submitter(asyncio.Protocol):
    """Sends the same request again and again, each when the one before was answered."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._received = b""
        self._sent_at = self._until = 0.0
        self.answers: list[bytes] = []
        self.delays_s: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def begin(self, *, until: float) -> None:
        self._until = until
        self._send()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not end or (length and len(body) < int(length[1])):
            return
        if not head.startswith(b"HTTP/1.1 201"):
            self._fail(f"a submission was answered with {self._received!r}")
            return
        self.answers.append(body)
        self._received = b""
        self.delays_s.append(time.perf_counter() - self._sent_at)
        if time.perf_counter() < self._until:
            self._send()
        else:
            self.done.set_result(None)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the server closed a connection: {exc}")

    def _send(self) -> None:
        self._sent_at = time.perf_counter()
        self._transport.write(self._request)

    def _fail(self, message: str) -> None:
        if not self.done.done():
            self.done.set_exception(WrongResultError(message))


def _check(server: Server, accepted: list[str]) -> None:
    """Every accepted job is there once, also after the server was killed."""
    server.stop(signal.SIGKILL)
    server.start()
    client = Client(server)
    there = client.job_ids()
    if len(set(accepted)) != len(accepted):
        raise WrongResultError("two submissions were given the same job id")
    if len(there) != len(set(there)) or set(there) != set(accepted):
        raise WrongResultError(f"{len(accepted)} jobs were accepted, {len(there)} are there")
    client.close()

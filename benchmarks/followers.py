"""A thousand followers of one job's log. Nobody may miss a line or get one twice; how long does a line take?

The job begins to print when all followers are connected. Each line has its number and the time when it was printed;
the delay is from there to the arrival in the followers' process.
"""

from __future__ import annotations

import asyncio
import re
import resource
import statistics
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import uvloop

from benchmarks.apart import apart
from benchmarks.report import Figure, Progress, WrongResultError, percentile
from benchmarks.server import Client, Server, command_job, cpu_s, resident_mb, running_server, wait_for

FOLLOWERS = 1000
RATES = (50, 5)
"""Lines a second. At the lower one, every line is sent to every follower by itself."""
PRINT_FOR_S = 20
TARGET_S = 1.0

PRINTING = """
import pathlib, sys, time
go, lines, per_s = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
deadline = time.time() + 120
while not go.exists() and time.time() < deadline:
    time.sleep(0.05)
began = time.time()
for number in range(lines):
    time.sleep(max(0.0, began + number / per_s - time.time()))
    print("line", number, time.time(), flush=True)
"""

_LINE = re.compile(rb'"message":"line (\d+) ([\d.]+)"')
_CONNECT_AT_ONCE = 64
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """What all followers together saw."""

    connecting_s: float
    following_s: float
    client_cpu_s: float
    delays_s: array[float]
    broken: list[str]
    """What followers that did not get every line once have to say."""


def measure(directory: Path, progress: Progress) -> Sequence[Figure]:
    """The 99th percentile of a line's delay, at each rate."""
    with running_server(directory) as server:
        return [_figure(server, directory, per_s, progress) for per_s in RATES]


def _figure(server: Server, directory: Path, per_s: int, progress: Progress) -> Figure:
    client = Client(server)
    go, lines = directory / f"go-{per_s}", per_s * PRINT_FOR_S
    job_id = client.submit(command_job(sys.executable, "-c", PRINTING, str(go), str(lines), str(per_s)))
    running = lambda: client.call("GET", f"/v1/jobs/{job_id}")["status"] == "TRAINING" or None  # noqa: E731
    wait_for(running, "the job runs")
    before_s = cpu_s(server.pid)
    progress(f"{FOLLOWERS:,} followers, {lines:,} lines at {per_s} a second")
    (seen,) = apart(follow_all, [(server.host, server.port, server.key, job_id, str(go), lines)])
    used_s = cpu_s(server.pid) - before_s
    memory_mb = resident_mb(server.pid)
    status = client.wait(job_id)
    client.close()
    if seen.broken or status != "COMPLETED":
        raise WrongResultError(f"{len(seen.broken)} followers of a job that {status}: {'; '.join(seen.broken[:3])}")
    wall_s = seen.connecting_s + seen.following_s
    return Figure(
        name=f"{FOLLOWERS:,} followers, {per_s} lines a second, p99 of a line's delay",
        measured=percentile(seen.delays_s, 99),
        unit="s",
        target=TARGET_S,
        note=f"p50 {statistics.median(seen.delays_s):.3f} s, worst {max(seen.delays_s):.3f} s of"
        f" {len(seen.delays_s):,} lines, none missing or doubled; all connected after {seen.connecting_s:.1f} s;"
        f" processor time of the server {used_s / len(seen.delays_s) * 1e6:.0f} us a line; a core is 100 %: server"
        f" {used_s / wall_s:.0%}, client {seen.client_cpu_s / wall_s:.0%}; server {memory_mb:.0f} MB",
    )


def follow_all(host: str, port: int, key: str, job_id: str, go: str, lines: int) -> Followed:
    """Follow a job's log over many connections, let it begin, and see it to its end."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    request = (
        f"GET /v1/jobs/{job_id}/logs?follow=true HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"Authorization: Bearer {key}\r\nAccept: text/event-stream\r\n\r\n"
    )
    return uvloop.run(_follow_all(host, port, request.encode(), Path(go), lines))


async def _follow_all(host: str, port: int, request: bytes, go: Path, lines: int) -> Followed:
    began = time.perf_counter()
    delays_s = array("d")
    places = asyncio.Semaphore(_CONNECT_AT_ONCE)

    async def connect() -> _Follower:
        async with places:
            loop = asyncio.get_running_loop()
            _, follower = await loop.create_connection(lambda: _Follower(request, delays_s, lines), host, port)
            await follower.connected
            return follower

    async with asyncio.timeout(_TIMEOUT_S):
        followers = await asyncio.gather(*(connect() for _ in range(FOLLOWERS)))
    connecting_s = time.perf_counter() - began
    go.touch()
    await asyncio.wait([follower.ended for follower in followers], timeout=_TIMEOUT_S)
    return Followed(
        connecting_s=connecting_s,
        following_s=time.perf_counter() - began - connecting_s,
        client_cpu_s=time.process_time(),
        delays_s=delays_s,
        broken=[follower.complaint for follower in followers if follower.complaint],
    )


class _Follower(asyncio.Protocol):
    """Reads one stream. What it needs of a line is found by one search: the client must not be what is measured."""

    def __init__(self, request: bytes, delays_s: array[float], lines: int) -> None:
        loop = asyncio.get_running_loop()
        self._request = request
        self._delays_s = delays_s
        self._lines = lines
        self._rest = b""
        self._expected = 0
        self._complaint = ""
        self._complete = False
        self.connected: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()

    @property
    def complaint(self) -> str:
        """What is wrong with what came; empty when every line came once and the stream came to its end."""
        if self._complaint:
            return self._complaint
        if not self._complete or self._expected != self._lines:
            return f"the stream broke off after {self._expected} lines"
        return ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.time()
        if not self.connected.done():
            if not data.startswith(b"HTTP/1.1 200"):
                self._complaint = f"answered with {data!r}"
            self.connected.set_result(None)
        self._rest += data
        whole, end, self._rest = self._rest.rpartition(b"\n\n")
        if not end:
            return
        for number, printed_at in _LINE.findall(whole):
            if int(number) != self._expected:
                self._complaint = self._complaint or f"line {number.decode()} came instead of {self._expected}"
            self._expected += 1
            self._delays_s.append(now - float(printed_at))
        if b"data: [DONE]" in whole:
            self._complete = True
            self._end()
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._complaint = self._complaint or (f"the connection broke: {exc}" if exc else "")
        if not self.connected.done():
            self.connected.set_result(None)
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

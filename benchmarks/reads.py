"""Reads: lists of jobs and single jobs, asked for by many clients at once.

The jobs are copies of one that ran, written straight into the database. What an answer costs the server is told as
processor time too: unlike requests a second, it hardly depends on what else the machine does.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import uvloop

from benchmarks.apart import apart
from benchmarks.report import Figure, Progress, WrongResultError, percentile
from benchmarks.server import Client, Server, command_job, cpu_s, held_job, new_server

CONNECTIONS = 100
JOBS = 2000
ROUND_S = 5.0
PAGE_SIZE = 20

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What the answers of one round came to."""

    delays_s: list[float]
    wall_s: float
    client_cpu_s: float


def measure(directory: Path, progress: Progress) -> Sequence[Figure]:
    """Answers a second: a page of a list, a job that ended, and a job that waits."""
    server = new_server(directory)
    server.start()
    try:
        client = Client(server)
        ended = client.submit(command_job("true", name="read"))
        client.wait(ended)
        client.close()
        server.stop()
        _copy(server.data_dir / "trainmaster.db", ended)
        os.sync()
        server.start()
        client = Client(server)
        held = client.submit(held_job())
        if (found := len(client.call("GET", f"/v1/jobs?page_size={PAGE_SIZE}")["jobs"])) != PAGE_SIZE:
            raise WrongResultError(f"a page has {found} jobs, not {PAGE_SIZE}")
        client.close()
        progress(f"{CONNECTIONS} clients read from {JOBS:,} jobs")
        some = [f"/v1/jobs/{_copied(number)}" for number in range(0, JOBS, 20)]
        return [
            _figure(f"lists of {PAGE_SIZE} jobs", server, [f"/v1/jobs?page_size={PAGE_SIZE}"], 150.0),
            _figure("single jobs that ended", server, some, 400.0),
            _figure("single jobs that wait", server, [f"/v1/jobs/{held}"], None),
        ]
    finally:
        server.stop()
        server.retire_fork_server()


def _figure(name: str, server: Server, paths: list[str], target: float | None) -> Figure:
    before_s = cpu_s(server.pid)
    (done,) = apart(read_for, [(server.host, server.port, server.key, paths, ROUND_S)])
    used_s = cpu_s(server.pid) - before_s
    answers = len(done.delays_s)
    return Figure(
        name=f"{name}, {CONNECTIONS} clients",
        measured=answers / done.wall_s,
        unit="/s",
        target=target,
        at_least=True,
        note=f"p50 {percentile(done.delays_s, 50) * 1000:.0f} ms, p99 {percentile(done.delays_s, 99) * 1000:.0f} ms;"
        f" processor time of an answer {used_s / answers * 1000:.2f} ms; a core is 100 %: server"
        f" {used_s / done.wall_s:.0%}, client {done.client_cpu_s / done.wall_s:.0%}",
    )


def read_for(host: str, port: int, key: str, paths: list[str], seconds: float) -> Round:
    """Read over all connections for some time."""
    return uvloop.run(_read_for(host, port, key, paths, seconds))


async def _read_for(host: str, port: int, key: str, paths: list[str], seconds: float) -> Round:
    loop = asyncio.get_running_loop()
    requests = [
        f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {key}\r\n\r\n".encode() for path in paths
    ]
    readers = []
    for number in range(CONNECTIONS):
        own = requests[number % len(requests) :] + requests[: number % len(requests)]
        readers.append((await loop.create_connection(lambda own=own: _Reader(own), host, port))[1])
    cpu_before_s, began = time.process_time(), time.perf_counter()
    for reader in readers:
        reader.begin(until=began + seconds)
    await asyncio.gather(*(reader.done for reader in readers))
    return Round(
        delays_s=[delay for reader in readers for delay in reader.delays_s],
        wall_s=time.perf_counter() - began,
        client_cpu_s=time.process_time() - cpu_before_s,
    )


class _Reader(asyncio.Protocol):
    """Sends some requests in turn, each when the one before was answered."""

    def __init__(self, requests: list[bytes]) -> None:
        self._requests = requests
        self._pieces: list[bytes] = []
        self._missing = 0
        self._sent_at = self._until = 0.0
        self.delays_s: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def begin(self, *, until: float) -> None:
        self._until = until
        self._send()

    def data_received(self, data: bytes) -> None:
        self._pieces.append(data)
        if len(self._pieces) == 1:
            head, _, body = data.partition(b"\r\n\r\n")
            length = _LENGTH.search(head)
            if not head.startswith(b"HTTP/1.1 200") or length is None:
                self._fail(f"a read was answered with {data[:500]!r}")
                return
            self._missing = int(length[1]) - len(body)
        else:
            self._missing -= len(data)
        if self._missing:
            return
        if not self.delays_s:
            json.loads(b"".join(self._pieces).partition(b"\r\n\r\n")[2])
        self._pieces.clear()
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
        self._transport.write(self._requests[len(self.delays_s) % len(self._requests)])

    def _fail(self, message: str) -> None:
        if not self.done.done():
            self.done.set_exception(WrongResultError(message))


def _copied(number: int) -> str:
    return f"job-{number:012d}"


def _copy(path: Path, job_id: str) -> None:
    """Many copies of a job with its attempts, each a second younger than the last."""
    numbers = f"WITH RECURSIVE numbers(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n < {JOBS - 1})"
    new_id = "printf('job-%012d', n)"
    changed = {
        "jobs": {"job_id": new_id, "root_job_id": new_id, "created_at": "created_at - n"},
        "attempts": {"job_id": new_id, "token": "token || n", "rank_token": "rank_token || n"},
    }
    with closing(sqlite3.connect(path)) as database:
        for table, values in changed.items():
            columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
            database.execute(
                f"{numbers} INSERT INTO {table} ({', '.join(columns)})"
                f" SELECT {', '.join(values.get(column, column) for column in columns)}"
                f" FROM numbers, (SELECT * FROM {table} WHERE job_id = ?)",
                [job_id],
            )
        database.commit()

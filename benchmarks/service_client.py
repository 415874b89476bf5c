"""Clients of a trainer service, as plain as they get: they must not be what is measured."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable

import uvloop

from benchmarks.report import WrongResultError
from trainmaster.protocol.trainer_requests import PROTOBUF

BEATS_EVERY_S = 0.02


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Where a trainer service is asked: at its front, or through a server."""

    port: int
    prefix: str = "/api/v1"
    key: str = ""


class Connection:
    """One connection that is kept open."""

    def __init__(self, door: Door, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._door = door
        self._reader = reader
        self._writer = writer

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, door: Door) -> AsyncIterator[Connection]:
        """Connect."""
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port, limit=1 << 20)
        try:
            yield cls(door, reader, writer)
        finally:
            writer.close()

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        kind: str = "application/json",
        accept: str = "application/json",
    ) -> tuple[int, bytes]:
        """The status and the body of an answer."""
        head = (
            f"{method} {self._door.prefix}/{path} HTTP/1.1\r\nHost: bench\r\nX-API-Key: {self._door.key}\r\n"
            f"Content-Type: {kind}\r\nAccept: {accept}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode())
        self._writer.write(body)
        await self._writer.drain()
        answer = await self._reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        return int(answer.split(b" ", 2)[1]), await self._reader.readexactly(length)

    async def result(self, request_id: str) -> bytes:
        """What came of a future."""
        body = json.dumps({"request_id": request_id}).encode()
        while True:
            status, answer = await self.ask("POST", "retrieve_future", body, accept=PROTOBUF)
            if status != 200 or b'"error"' in answer[:20]:
                raise WrongResultError(f"{request_id} was answered with {status} {answer[:200]!r}")
            if b'"try_again"' not in answer[:20]:
                return answer


class Manners:
    """How a public client sends samples: 400 at a time; when it is sent away, it waits, then sends ten at a time."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(400)
        self._few_places = asyncio.Semaphore(10)
        self._wait_until = float("-inf")

    @contextlib.asynccontextmanager
    async def sending(self) -> AsyncIterator[None]:
        """When it is this one's turn."""
        async with contextlib.AsyncExitStack() as turn:
            await turn.enter_async_context(self._places)
            if time.monotonic() - self._wait_until < 10:
                await turn.enter_async_context(self._few_places)
            yield

    async def wait(self) -> None:
        """Not before a second after anybody was sent away."""
        while time.monotonic() < self._wait_until:
            await asyncio.sleep(1)

    def sent_away(self) -> None:
        """Nobody shall come for a second."""
        self._wait_until = time.monotonic() + 1


async def new_session(door: Door) -> str:
    """The id of a new session."""
    async with Connection.to(door) as connection:
        session_id: str = json.loads((await connection.ask("POST", "create_session", b"{}"))[1])["session_id"]
        return session_id


async def model_and_sampler(door: Door, session_id: str, base_model: str) -> tuple[str, str]:
    """The ids of a model and of a sampler of the base model."""
    async with Connection.to(door) as connection:
        fields = {"session_id": session_id, "model_seq_id": 0, "base_model": base_model, "lora_config": {"rank": 8}}
        ack = json.loads((await connection.ask("POST", "create_model", json.dumps(fields).encode()))[1])
        made = json.loads(await connection.result(ack["request_id"]))
        fields = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": base_model}
        answer = (await connection.ask("POST", "create_sampling_session", json.dumps(fields).encode()))[1]
        return made["model_id"], json.loads(answer)["sampling_session_id"]


async def draw(door: Door, manners: Manners, fields: dict[str, object]) -> tuple[bytes, int]:
    """The result of an asample, and how often it was sent away."""
    body = json.dumps(fields).encode()
    sent_away = 0
    async with contextlib.AsyncExitStack() as scope:
        async with manners.sending():
            connection = await scope.enter_async_context(Connection.to(door))
            while True:
                await manners.wait()
                status, ack = await connection.ask("POST", "asample", body)
                if status == 200:
                    break
                if status != 429:
                    raise WrongResultError(f"a sample was answered with {status} {ack[:200]!r}")
                sent_away += 1
                manners.sent_away()
        return await connection.result(json.loads(ack)["request_id"]), sent_away


def beats(door: Door, session_id: str, load: Callable[[], object]) -> list[float]:
    """How long the heartbeats of a session took while `load` ran, sent from a process of their own."""
    reading, writing = os.pipe()
    os.set_inheritable(reading, True)
    told_door = json.dumps(dataclasses.asdict(door))
    beating = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.service_client", told_door, session_id, str(reading)],
        pass_fds=[reading],
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(reading)
    try:
        load()
    finally:
        os.close(writing)
        told, _ = beating.communicate(timeout=60)
    if beating.returncode:
        raise WrongResultError("a heartbeat was refused")
    times: list[float] = json.loads(told)
    return times


async def beat(door: Door, session_id: str, stop: int) -> list[float]:
    """Heartbeats of a session until `stop` is closed at its other end."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(stop, ended.set)
    times = []
    async with Connection.to(door) as connection:
        body = json.dumps({"session_id": session_id}).encode()
        while not ended.is_set():
            began = time.perf_counter()
            status, _ = await connection.ask("POST", "session_heartbeat", body)
            times.append(time.perf_counter() - began)
            if status != 200:
                raise WrongResultError(f"a heartbeat was answered with {status}")
            await asyncio.sleep(BEATS_EVERY_S)
    return times


def allow_many_connections() -> None:
    """As many as the machine allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    print(json.dumps(uvloop.run(beat(Door(**json.loads(sys.argv[1])), sys.argv[2], int(sys.argv[3])))))

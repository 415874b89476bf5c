"""What keeps an engine busy, and what thousands of samples cost the front: bounds that hold on a slow machine, too."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from forgetful_proxy import ForgetfulProxy
from plain_client import Client, sample
from running_front import RunningFront

from patience import PATIENCE_S

TINKER = (
    Path(os.environ.get("TRAINMASTER_CLIENTS_DIR", Path(__file__).parents[2] / ".venvs")) / "tinker" / "bin" / "python"
)
SCRIPT = Path(__file__).parent / "client_scripts" / "tinker_pipeline.py"


def pipeline(url: str, *, pairs: int, tokens: int) -> list[float]:
    """The losses of so many steps that a public client asked for at once."""
    ran = subprocess.run(
        [str(TINKER), str(SCRIPT), url, str(pairs), str(tokens)],
        stdout=subprocess.PIPE,
        check=True,
        timeout=PATIENCE_S,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    losses: list[float] = json.loads(ran.stdout.splitlines()[-1])
    return losses


def test_pipelined_steps_keep_the_engine_busy() -> None:
    """It finds the next operation at hand whenever one is done, but for the first few, before the client is ahead."""
    pairs, pass_s = 20, 0.1
    with RunningFront(delays={"pass_s": pass_s}) as front:
        losses = pipeline(front.url, pairs=pairs, tokens=64)
        work, waits = front.engine.work, front.engine.waits
    assert losses == [pytest.approx(64 * 4 / (1 + step)) for step in range(pairs)]
    assert len(work) == 2 * pairs
    busy_s = sum(ended - began for began, ended in work)
    assert busy_s >= pairs * pass_s
    # A client that asks for one thing after the other, or a front that lets it, has one wait for each operation.
    assert len(waits) <= pairs // 2
    assert work[-1][1] - work[0][0] < 1.5 * busy_s


def test_tinker_comes_again_when_bodies_are_too_many() -> None:
    """Each pass has 1.6 MB, and the front may hold 4 MB: nothing is lost, and nothing done twice or out of order."""
    with RunningFront(max_held_bytes=4_000_000) as front:
        with ForgetfulProxy(front.url) as proxy:
            front.engine.may_pass = proxy.sent_away
            losses = pipeline(proxy.url, pairs=6, tokens=100_000)
            asked = proxy.asked["forward_backward"]
        done = [(seq_id, op) for _, seq_id, op in front.engine.done if seq_id]
    assert asked > 6
    assert losses == [pytest.approx(400_000 / (1 + step)) for step in range(6)]
    assert done == [(seq_id, "forward_backward" if seq_id % 2 else "optim_step") for seq_id in range(1, 13)]


@pytest.mark.parametrize("count", [1_000, pytest.param(8_000, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_many_samples_at_once_cost_little_memory_and_no_session(count: int) -> None:
    """Each with a prompt of 1,000 tokens and a connection of its own, all outstanding together."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with RunningFront(session_expires_s=5, delays={"sample_s": count / 400}, executed=True) as front:
        client = Client(front)
        before = peak_bytes(front.process.pid)
        drawn = asyncio.run(draw_all(front, client.session_id, client.sampling_session(), count))
        assert drawn == [number % 1000 for number in range(count)]
        assert peak_bytes(front.process.pid) - before < (16 << 20) + count * BYTES_A_SAMPLE
        assert client.post("session_heartbeat", session_id=client.session_id)


BYTES_A_SAMPLE = 24 << 10
"""Two connections' worth of buffers and tasks, the request on its way to the engine, and the result."""


async def draw_all(front: RunningFront, session_id: str, sampling_session_id: str, count: int) -> list[int]:
    """The first token of each sample, while the session is kept alive."""
    begins = asyncio.Semaphore(64)

    async def draw(number: int) -> int:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [number, *[0] * 999]}]}
        body = sample(sampling_session_id, number, prompt=prompt, num_samples=1)
        async with contextlib.AsyncExitStack() as stack:
            async with begins:
                connection = await stack.enter_async_context(connected(front.url))
                ack = await ask(connection, "asample", body)
            while ack is None:  # sent away
                await asyncio.sleep(1)
                ack = await ask(connection, "asample", body)
            answer: dict[str, Any] | None = None
            while answer is None or answer.get("type") == "try_again":
                answer = await ask(connection, "retrieve_future", {"request_id": ack["request_id"]})
            return int(answer["sequences"][0]["tokens"][0])

    async def beat() -> None:
        async with connected(front.url) as connection:
            while True:
                assert await ask(connection, "session_heartbeat", {"session_id": session_id})
                await asyncio.sleep(1)

    beating = asyncio.create_task(beat())
    drawn = await asyncio.gather(*map(draw, range(count)))
    assert not beating.done()
    beating.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await beating
    return drawn


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[Connection]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


async def ask(connection: Connection, path: str, fields: dict[str, Any]) -> dict[str, Any] | None:
    """What the front answers; None when it asks to come again."""
    reader, writer = connection
    body = json.dumps(fields).encode()
    writer.write(f"POST /api/v1/{path} HTTP/1.1\r\nHost: front\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    answer: dict[str, Any] = json.loads(await reader.readexactly(length))
    status = int(head.split(b" ", 2)[1])
    assert status in (200, 408, 429), answer
    return None if status == 429 else answer


def peak_bytes(pid: int) -> int:
    """The most memory that a process ever had."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError

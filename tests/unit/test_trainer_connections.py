"""Answers of trainers that are none, and requests that would be two."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest

from attacker import UID, squatting
from trainmaster.protocol.trainer_requests import Trainer
from trainmaster.server.http.proxy import BrokenOffError, Connections

TRAINER = Trainer("job-a", 1)


async def asked(
    answer: bytes, header: bytes = b"x", *, closes: bool = True, method: str = "GET", patience_s: float | None = None
) -> tuple[bytes, bytes | None]:
    """What a trainer was sent that answers like this, and what its client took for the body; None: it was refused."""
    sent = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        try:
            sent = await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
            if not closes:
                await reader.read()  # until the client gives up
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        pool = Connections()
        connection = await pool.open(TRAINER, f"127.0.0.1:{port}", "token")
        try:
            response = await pool.exchange(connection, method, b"/", [(b"x-a", header)], b"", patience_s=patience_s)
            body: bytes | None = await response.body()
        except BrokenOffError:
            body = None
            assert connection.writer.transport.is_closing()
        assert body is not None or pool.kept(TRAINER) is None
        pool.close()
        return sent, body


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("leaves", [False, True])
def test_another_user_on_the_port_of_a_trainer_is_sent_nothing(leaves: bool) -> None:
    async def ask(port: int, uid: int | None) -> bytes:
        pool = Connections()
        connection = await pool.open(TRAINER, f"127.0.0.1:{port}", "token-of-the-ranks", uid)
        answer = await pool.exchange(connection, "POST", b"/", [], b"what is trained on")
        body = await answer.body()
        pool.close()
        return body

    with squatting(leaves=leaves) as squatter, pytest.raises(BrokenOffError, match=f"taken by uid {UID}"):
        asyncio.run(ask(squatter.port, None))
    assert squatter.received == b""
    with squatting() as service:
        assert asyncio.run(ask(service.port, UID)) == b"ok"
    assert b"token-of-the-ranks" in service.received


def run(work: Callable[[], Awaitable[tuple[bytes, bytes | None]]]) -> tuple[bytes, bytes | None]:
    async def within() -> tuple[bytes, bytes | None]:
        async with asyncio.timeout(20):
            return await work()

    return asyncio.run(within())


@pytest.mark.parametrize("length", [b"-1", b"+2", b"2x", b"", b"1_0"])
def test_length_that_is_none_is_no_answer(length: bytes) -> None:
    # A length below zero would mean all that ever comes.
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %s\r\n\r\nhe" % length
    assert run(lambda: asked(answer))[1] is None


@pytest.mark.parametrize("size", [b"-2", b"+2", b""])
def test_chunk_without_a_size_is_no_answer(size: bytes) -> None:
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%s\r\nhe\r\n0\r\n\r\n" % size
    assert run(lambda: asked(answer))[1] is None


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhe",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n0\r\n\r\n",
    ],
)
def test_answer_is_read_to_its_end(answer: bytes) -> None:
    assert run(lambda: asked(answer, closes=False))[1] == b"he"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nhe",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n",
    ],
)
def test_answer_that_stops_in_the_middle_is_not_waited_for_for_ever(answer: bytes) -> None:
    assert run(lambda: asked(answer, closes=False, patience_s=0.2))[1] is None


def test_answer_without_a_length_ends_with_its_connection() -> None:
    assert run(lambda: asked(b"HTTP/1.0 200 OK\r\n\r\nhe"))[1] == b"he"


def test_answer_to_head_has_a_length_and_no_body() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
    assert run(lambda: asked(answer, closes=False, method="HEAD"))[1] == b""


@pytest.mark.parametrize("header", [b"a\r\nX-Trainmaster-Source: /b", b"a\nb", b"a\r\n\r\nGET / HTTP/1.1"])
def test_header_cannot_become_another(header: bytes) -> None:
    assert run(lambda: asked(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", header)) == (b"", None)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 999 Odd\r\n",
        b"HTTP/1.1 000 Odd\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n",
        b"HTTP/1.1 -20 OK\r\n",
        b"HTTP/1.1 2000 OK\r\n",
        b"HTTP/1.1 OK\r\n",
        b"200 OK\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 2000 + b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\nSet-Cookie: b\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * (2 << 20) + b"\r\n",
    ],
)
def test_head_that_is_no_http_is_no_answer(head: bytes) -> None:
    assert run(lambda: asked(head + b"Content-Length: 2\r\n\r\nhe"))[1] is None

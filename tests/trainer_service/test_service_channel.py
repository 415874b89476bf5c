"""The socket between the front and the engine process: everything arrives, in order, and an end is noticed."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from patience import PATIENCE_S
from trainmaster.trainer_service import channel
from trainmaster.trainer_service.channel import ChannelClosedError, EngineChannel, FrontChannel
from trainmaster.trainer_service.messages import (
    INLINE_BYTES,
    EngineReady,
    EngineStopped,
    Message,
    Reply,
    Request,
    SharedBody,
)

SIZES = [0, 1, INLINE_BYTES, INLINE_BYTES + 1, 5 << 20]
FULL = {"loss": float("inf"), "text": 'a "quoted" \u2028 line', "deep": {"list": [1, None, True]}}


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = channel.pair()
    yield near, far
    near.close()
    far.close()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Heard:
    """What a front's end received."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.closed = 0

    def open(self, end: socket.socket) -> FrontChannel:
        return FrontChannel(end, received=self.messages.append, closed=self._close)

    def _close(self) -> None:
        self.closed += 1


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def test_engine_that_cannot_read_a_message_does_not_wait_for_the_next(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    near, far = ends
    engine = EngineChannel(far)
    header = b'{"is":"Unheard"}'
    near.send(len(header).to_bytes(4, "big") + header)
    with pytest.raises(ChannelClosedError):
        engine.receive(timeout_s=20)
    engine.close()


def test_engine_says_why_it_cannot_read(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that has no maps or descriptors left was not hung up on."""

    def fails(_fd: int, _size: int) -> memoryview:
        raise OSError(errno.EMFILE, "none left")

    monkeypatch.setattr(channel, "mapped", fails)
    near, far = ends
    engine, other = EngineChannel(far), EngineChannel(near)
    other.send(Reply(request_id="r", body=bytes(INLINE_BYTES + 1)))
    with pytest.raises(ChannelClosedError):
        engine.receive(timeout_s=20)
    assert "none left" in caplog.text
    caplog.clear()
    engine.close()
    other.close()
    assert not caplog.text


def test_engine_that_hangs_up_waits_for_who_sends(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of a descriptor that is closed is soon another's: what is sent then would go there."""
    begun, goes_on = threading.Event(), threading.Event()
    open_still: list[bool] = []

    def slow(end: socket.socket, _datagram: bytes, _bodies: list[SharedBody]) -> None:
        begun.set()
        goes_on.wait(PATIENCE_S)
        open_still.append(end.fileno() >= 0)

    monkeypatch.setattr(channel, "_send", slow)
    engine = EngineChannel(ends[0])
    sends = threading.Thread(target=engine.send, args=(EngineStopped(reason="paused"),))
    closes = threading.Thread(target=engine.close)
    sends.start()
    begun.wait(PATIENCE_S)
    closes.start()
    closes.join(0.2)
    goes_on.set()
    for thread in (sends, closes):
        thread.join(PATIENCE_S)
    assert open_still == [True]
    assert ends[0].fileno() == -1


@pytest.mark.parametrize("size", SIZES)
def test_request_reaches_the_engine_whole(ends: tuple[socket.socket, socket.socket], size: int) -> None:
    request = Request(
        request_id="r",
        op="forward_backward",
        model_id="m",
        seq_id=3,
        fields=FULL,
        body=os.urandom(size),
        content_type="application/x-protobuf",
        encoding="zstd",
        door="tinker",
        source="/a/b",
    )

    async def front() -> None:
        Heard().open(ends[0]).send(request)

    asyncio.run(front())
    engine = EngineChannel(ends[1])
    got = engine.receive(10)
    assert got == request
    engine.close()


@pytest.mark.parametrize("size", SIZES)
def test_reply_reaches_the_front_whole(ends: tuple[socket.socket, socket.socket], size: int) -> None:
    said: list[Message] = [
        EngineReady(capabilities={"supported_models": []}, checkpoints=({"path": "a"}, {"path": "b"})),
        Reply(request_id="r", body=os.urandom(size), info={"path": "x"}),
        Reply(request_id="q", fields=FULL, error="no", category="user"),
        EngineStopped(reason="paused", checkpoints=({"path": "c"},)),
    ]
    engine = EngineChannel(ends[0])

    async def front() -> None:
        heard = Heard()
        opened = heard.open(ends[1])
        for message in said:
            await asyncio.to_thread(engine.send, message)
        await until(lambda: len(heard.messages) == len(said))
        assert heard.messages == said
        opened.close()

    asyncio.run(front())
    engine.close()


def test_shared_body_is_sent_as_it_is(ends: tuple[socket.socket, socket.socket]) -> None:
    """Neither end copies it: the descriptor travels, and no descriptor is left open."""
    data = os.urandom(1 << 20)
    before = descriptors()

    async def front() -> None:
        heard = Heard()
        opened = heard.open(ends[0])
        for on_disk in (False, True):
            body = SharedBody(on_disk=on_disk)
            body.write(data[:1000])
            body.write(data[1000:])
            opened.send(Request(request_id="r", op="forward_backward"), body)
            assert body.fd == -1

    asyncio.run(front())
    engine = EngineChannel(ends[1])
    for _ in range(2):
        got = engine.receive(10)
        assert isinstance(got, Request)
        assert isinstance(got.body, memoryview)
        assert got.body.readonly
        assert got.body == data
    engine.close()
    assert descriptors() <= before


def test_large_header_travels_too(ends: tuple[socket.socket, socket.socket]) -> None:
    fields = {str(number): "x" * 100 for number in range(5000)}
    engine = EngineChannel(ends[0])
    other = EngineChannel(ends[1])
    engine.send(Reply(request_id="r", fields=fields, body=b"y" * (INLINE_BYTES + 1)))
    got = other.receive(10)
    assert isinstance(got, Reply)
    assert got.fields == fields
    assert got.body == b"y" * (INLINE_BYTES + 1)
    engine.close()
    other.close()


def test_burst_that_nobody_reads_yet_is_kept_in_order(ends: tuple[socket.socket, socket.socket]) -> None:
    """The front never blocks on an engine that is busy."""
    count = 3000
    data = os.urandom(20_000)

    async def front() -> EngineChannel:
        opened = Heard().open(ends[0])
        for number in range(count):
            opened.send(Request(request_id=str(number), op="asample", body=data))
        engine = EngineChannel(ends[1])
        for number in range(count):
            got = await asyncio.to_thread(engine.receive, 10)
            assert isinstance(got, Request)
            assert (got.request_id, got.body) == (str(number), data)
        return engine

    asyncio.run(front()).close()


def test_threads_may_reply_at_once(ends: tuple[socket.socket, socket.socket]) -> None:
    engine, other = EngineChannel(ends[0]), EngineChannel(ends[1])
    bodies = {str(number): os.urandom(number * 997) for number in range(200)}

    def reply(part: int) -> None:
        for number in range(part, 200, 4):
            engine.send(Reply(request_id=str(number), body=bodies[str(number)]))

    threads = [threading.Thread(target=reply, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    got = {}
    for _ in range(200):
        message = other.receive(10)
        assert isinstance(message, Reply)
        got[message.request_id] = bytes(message.body or b"")
    for thread in threads:
        thread.join()
    assert got == bodies
    engine.close()
    other.close()


def test_engine_gets_what_was_said_before_the_front_ended(ends: tuple[socket.socket, socket.socket]) -> None:
    async def front() -> None:
        opened = Heard().open(ends[0])
        opened.send(Request(request_id="last", op="optim_step"))
        opened.close()

    asyncio.run(front())
    engine = EngineChannel(ends[1])
    got = engine.receive(10)
    assert isinstance(got, Request)
    assert got.request_id == "last"
    for _ in range(2):
        with pytest.raises(ChannelClosedError):
            engine.receive(10)
    with pytest.raises(ChannelClosedError):
        engine.send(EngineStopped(reason="paused"))
    engine.close()


def test_front_hears_the_last_word_of_an_engine_that_ends(ends: tuple[socket.socket, socket.socket]) -> None:
    async def front() -> None:
        heard = Heard()
        opened = heard.open(ends[1])
        engine = EngineChannel(ends[0])
        engine.send(EngineStopped(reason="paused"))
        engine.close()
        await until(lambda: heard.closed)
        assert heard.messages == [EngineStopped(reason="paused")]
        opened.send(Request(request_id="late", op="optim_step"))
        assert heard.closed == 1

    asyncio.run(front())


def test_waiting_for_nothing_ends_in_time(ends: tuple[socket.socket, socket.socket]) -> None:
    engine = EngineChannel(ends[0])
    assert engine.receive(0) is None
    assert engine.receive(0.05) is None
    engine.close()

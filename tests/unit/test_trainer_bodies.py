"""For whom a body is, however it was made."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import struct
import tracemalloc
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import zstandard
from starlette.requests import Request

from trainmaster.server.core.errors import SpecError
from trainmaster.server.doors import bodies
from trainmaster.server.doors.bodies import IncomingBody, text_field
from trainmaster.server.http import requests
from trainmaster.server.http.errors import RateLimitedError, StalledError

NAME = b"sess-a:train:0"
MESSAGE = b"\x0a" + bytes([len(NAME)]) + NAME


def body_of(pieces: Iterable[bytes], account_id: str = "acme", **headers: str) -> IncomingBody:
    left = iter(pieces)

    async def receive() -> Any:
        piece = next(left, None)
        return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}

    told = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return IncomingBody(Request({"type": "http", "method": "POST", "headers": told}, receive), account_id)


def compressed(pieces: Iterable[bytes]) -> IncomingBody:
    return body_of(pieces, content_type="application/x-protobuf", content_encoding="zstd")


def of_half_a_gigabyte() -> bytes:
    """A frame of 16 KiB whose blocks each stand for 128 KiB of one letter."""
    block = struct.pack("<I", 131072 << 3 | 1 << 1)[:3] + b"A"
    return b"\x28\xb5\x2f\xfd\x00\x88" + block * 4090


def test_compressed_body_is_not_inflated_beyond_what_is_looked_at() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(SpecError):
            asyncio.run(text_field(compressed([of_half_a_gigabyte()]), "model_id"))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("piece", [1000, 65536, 1 << 20])
def test_compressed_body_whose_first_block_is_large_names_its_model(piece: int) -> None:
    # Half of the bits are noise, as those of weights and probabilities are: a block is half as long as what it holds.
    noise = bytes(random.Random(0).choices(b"0123456789abcdef", k=500_000))
    data = zstandard.ZstdCompressor().compress(MESSAGE + noise)
    pieces = [data[start : start + piece] for start in range(0, len(data), piece)]
    assert asyncio.run(text_field(compressed(pieces), "model_id")) == NAME.decode()


def test_compressed_body_that_comes_byte_by_byte_is_not_inflated_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    def inflated(head: bytes) -> bytes:
        nonlocal tries
        tries += 1
        return b""

    monkeypatch.setattr(bodies, "_inflated", inflated)
    with pytest.raises(SpecError):
        asyncio.run(text_field(compressed([b"x"] * 20_000), "model_id"))
    assert tries < 40


def test_large_json_is_not_decoded_in_search_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    filling: list[list[int]] = [[]] * 40_000
    asked = {"data": filling, "model_id": NAME.decode(), "more": filling}
    with pytest.raises(SpecError, match="beginning"):
        asyncio.run(text_field(body_of([json.dumps(asked).encode()]), "model_id"))


def large(account_id: str, seen: list[int] | None = None) -> IncomingBody:
    """Of two megabytes; its model is named at its end."""

    def pieces() -> Iterator[bytes]:
        yield b'{"data": [' + b"1," * 64
        for number in range(32):
            if seen is not None:
                seen.append(number)
            yield b"1," * (1 << 15)
        yield b'1], "model_id": "' + NAME + b'"}'

    return body_of(pieces(), account_id, content_type="application/json")


@pytest.mark.parametrize(
    ("in_all", "held", "refused"),
    [(9 << 20, ("a", "b", "c", "d"), "e"), (17 << 20, ("a", "a"), "a")],
    ids=["of all accounts", "of one account"],
)
def test_bodies_that_are_held_as_a_whole_are_bounded(
    in_all: int, held: tuple[str, ...], refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever finds no room is read to the end, and finds some later: without a collection of garbage."""
    monkeypatch.setattr(bodies, "MAX_WHOLE_BYTES_IN_ALL", in_all)

    async def storm() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for account_id in held:
                assert await text_field(await stack.enter_async_context(large(account_id)), "model_id") == NAME.decode()
            seen: list[int] = []
            with pytest.raises(RateLimitedError) as late:
                async with large(refused, seen) as body:
                    await text_field(body, "model_id")
            assert late.value.retry_after_s == 1
            assert len(seen) == 32
            if in_all > 16 << 20:
                async with large("another") as body:
                    assert await text_field(body, "model_id") == NAME.decode()
        async with large(refused) as body:
            assert await text_field(body, "model_id") == NAME.decode()
        assert not body.pieces

    asyncio.run(storm())


def test_body_of_which_no_more_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "PATIENCE_S", 0.05)

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def wait() -> None:
        async with IncomingBody(Request({"type": "http", "method": "POST", "headers": []}, receive), "acme") as body:
            await text_field(body, "model_id")

    with pytest.raises(StalledError):
        asyncio.run(wait())

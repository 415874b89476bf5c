"""For whom a body is, however it was made."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import struct
import tracemalloc
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import zstandard
from starlette.requests import Request

from trainmaster.api.errors import RateLimitedError
from trainmaster.api.tinker import bodies
from trainmaster.api.tinker.bodies import Body, text_field
from trainmaster.core.errors import SpecError

NAME = b"sess-a:train:0"
MESSAGE = b"\x0a" + bytes([len(NAME)]) + NAME


def body_of(pieces: Iterable[bytes], **headers: str) -> Body:
    left = iter(pieces)

    async def receive() -> Any:
        piece = next(left, None)
        return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}

    told = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Body(Request({"type": "http", "method": "POST", "headers": told}, receive))


def compressed(pieces: Iterable[bytes]) -> Body:
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
    monkeypatch.setattr(bodies, "MAX_DECODED_BYTES", 100_000)
    filling: list[list[int]] = [[]] * 40_000
    asked = {"data": filling, "model_id": NAME.decode(), "more": filling}
    with pytest.raises(SpecError, match="beginning"):
        asyncio.run(text_field(body_of([json.dumps(asked).encode()]), "model_id"))


def test_bodies_that_are_held_as_a_whole_are_bounded_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their models are named at their ends; whoever finds no room is read to the end, and finds some later."""
    monkeypatch.setattr(bodies, "MAX_WHOLE_BYTES_IN_ALL", 5 << 20)

    def large(seen: list[int]) -> Body:
        def pieces() -> Iterator[bytes]:
            yield b'{"data": [' + b"1," * 64
            for number in range(32):
                seen.append(number)
                yield b"1," * (1 << 15)
            yield b'1], "model_id": "' + NAME + b'"}'

        return body_of(pieces(), content_type="application/json")

    async def storm() -> None:
        held = [large([]), large([])]
        assert [await text_field(body, "model_id") for body in held] == [NAME.decode()] * 2
        seen: list[int] = []
        with pytest.raises(RateLimitedError) as refused:
            await text_field(large(seen), "model_id")
        assert refused.value.retry_after_s == 1
        assert len(seen) == 32
        held.pop()
        gc.collect()
        assert await text_field(large([]), "model_id") == NAME.decode()

    asyncio.run(storm())

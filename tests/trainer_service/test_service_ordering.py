"""The order of a model's operations, of requests in a burst, and what a body is about without decoding it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from trainmaster.protocol.trainer_requests import PROTOBUF, PeekError, peek_json, peek_protobuf
from trainmaster.trainer_service import schema
from trainmaster.trainer_service.front import models
from trainmaster.trainer_service.front import requests as front_requests
from trainmaster.trainer_service.front.models import Arrival, OperationOrder
from trainmaster.trainer_service.front.request_bodies import Received, RequestRefusedError
from trainmaster.trainer_service.front.routes import REQUESTS_A_ROUND, PacingMiddleware
from trainmaster.trainer_service.messages import INLINE_BYTES


@given(st.integers(1, 40).flatmap(lambda count: st.permutations([*range(1, count + 1)] * 2)))
def test_any_arrival_leaves_in_sequence_and_once(arrivals: list[int]) -> None:
    order: OperationOrder[int] = OperationOrder(max_waiting=100, max_waiting_bytes=100)
    left: list[int] = []
    seen = set()
    for seq_id in arrivals:
        placement = order.place(seq_id, b"%d" % seq_id, seq_id, size=1, room=True)
        assert placement is (Arrival.REPEAT if seq_id in seen else Arrival.NEW)
        seen.add(seq_id)
        left += order.leave()
        assert left == list(range(1, order.next_seq_id))
    assert left == sorted(seen)
    assert order.waiting == 0


@given(st.lists(st.integers(1, 30), max_size=60))
def test_nothing_passes_a_gap(arrivals: list[int]) -> None:
    order: OperationOrder[int] = OperationOrder(max_waiting=100, max_waiting_bytes=100)
    left: list[int] = []
    for seq_id in arrivals:
        order.place(seq_id, b"", seq_id, size=1, room=True)
        left += order.leave()
    first_missing = next(number for number in range(1, 32) if number not in arrivals)
    assert left == list(range(1, first_missing))
    assert order.next_seq_id == first_missing
    assert order.abandon() == sorted({seq_id for seq_id in arrivals if seq_id > first_missing})


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 60)), max_size=60))
def test_what_waits_is_bounded_and_what_it_waits_for_is_not(arrivals: list[tuple[int, int]]) -> None:
    """Whoever is sent away comes again until everything is in: no bound may keep that from happening."""
    order: OperationOrder[int] = OperationOrder(max_waiting=3, max_waiting_bytes=100)
    sizes: dict[int, int] = {}
    left: list[int] = []
    for seq_id, size in [*arrivals, *((seq_id, 200) for seq_id in range(1, 13))]:
        size = sizes.get(seq_id, size)
        due = seq_id == order.next_seq_id
        placement = order.place(seq_id, b"", seq_id, size=size, room=size <= 80)
        if placement is Arrival.FULL:
            assert not due
            assert order.waiting == 3 or order.waiting_bytes + size > 100 or size > 80
        else:
            sizes[seq_id] = size
        left += order.leave()
        assert order.waiting <= 3
        assert order.waiting_bytes == sum(sizes[number] for number in set(sizes) - set(left)) <= 100
    assert left == list(range(1, 13))


@pytest.mark.parametrize("gone", [True, False])
def test_another_operation_under_the_same_number_is_a_conflict(gone: bool) -> None:
    order: OperationOrder[str] = OperationOrder(max_waiting=100, max_waiting_bytes=100)
    seq_id = 1 if gone else 2
    order.place(seq_id, b"first", "first", size=1, room=True)
    left = list(order.leave())
    assert order.place(seq_id, b"other", "other", size=1, room=True) is Arrival.CONFLICT
    assert order.place(seq_id, b"first", "again", size=1, room=True) is Arrival.REPEAT
    order.place(1, b"one", "one", size=1, room=True)
    left += order.leave()
    assert left[-1] == "first"
    assert "other" not in left


def test_memory_of_repeats_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "REMEMBERED", 10)
    order: OperationOrder[int] = OperationOrder(max_waiting=100, max_waiting_bytes=100)
    for seq_id in range(1, 101):
        order.place(seq_id, b"a", seq_id, size=1, room=True)
        list(order.leave())
    assert len(order._digests) == 10
    assert order.place(100, b"b", 100, size=1, room=True) is Arrival.CONFLICT
    # Too long ago to be compared; it is not done again all the same.
    assert order.place(3, b"b", 3, size=1, room=True) is Arrival.REPEAT


def test_burst_begins_in_order_and_a_few_at_a_time() -> None:
    """What is urgent passes everything that waits."""
    begun: list[str] = []

    async def answer(scope: Scope, _receive: Receive, _send: Send) -> None:
        begun.append(scope["path"])

    async def burst() -> None:
        app = PacingMiddleware(answer, urgent=frozenset({"/beat"}))

        async def ask(path: str) -> None:
            await app({"type": "http", "path": path}, None, None)  # type: ignore[arg-type]

        for _ in range(2):
            begun.clear()
            asked = [asyncio.ensure_future(ask(str(number))) for number in range(5 * REQUESTS_A_ROUND)]
            await asyncio.sleep(0)
            assert len(begun) == REQUESTS_A_ROUND
            await ask("/beat")
            assert begun.index("/beat") <= 2 * REQUESTS_A_ROUND
            asked[-1].cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            begun.remove("/beat")
            assert begun == [str(number) for number in range(5 * REQUESTS_A_ROUND - 1)]
            await asyncio.sleep(0.01)

    asyncio.run(burst())


def reading(body: bytes) -> tuple[front_requests.Read, int]:
    return lambda offset, count: body[offset : offset + count], len(body)


def json_pass(values: int, **members: Any) -> dict[str, Any]:
    tensor = {"data": [1.5] * values, "dtype": "float32", "shape": [values]}
    # Names inside must not be taken for the body's own.
    datum = {"loss_fn_inputs": {"model_id": tensor, "x": {"seq_id": 77, "model_id": "inner"}}, "model_input": {}}
    return {"forward_backward_input": {"data": [datum], "loss_fn": "c"}, **members}


@pytest.mark.parametrize("values", [3, 100_000])
def test_json_members_are_found_at_the_end(values: int) -> None:
    body = json.dumps(json_pass(values, model_id="s:train:0", seq_id=4)).encode()
    assert (len(body) > INLINE_BYTES) is (values > 3)
    found = peek_json(*reading(body))
    assert (found["model_id"], found["seq_id"]) == ("s:train:0", 4)


@pytest.mark.parametrize("indent", [None, 2])
def test_json_members_are_found_at_both_ends(indent: int | None) -> None:
    body = {"num_samples": 2, "model_id": "m", **json_pass(100_000, seq_id=9, flag=True, nothing=None, ratio=-1.5e3)}
    found = peek_json(*reading(json.dumps(body, indent=indent).encode() + b" \n"))
    assert found == {"num_samples": 2, "model_id": "m", "seq_id": 9, "flag": True, "nothing": None, "ratio": -1500.0}


def test_json_members_in_the_middle_are_not_guessed() -> None:
    whole = json_pass(100_000)
    body = json.dumps({"a": [1] * 50_000, "model_id": "m", "seq_id": 1, **whole}).encode()
    assert peek_json(*reading(body)) == {}


def test_text_that_looks_like_members_is_not_taken_for_them() -> None:
    """A string at the end may hold anything, quotes among it."""
    body = json.dumps({"data": [1] * 50_000, "note": ',"model_id":"inner","seq_id":5}'}).encode()
    assert peek_json(*reading(body)) == {}
    body = json.dumps({"data": [1] * 50_000, "note": ',"model_id":"inner","seq_id":5', "seq_id": 6}).encode()
    assert peek_json(*reading(body)) == {"seq_id": 6}
    body = json.dumps({"data": [1] * 50_000, "inner": {"seq_id": 5, "model_id": "inner"}}).encode()
    assert peek_json(*reading(body)) == {}


LARGE = {indent: json.dumps([7] * 40_000, indent=indent) for indent in (None, 1)}


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
            max_leaves=8,
        ),
        max_size=8,
    ),
    st.sampled_from([None, 1]),
)
def test_what_is_found_in_large_json_is_true(members: dict[str, Any], indent: int | None) -> None:
    """Of any object, wherever its large part lies: never a member that it does not have."""
    names = list(members)
    middle = len(names) // 2
    ordered = {name: members[name] for name in names[:middle]}
    ordered["\0large"] = "\0its value"
    ordered |= {name: members[name] for name in names[middle:]}
    body = json.dumps(ordered, indent=indent).replace(json.dumps("\0its value"), LARGE[indent]).encode()
    ordered["\0large"] = [7] * 40_000
    for name, value in peek_json(*reading(body)).items():
        assert ordered[name] == value


@pytest.mark.parametrize("body", [b"{", b"[1]", b"3", b"\xff"])
def test_small_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(PeekError):
        peek_json(*reading(body))


def protobuf_pass(datums: int, tokens: int = 4) -> bytes:
    message = schema.ForwardBackwardRequest(model_id="s:train:0", seq_id=300, loss_fn="c")
    for _ in range(datums):
        message.data.add().model_input.add().encoded_text.tokens = bytes(4 * tokens)
    return bytes(message.SerializeToString())


def peek_compressed(body: bytes) -> dict[str, Any]:
    received = Received(data=body, shared=None, size=len(body), digest=b"", whole=True)
    return front_requests.peek(received, PROTOBUF, "zstd")


def test_protobuf_fields_are_found() -> None:
    expected = {"model_id": "s:train:0", "seq_id": 300}
    assert peek_protobuf(*reading(protobuf_pass(3))) == expected
    packed = zstandard.ZstdCompressor().compress(protobuf_pass(1000, 500))
    assert peek_compressed(packed) == expected


def test_protobuf_fields_are_found_behind_the_data() -> None:
    data = schema.ForwardBackwardRequest(loss_fn="c")
    data.data.add().model_input.add().encoded_text.tokens = bytes(1 << 20)
    ids = schema.ForwardBackwardRequest(model_id="m", seq_id=2)
    body = data.SerializeToString() + b"\x49" + bytes(8) + b"\x4d" + bytes(4) + ids.SerializeToString()
    assert peek_protobuf(*reading(body)) == {"model_id": "m", "seq_id": 2}


@pytest.mark.parametrize("body", [b"\x0b", b"\xff" * 12, b"\x80", b"\x0a\x02\xff\xfe"])
def test_bytes_that_are_no_message_are_refused(body: bytes) -> None:
    with pytest.raises(PeekError):
        peek_protobuf(*reading(body))


def test_compressed_garbage_is_refused() -> None:
    with pytest.raises(RequestRefusedError, match="zstd"):
        peek_compressed(b"not compressed")


def test_search_in_protobuf_is_bounded() -> None:
    """Millions of fields that are none of those looked for must not keep the event loop."""
    reads = 0

    def counted(offset: int, count: int) -> bytes:
        nonlocal reads
        reads += 1
        return (b"\x48\x01" * count)[:count]

    assert peek_protobuf(counted, 1 << 30) == {}
    assert reads < 5000


@pytest.mark.parametrize("form", ["protobuf", "json"])
def test_only_the_ends_of_a_large_body_are_read(form: str) -> None:
    large = protobuf_pass(1000, 5000) if form == "protobuf" else json.dumps(json_pass(4_000_000, seq_id=1)).encode()
    read = 0

    def counted(offset: int, count: int) -> bytes:
        nonlocal read
        read += count
        return large[offset : offset + count]

    look = peek_json if form == "json" else peek_protobuf
    assert look(counted, len(large))["seq_id"]
    assert len(large) > 15_000_000
    assert read < 20_000

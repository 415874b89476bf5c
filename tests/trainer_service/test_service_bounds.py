"""What a front takes in, and no more: by number, by memory and by descriptors, with nothing lost and nobody stuck."""

from __future__ import annotations

import asyncio
import errno
import json
import random
import socket
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from plain_client import PROTOBUF, Client, protobuf_pass, sample, wait_for
from running_front import RunningFront
from starlette.requests import Request

from patience import PATIENCE_S
from trainmaster.protocol.trainer_requests import Trainer
from trainmaster.trainer_service import messages, wire
from trainmaster.trainer_service.front.futures import EngineLink, Future, Futures, SavedCheckpoints
from trainmaster.trainer_service.front.request_bodies import BodyReader, BusyError, FrontSettings, size_of_fields
from trainmaster.trainer_service.messages import INLINE_BYTES, SharedBody
from trainmaster.trainer_service.messages import Request as EngineRequest


def send(client: Client, seq_id: int, targets: int) -> httpx.Response:
    body = protobuf_pass(client.model_id, seq_id, targets=targets)
    return client.http.post("forward_backward", content=body, headers=PROTOBUF)


def test_small_bodies_in_order_are_bounded_in_bytes_and_come_again() -> None:
    """60 KB each, where 1 MiB may be held: 17 are in at the most, and all are done when they were asked for again."""
    with RunningFront(hold_s=20, max_held_bytes=1 << 20, delays={"decodes": False, "pass_s": 0.05}) as front:
        client = Client(front)
        front.engine.may_pass = threading.Event()
        acks, most, sent_away = [], 0, 0
        for seq_id in range(1, 51):
            while (answer := send(client, seq_id, 5000)).status_code == 429:
                assert "holds 1048576 bytes of request bodies already" in answer.json()["error"]
                sent_away += 1
                front.engine.may_pass.set()
                time.sleep(0.02)
            most = max(most, seq_id - len(client.done()))
            acks.append(answer.json())
        assert sent_away
        assert 8 < most <= 17
        assert all(client.retrieve(ack, wire.PROTOBUF).status_code == 200 for ack in acks)
        assert [seq_id for seq_id, _ in client.done()] == list(range(1, 51))


def test_operations_are_bounded_in_number_and_a_pipeline_in_any_order_gets_through() -> None:
    """Of 8 that may be in, 4 may wait for earlier ones, of all models together; samples are counted for themselves."""
    with RunningFront(hold_s=20, max_held=8, delays={"step_s": 0.02}) as front:
        client, other = Client(front), Client(front)
        session = client.sampling_session()
        first = [client.optim_step(seq_id) for seq_id in (2, 3, 4, 5)]
        for waiting in (client, other):
            fields = {"model_id": waiting.model_id, "seq_id": 9, "adam_params": {}}
            assert front.http.post("optim_step", json=fields).status_code == 429
        assert "metrics" in other.result(other.optim_step(1))
        first = [client.optim_step(1), *first]
        assert [client.result(ack)["metrics"]["steps"] for ack in first] == [1, 2, 3, 4, 5]

        def step(seq_id: int) -> tuple[float, int]:
            fields = {"model_id": client.model_id, "seq_id": seq_id, "adam_params": {}}
            sent_away = 0
            with httpx.Client(base_url=front.http.base_url, timeout=PATIENCE_S, verify=False) as http:
                while (answer := http.post("optim_step", json=fields)).status_code == 429:
                    sent_away += 1
                    time.sleep(0.1)
                return float(http.post("retrieve_future", json=answer.json()).json()["metrics"]["steps"]), sent_away

        numbers = list(range(6, 46))
        random.Random(0).shuffle(numbers)
        with ThreadPoolExecutor(40) as pool:
            done = dict(zip(numbers, pool.map(step, numbers), strict=True))
        assert {seq_id: steps for seq_id, (steps, _) in done.items()} == {seq_id: seq_id for seq_id in numbers}
        assert sum(sent_away for _, sent_away in done.values())

        front.engine.step_s = 1.0
        acks = [client.optim_step(seq_id) for seq_id in range(46, 54)]
        full = {"model_id": client.model_id, "seq_id": 54, "adam_params": {}}
        refused = front.http.post("optim_step", json=full)
        assert (refused.status_code, refused.json()["error"]) == (429, "the trainer holds 8 requests already")
        made = {"session_id": client.session_id, "model_seq_id": 7, "base_model": "stub/model"}
        assert front.http.post("create_model", json=made).status_code == 429
        opened = {"session_id": client.session_id, "sampling_session_seq_id": 1, "base_model": "stub/model"}
        assert front.http.post("create_sampling_session", json=opened).status_code == 429
        # What is in is known again, is asked for, and beats; and samples have a bound of their own.
        assert client.optim_step(53) == acks[-1]
        assert client.post("session_heartbeat", session_id=client.session_id)
        drawn = [client.post("asample", **sample(session, seq_id)) for seq_id in range(20)]
        front.engine.step_s = 0.0
        assert client.result(acks[-1])["metrics"]["steps"] == 53
        assert all(len(client.result(ack)["sequences"]) == 2 for ack in drawn)
        assert client.sampling_session(1) != session
        assert client.result(client.post("create_model", **made))["type"] == "create_model"


def test_front_with_few_descriptors_takes_fewer_bodies() -> None:
    """Each large one is a file that is open: 100 of them where there may be 200, and half of those may wait."""
    with RunningFront(hold_s=20, descriptors=200, delays={"decodes": False}) as front:
        client = Client(front)
        waiting = [send(client, seq_id, 10_000) for seq_id in range(2, 60)]
        assert [answer.status_code for answer in waiting] == [200] * 50 + [429] * 8
        assert send(client, 1, 10_000).status_code == 200
        wait_for(lambda: len(client.done()) == 51)
        front.engine.pass_s = 0.02
        acks = []
        for seq_id in range(52, 202):
            while (answer := send(client, seq_id, 10_000)).status_code == 429:
                pass
            acks.append(answer.json())
        assert all(client.retrieve(ack, wire.PROTOBUF).status_code == 200 for ack in acks)
        assert [seq_id for seq_id, _ in client.done()] == list(range(1, 202))


def test_fields_with_very_many_values_are_refused_and_others_count_as_what_they_take() -> None:
    with RunningFront(hold_s=5, max_waiting_bytes=16 << 20) as front:
        client = Client(front)

        def step(seq_id: int, values: int) -> httpx.Response:
            fields = {"model_id": client.model_id, "seq_id": seq_id, "adam_params": {}, "also": [{}] * values}
            return front.http.post("optim_step", json=fields)

        refused = client.result(step(2, 60_000).json())
        assert refused == {"error": "the body may hold 100000 values, and this one holds more", "category": "user"}
        # 60 KB in writing each.
        answers = [step(seq_id, 20_000).status_code for seq_id in (2, 3, 4)]
        assert answers == [200, 200, 429]


@pytest.mark.parametrize(
    "value",
    [
        [{}] * 20_000,
        [[]] * 20_000,
        [{"a": 1000 + number} for number in range(10_000)],
        [[[[[number / 7]]]] for number in range(10_000)],
        {f"key-{number}": f"text {number}" for number in range(20_000)},
        [{str(number): {str(number): number}} for number in range(10_000)],
        ["text"] * 20_000,
    ],
    ids=["objects", "lists", "members", "nested", "keys", "nested objects", "strings"],
)
def test_size_of_fields_is_no_less_than_what_they_take(value: Any) -> None:
    fields = {"also": value}
    text = json.dumps(fields)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        decoded = json.loads(text)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert decoded == fields
    assert after - before <= size_of_fields(fields)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_body_that_cannot_be_begun_is_to_come_again(
    monkeypatch: pytest.MonkeyPatch, on_disk: bool, number: int
) -> None:
    def fails(*_: object, **__: object) -> Any:
        raise OSError(number, "none left")

    monkeypatch.setattr(messages.os, "memfd_create", fails)
    monkeypatch.setattr(messages.tempfile, "TemporaryFile", fails)
    intake = BodyReader(FrontSettings(trainer=Trainer("job-1", 1), memory_bytes=0 if on_disk else 1 << 30, max_held=9))
    pieces = iter([True, True, False])

    async def receive() -> Any:
        return {"type": "http.request", "body": bytes(INLINE_BYTES + 1), "more_body": next(pieces)}

    with pytest.raises(BusyError, match="none left"):
        asyncio.run(intake.read(Request({"type": "http", "method": "POST", "headers": []}, receive)))
    assert (intake.held, intake.held_bytes, list(pieces)) == (0, 0, [])


def test_operation_whose_fields_find_no_room_on_their_way_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number is used up: nothing else would ever end it."""

    def fails(*_: object) -> Any:
        raise OSError(errno.EMFILE, "none left")

    monkeypatch.setattr(SharedBody, "of", fails)
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    async def front() -> str:
        futures = Futures(keep_s=60, keep_bytes=1 << 20, clock=lambda: 0.0)
        link = EngineLink(futures, SavedCheckpoints())
        link.connect(near)
        future = futures.open(Future(request_id="r", owner="m"))
        link.send(EngineRequest(request_id="r", op="optim_step", fields={"a": "b" * (INLINE_BYTES + 1)}))
        link.close()
        return future.outcome.error if future.outcome else ""

    with far:
        assert asyncio.run(front()) == "the trainer had no room for this request: none left"

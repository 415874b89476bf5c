"""Bodies on their way through the front: any form, any size, any number, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard
from plain_client import PROTOBUF, Client, json_pass, protobuf_pass, sample, wait_for
from running_front import RunningFront
from starlette.requests import Request

from patience import PATIENCE_S
from trainmaster.protocol.trainer_requests import Trainer
from trainmaster.trainer_service import schema, wire
from trainmaster.trainer_service.front.request_bodies import BodyReader, BusyError, FrontSettings
from trainmaster.trainer_service.messages import INLINE_BYTES, SharedBody


@pytest.fixture(scope="module")
def front() -> Iterator[RunningFront]:
    with RunningFront(hold_s=5) as started:
        yield started


def test_protobuf_json_and_zstd_mean_the_same(front: RunningFront) -> None:
    client = Client(front)
    plain = front.http.post("forward_backward", content=protobuf_pass(client.model_id, 1), headers=PROTOBUF).json()
    packed = zstandard.ZstdCompressor().compress(protobuf_pass(client.model_id, 2))
    headers = {**PROTOBUF, "content-encoding": "zstd"}
    zstd = front.http.post("forward_backward", content=packed, headers=headers).json()
    given = json_pass(client.model_id, 3)
    text = client.post("forward", forward_input=given.pop("forward_backward_input"), **given)
    outputs = [client.result(ack)["loss_fn_outputs"] for ack in (plain, zstd, text)]
    assert outputs[0] == outputs[1] == outputs[2]
    assert [client.result(ack)["metrics"]["gradients_before:max"] for ack in (plain, zstd, text)] == [1, 2, 2]


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"memory_bytes": 0}, marks=pytest.mark.long)], ids=["memory", "disk"]
)
def test_large_body_goes_through_without_being_held(settings: dict[str, int]) -> None:
    """80 MiB, protobuf and JSON: the front's own memory does not grow by them."""
    with RunningFront(hold_s=30, delays={"decodes": False}, executed=True, **settings) as front:
        client = Client(front)
        before = own_memory(front.process.pid)
        body = protobuf_pass(client.model_id, 1, targets=7_000_000)
        text = json.dumps(json_pass(client.model_id, 2)).encode().replace(b"[3, 3]", b"[" + b"3, " * 28_000_000 + b"3]")
        for sent, headers in ((body, PROTOBUF), (text, {})):
            assert len(sent) > 80 << 20
            ack = front.http.post("forward_backward", content=sent, headers=headers, timeout=PATIENCE_S).json()
            assert client.retrieve(ack, wire.PROTOBUF).status_code == 200
            assert front.engine.digests[ack["request_id"]] == hashlib.blake2b(sent).digest()
        assert own_memory(front.process.pid) - before < 32 << 20


def test_body_that_is_too_large_fails_through_its_future() -> None:
    with RunningFront(hold_s=5, max_body_bytes=200_000) as front:
        client = Client(front)
        expected = {"error": "a body may have 200000 bytes, and this one has more", "category": "user"}
        body = protobuf_pass(client.model_id, 1, targets=100_000)
        ack = front.http.post("forward_backward", content=body, headers=PROTOBUF).json()
        assert client.result(ack) == expected
        assert "metrics" in client.result(client.optim_step(2))
        # JSON has its number at the end, which is lost.
        ack = client.post("forward_backward", **json_pass(client.model_id, 3, targets=100_000))
        assert client.result(ack) == expected


def own_memory(pid: int) -> int:
    """Of a process, without what it shares with others."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def test_client_that_leaves_in_the_middle_of_a_body_leaves_nothing(front: RunningFront) -> None:
    client = Client(front)
    body = protobuf_pass(client.model_id, 1, targets=100_000)

    def half() -> Iterator[bytes]:
        yield body[: len(body) // 2]
        raise ConnectionAbortedError

    before = len(list(Path(f"/proc/{front.process.pid}/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(ConnectionAbortedError), httpx.Client(verify=False) as leaving:
            leaving.post(f"{front.url}/api/v1/forward_backward", content=half(), headers=PROTOBUF)
    wait_for(lambda: len(list(Path(f"/proc/{front.process.pid}/fd").iterdir())) <= before)
    assert client.done() == []
    ack = front.http.post("forward_backward", content=body, headers=PROTOBUF).json()
    assert client.retrieve(ack, wire.PROTOBUF).status_code == 200


def test_nothing_is_lost_in_a_storm() -> None:
    """104 passes of 3.3 MB and 256 samples at once: every number comes out, once, with its own result."""
    with RunningFront(hold_s=20, delays={"sample_s": 0.5, "decodes": False}) as front:
        client = Client(front)
        session = client.sampling_session()
        body = protobuf_pass(client.model_id, 0, targets=275_000)
        assert 3_250_000 < len(body) < 3_350_000
        rest = body.removeprefix(schema.ForwardBackwardRequest(model_id=client.model_id).SerializeToString())
        with contextlib.ExitStack() as stack:
            # One for each thread: a client that threads share closes connections under one another.
            own = threading.local()

            def connect() -> None:
                own.http = stack.enter_context(
                    httpx.Client(base_url=f"{front.url}/api/v1", timeout=PATIENCE_S, verify=False)
                )

            def train(seq_id: int) -> float:
                head = schema.ForwardBackwardRequest(model_id=client.model_id, seq_id=seq_id).SerializeToString()
                ack = own.http.post("forward_backward", content=head + rest, headers=PROTOBUF).json()
                answer = own.http.post("retrieve_future", json=ack).json()
                while answer.get("type") == "try_again":
                    answer = own.http.post("retrieve_future", json=ack).json()
                return float(answer["metrics"]["loss:sum"])

            def draw(seq_id: int) -> int:
                prompt = {"chunks": [{"type": "encoded_text", "tokens": [seq_id]}]}
                ack = own.http.post("asample", json=sample(session, seq_id, prompt=prompt, num_samples=1)).json()
                answer = own.http.post("retrieve_future", json=ack).json()
                while answer.get("type") == "try_again":
                    answer = own.http.post("retrieve_future", json=ack).json()
                return int(answer["sequences"][0]["tokens"][0])

            numbers = np.random.default_rng(0).permutation(np.arange(1, 105)).tolist()
            with (
                ThreadPoolExecutor(128, initializer=connect) as samplers,
                ThreadPoolExecutor(16, initializer=connect) as trainers,
            ):
                drawn = [samplers.submit(draw, seq_id) for seq_id in range(256)]
                # A gap must not hold all connections: acknowledgements and results are asked for apart from each other.
                trained = {seq_id: trainers.submit(train, seq_id) for seq_id in sorted(numbers, key=lambda n: n // 8)}
                assert [answer.result(PATIENCE_S) for answer in drawn] == list(range(256))
                assert {seq_id: answer.result(PATIENCE_S) for seq_id, answer in trained.items()} == {
                    seq_id: seq_id for seq_id in numbers
                }
        assert client.done() == [(seq_id, "forward_backward") for seq_id in range(1, 105)]
        assert client.post("session_heartbeat", session_id=client.session_id)


def test_body_that_there_is_no_room_for_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    intake = BodyReader(FrontSettings(trainer=Trainer("job-1", 1), max_held=9))
    made: list[SharedBody] = []

    def full(body: SharedBody, data: bytes) -> None:
        made.append(body)
        raise OSError(errno.ENOSPC, "no space left")

    pieces = iter([True, True, False])

    async def receive() -> Any:
        return {"type": "http.request", "body": bytes(INLINE_BYTES + 1), "more_body": next(pieces)}

    monkeypatch.setattr(SharedBody, "write", full)
    with pytest.raises(BusyError, match="no space"):
        asyncio.run(intake.read(Request({"type": "http", "method": "POST", "headers": []}, receive)))
    assert (intake.held, intake.held_bytes, [body.fd for body in made]) == (0, 0, [-1])
    # It was read to its end: a client hears no answer before.
    assert list(pieces) == []


def test_bodies_that_are_held_are_bounded_and_clients_come_again() -> None:
    """Six clients send 3 MB at once, JSON with its number at its end, where 8 MB may be held: none is lost."""
    with RunningFront(hold_s=20, max_held_bytes=8 << 20, delays={"decodes": False, "pass_s": 0.1}) as front:
        client = Client(front)
        reasons: list[str] = []
        held: list[int] = []

        def train(seq_id: int) -> float:
            body = json.dumps(json_pass(client.model_id, seq_id, targets=1)).encode()
            body = body.replace(b"[3]", b"[" + b"3, " * 1_000_000 + b"3]")
            with httpx.Client(base_url=f"{front.url}/api/v1", timeout=PATIENCE_S, verify=False) as http:
                while (answer := http.post("forward_backward", content=body)).status_code == 429:
                    assert answer.headers["retry-after"] == "1"
                    reasons.append(answer.json()["error"])
                    held.append(sum(bodies_of(front.process.pid)))
                return float(http.post("retrieve_future", json=answer.json()).json()["metrics"]["loss:sum"])

        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(train, range(1, 7))) == [1, 2, 3, 4, 5, 6]
        assert any("holds 8388608 bytes of request bodies already" in reason for reason in reasons)
        assert 0 < max(held) <= 8 << 20
        wait_for(lambda: bodies_of(front.process.pid) == [])
        assert [seq_id for seq_id, _ in client.done()] == [1, 2, 3, 4, 5, 6]


def test_what_waits_behind_a_gap_is_bounded_in_number() -> None:
    with RunningFront(hold_s=5, max_waiting=3) as front:
        client = Client(front)
        acks = [client.optim_step(seq_id) for seq_id in (2, 3, 4)]
        for path in ("optim_step", "forward_backward"):
            sent_away = front.http.post(path, json={**json_pass(client.model_id, 5), "adam_params": {}})
            assert sent_away.status_code == 429
            assert "wait for the one with the seq_id 1" in sent_away.json()["error"]
        assert client.optim_step(3) == acks[1]
        # Other models have nothing to do with it, and what closes the gap is let in.
        assert "metrics" in client.result(Client(front).optim_step(1))
        acks = [client.optim_step(1), *acks, client.optim_step(5)]
        assert [client.result(ack)["metrics"]["steps"] for ack in acks] == [1, 2, 3, 4, 5]


def test_what_waits_behind_a_gap_is_bounded_in_bytes_and_goes_with_its_session() -> None:
    with RunningFront(hold_s=5, max_waiting_bytes=2 << 20, max_held_bytes=8 << 20, session_expires_s=4) as front:

        def send(client: Client, seq_id: int) -> httpx.Response:
            body = protobuf_pass(client.model_id, seq_id, targets=1 << 17)
            assert len(body) == pytest.approx(1.5 * (1 << 20), rel=0.01)
            return front.http.post("forward_backward", content=body, headers=PROTOBUF)

        finishes, expires, late = (Client(front) for _ in range(3))
        waiting = [send(client, 2).json() for client in (finishes, expires)]
        assert [send(client, 3).status_code for client in (finishes, expires)] == [429, 429]
        # It has nothing that waits, but what waits of all may take no more than half of what is held.
        assert send(late, 2).status_code == 429
        assert len(bodies_of(front.process.pid)) == 2
        finishes.post(f"sessions/{finishes.session_id}/finish")
        wait_for(lambda: len(bodies_of(front.process.pid)) == 1)
        assert "was finished by its client" in finishes.result(waiting[0])["error"]
        wait_for(lambda: bodies_of(front.process.pid) == [])
        assert "expired" in expires.result(waiting[1])["error"]
        # All that they held is free again.
        client = Client(front)
        acks = {seq_id: send(client, seq_id).json() for seq_id in (2, 1, 4, 3, 6, 5)}
        assert all(client.retrieve(ack, wire.PROTOBUF).status_code == 200 for ack in acks.values())


def bodies_of(pid: int) -> list[int]:
    """The sizes of the large bodies that a process holds."""
    sizes = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "trainmaster-body" in str(entry.readlink()):
                sizes.append(entry.stat().st_size)
    return sizes

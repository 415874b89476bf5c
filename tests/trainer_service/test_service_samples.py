"""Samples through the front: acknowledged, bounded, cancelled, followed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from plain_client import Client, sample, wait_for
from running_front import RunningFront

from trainmaster.trainer_service import schema, wire


@pytest.fixture(scope="module")
def front() -> Iterator[RunningFront]:
    with RunningFront(hold_s=5) as started:
        yield started


def test_sample_is_acknowledged_and_answered(front: RunningFront) -> None:
    client = Client(front)
    session = client.sampling_session()
    assert client.sampling_session() == session
    ack = client.post("asample", **sample(session, 0, prompt_logprobs=True))
    assert len(set(ack["sample_sequence_ids"])) == 2
    response = client.retrieve(ack, wire.PROTOBUF)
    result = schema.SampleResponse.FromString(response.content)
    assert [np.frombuffer(one.tokens, "<i4").tolist() for one in result.sequences] == [[3, 4, 5], [4, 5, 6]]
    text = client.result(ack)
    assert text["sequences"][0] == {"stop_reason": "length", "tokens": [3, 4, 5], "logprobs": [-0.5] * 3}
    assert text["prompt_logprobs"] == [None, -1.0]


def test_repeated_sample_is_the_same_one(front: RunningFront) -> None:
    client = Client(front)
    session = client.sampling_session()
    ack = client.post("asample", **sample(session, 5))
    assert client.post("asample", **sample(session, 5)) == ack
    other = client.post("asample", **sample(session, 5, num_samples=1))
    assert "had the seq_id 5 before" in client.result(other)["error"]
    assert len(client.result(ack)["sequences"]) == 2
    assert [one.request_id for one in client.requests("asample")].count(ack["request_id"]) == 1


@pytest.mark.parametrize(
    "fields",
    [{"num_samples": 0}, {"num_samples": 10**9}, {"num_samples": "2"}, {"seq_id": None}, {"sampling_session_id": None}],
)
def test_sample_that_cannot_be_taken_in_fails_through_a_future(front: RunningFront, fields: dict[str, Any]) -> None:
    client = Client(front)
    ack = client.post("asample", **{**sample(client.sampling_session(), 0), **fields})
    assert ack["sample_sequence_ids"] == []
    assert client.result(ack)["category"] == "user"


def test_sample_that_the_engine_refuses_fails_through_its_future(front: RunningFront) -> None:
    client = Client(front)
    ack = client.post("asample", **sample(client.sampling_session(), 0, prompt_alt_tokens_k=3))
    assert client.result(ack) == {"error": "prompt_alt_tokens_k is not supported: leave it out", "category": "user"}


def test_sampling_session_of_unknown_weights_is_refused_at_once(front: RunningFront) -> None:
    client = Client(front)
    fields = {"session_id": client.session_id, "sampling_session_seq_id": 7, "model_path": "none"}
    response = front.http.post("create_sampling_session", json=fields)
    assert response.status_code == 400
    assert response.json()["error"] == "nothing was saved as 'none'"
    assert response.headers["x-should-retry"] == "false"


def test_too_many_samples_are_sent_away_and_come_again() -> None:
    with RunningFront(hold_s=5, max_pending_samples=3, delays={"sample_s": 1.0}) as front:
        client = Client(front)
        session = client.sampling_session()
        acks = [client.post("asample", **sample(session, seq_id)) for seq_id in range(3)]
        sent_away = front.http.post("asample", json=sample(session, 3))
        assert sent_away.status_code == 429
        assert sent_away.json()["error"]
        # Those that are in are known again even so.
        assert client.post("asample", **sample(session, 2)) == acks[2]
        wait_for(lambda: front.http.post("asample", json=sample(session, 3)).status_code == 200)
        acks.append(client.post("asample", **sample(session, 3)))
        assert all(len(client.result(ack)["sequences"]) == 2 for ack in acks)


def test_samples_with_too_many_bytes_are_sent_away_too() -> None:
    with RunningFront(hold_s=5, max_pending_sample_bytes=100_000, delays={"sample_s": 0.5}) as front:
        client = Client(front)
        session = client.sampling_session()
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [123456] * 20_000}]}
        # One that is larger than the bound goes alone.
        ack = client.post("asample", **sample(session, 0, prompt=prompt))
        assert len(ack["sample_sequence_ids"]) == 2
        assert front.http.post("asample", json=sample(session, 1)).status_code == 429
        assert len(client.result(ack)["sequences"]) == 2
        assert len(client.result(client.post("asample", **sample(session, 1)))["sequences"]) == 2


def test_sample_that_nobody_waits_for_is_cancelled() -> None:
    with RunningFront(hold_s=5, delays={"sample_s": 600.0}) as front:
        client = Client(front)
        ack = client.post("asample", **sample(client.sampling_session(), 0))
        assert client.post("cancel_future", request_id=ack["request_id"]) == {"cancelled": True}
        assert client.result(ack) == {"error": "it was cancelled", "category": "user"}
        assert client.post("cancel_future", request_id=ack["request_id"]) == {"cancelled": False}
        assert client.post("cancel_future", request_id="none") == {"cancelled": False}


def test_copies_count_far_from_the_first() -> None:
    """Up to 10^18 and more; only what does not fit 64 bits is refused."""
    with RunningFront(hold_s=5) as front:
        client = Client(front)
        session = client.sampling_session()
        for clone in (1, 8_999_999, 1_000_000_000):
            acks = [client.post("asample", **sample(session, clone * 10**9 + number)) for number in (1, 0)]
            assert [len(client.result(ack)["sequences"]) for ack in acks] == [2, 2]
            target = {"type": "sampling_session", "sampling_session_id": session, "cloned_sampler_id": clone}
            told = client.post("retrieve_futures", target=target, prev_cursor=0)
            assert {one["request_id"] for one in told["completions"]} == {ack["request_id"] for ack in acks}
        assert client.result(client.post("asample", **sample(session, 2**63 - 1)))["sequences"]
        assert "seq_id" in client.result(client.post("asample", **sample(session, 2**63)))["error"]


def test_ended_samples_are_told_by_session_and_copy() -> None:
    with RunningFront(hold_s=2, delays={"sample_s": 0.2}) as front:
        client = Client(front)
        session = client.sampling_session()
        first = client.post("asample", **sample(session, 0))
        client.result(first)
        poll = {"target": {"type": "sampling_session", "sampling_session_id": session}}
        told = client.post("retrieve_futures", **poll, prev_cursor=0)
        assert [one["request_id"] for one in told["completions"]] == [first["request_id"]]
        size = len(client.retrieve(first, wire.PROTOBUF).content)
        assert told["completions"][0]["response_payload_uncompressed_size"] == size
        second = client.post("asample", **sample(session, 1))
        bad = client.post("asample", **sample(session, 2, prompt_alt_tokens_k=1))
        copied = client.post("asample", **sample(session, 1_000_000_000))
        ended: dict[str, str] = {}
        cursor = told["cursor"]
        while len(ended) < 2:
            told = client.post("retrieve_futures", **poll, prev_cursor=cursor)
            assert told["cursor"] >= cursor
            cursor = told["cursor"]
            ended |= {one["request_id"]: one["state"] for one in told["completions"]}
        assert ended == {second["request_id"]: "finished", bad["request_id"]: "failed"}
        copy = {"target": {**poll["target"], "cloned_sampler_id": 1}}
        told = client.post("retrieve_futures", **copy, prev_cursor=0, retrieved_request_ids=[first["request_id"]])
        assert [one["request_id"] for one in told["completions"]] == [copied["request_id"]]
        assert client.retrieve(first).status_code == 410
        told = client.post("retrieve_futures", **poll, prev_cursor=cursor)
        assert told == {"completions": [], "cursor": cursor}
        unknown = {"target": {"type": "sampling_session", "sampling_session_id": "none"}}
        assert front.http.post("retrieve_futures", json=unknown).status_code == 410
        assert front.http.post("retrieve_futures", json={}).status_code == 400

"""Bodies that no client sends: every route has an answer that can be read, and the front lives on without complaint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import zstandard
from plain_client import PROTOBUF, Client, protobuf_pass, sample
from running_front import RunningFront
from starlette.routing import Route

from trainmaster.trainer_service.front.routes import PREFIX, ROUTES

POSTS = sorted(
    route.path.removeprefix(f"{PREFIX}/").format(session_id="none")
    for route in ROUTES
    if isinstance(route, Route) and "POST" in (route.methods or ())
)
UNREAD = "telemetry"
"""Whatever it says, it is dropped: a client whose telemetry is refused tries again for ever."""

ZSTD = {**PROTOBUF, "content-encoding": "zstd"}
HUGE = b"9" * 5000
BOMB = b"512 MiB of zeros, which are compressed when they are sent"


def deep(levels: int) -> bytes:
    return b'{"model_id": ' + b"[" * levels + b"]" * levels + b', "seq_id": 1}'


GARBAGE: dict[str, tuple[bytes, dict[str, str]]] = {
    "half": (b'{"model_id": "m", ', {}),
    "no text": (b"\xff\xfe\x00", {}),
    "list": (b"[1]", {}),
    "null": (b"null", {}),
    "number": (b"3", {}),
    "text": (b'"x"', {}),
    "NaN": (b"NaN", {}),
    "huge number": (HUGE, {}),
    "huge member": (b'{"seq_id": ' + HUGE + b"}", {}),
    "deep": (b"[" * 5000 + b"]" * 5000, {}),
    **{f"{levels} levels": (deep(levels), {}) for levels in (100, 900, 980, 985, 990, 995, 1000, 5000, 500_000)},
    "many levels unclosed": (b'{"a":' * 5000, {}),
    "broken protobuf": (b"\x0b\xff\xff", PROTOBUF),
    "protobuf that lies about a length": (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", PROTOBUF),
    "protobuf without an end": (b"\x80" * 40, PROTOBUF),
    "broken zstd": (b"no such frame", ZSTD),
    "half a zstd frame": (zstandard.ZstdCompressor().compress(protobuf_pass("m", 1, 5000))[:20], ZSTD),
    "zstd bomb": (BOMB, ZSTD),
    "unknown encoding": (b"{}", {"content-encoding": "br"}),
}

JUNK: dict[str, Any] = {
    "null": None,
    "true": True,
    "negative": -1,
    "fraction": 1.5,
    "NaN": float("nan"),
    "infinite": float("inf"),
    "huge": 10**4000,
    "empty": "",
    "text": "x",
    "surrogate": "\ud800",
    "zero": "\0",
    "list": [[], {}],
    "object": {"x": {"y": []}},
}
NAMES = (
    *("session_id", "model_id", "seq_id", "model_seq_id", "sampling_session_seq_id", "sampling_session_id"),
    *("request_id", "target", "prev_cursor", "retrieved_request_ids", "path", "base_model", "model_path"),
    *("num_samples", "prompt", "sampling_params", "lora_config", "adam_params", "tinker_path", "adapter_path"),
    *("tags", "reason", "allow_metadata_only", "type", "user_metadata", "forward_backward_input"),
)


@pytest.fixture(scope="module")
def front() -> Iterator[RunningFront]:
    with RunningFront(hold_s=5) as started:
        yield started
        assert started.said() == ""


@pytest.fixture(scope="module")
def client(front: RunningFront) -> Client:
    return Client(front)


@pytest.fixture(autouse=True)
def _lives_on(front: RunningFront, client: Client) -> Iterator[None]:
    yield
    assert front.said() == ""
    assert client.post("session_heartbeat", session_id=client.session_id)


def refusal(front: RunningFront, path: str, answer: Any) -> str:
    """Why a request was refused: told by the answer, or by the future that it names."""
    if answer.status_code == 200 and "request_id" in answer.json():
        told = front.http.post("retrieve_future", json={"request_id": answer.json()["request_id"]}).json()
        assert told["category"] in ("user", "server"), path
        return str(told["error"])
    assert 400 <= answer.status_code < 500, (path, answer.text)
    assert answer.headers["content-type"] == "application/json"
    return str(answer.json()["error"])


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_is_refused_with_a_reason(front: RunningFront, garbage: str) -> None:
    content, headers = GARBAGE[garbage]
    if content is BOMB:
        content = zstandard.ZstdCompressor().compress(bytes(512 << 20))
    for path in POSTS:
        answer = front.http.post(path, content=content, headers=headers)
        if path == UNREAD or (garbage == "unknown encoding" and path not in ("asample", "forward", "forward_backward")):
            assert answer.status_code < 500  # what is small is JSON, whatever it is said to be
        else:
            why = refusal(front, path, answer)
            assert 10 < len(why) < 300, path
            assert "Error" not in why, path


@pytest.mark.parametrize("junk", JUNK)
def test_members_of_wrong_types_break_nothing(front: RunningFront, junk: str) -> None:
    value = JUNK[junk]
    target = {"type": "sampling_session", "sampling_session_id": value, "cloned_sampler_id": value}
    for path in POSTS:
        for body in (dict.fromkeys(NAMES, value), {**dict.fromkeys(NAMES, value), "target": target}):
            answer = front.http.post(path, content=json.dumps(body).encode())
            assert answer.status_code < 500, (path, answer.text)
            assert isinstance(answer.json(), dict), path


@pytest.mark.parametrize("junk", JUNK)
def test_wrong_types_beside_true_ids_break_nothing(client: Client, junk: str) -> None:
    """What gets past the first look, because it names a session, a model or a sampler that there is."""
    value, session = JUNK[junk], client.sampling_session()
    model = {"model_id": client.model_id}
    number = len([request for request in client.front.engine.requests if request.seq_id])
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("create_model", {"session_id": client.session_id, "model_seq_id": 1}),
        ("create_sampling_session", {"session_id": client.session_id, "sampling_session_seq_id": 1}),
        ("create_sampling_session", {"session_id": client.session_id}),
        ("save_weights_for_sampler", {**model, "seq_id": number + 1, "path": ""}),
        ("save_weights_for_sampler", {**model, "seq_id": number + 2, "path": value}),
        ("optim_step", {**model, "seq_id": number + 3}),
        ("load_weights", {**model, "seq_id": number + 4}),
        ("load_adapter", {**model, "seq_id": number + 5}),
        ("save_weights", {**model, "seq_id": number + 6}),
        ("forward_backward", {**model, "seq_id": number + 7}),
        ("forward_backward", {**model}),
        ("asample", {"sampling_session_id": session}),
        ("asample", {"sampling_session_id": session, "seq_id": number}),
        ("asample", {**sample(session, number), "num_samples": value}),
        ("asample", {**sample(session, number), "sampling_params": value}),
        ("asample", {**sample(session, number), "sampling_params": {"temperature": value, "stop": value}}),
        ("retrieve_future", {"request_id": f"job-1:1:{session}:{number}"}),
    ]
    for path, told in bodies:
        answer = client.http.post(path, content=json.dumps({**dict.fromkeys(NAMES, value), **told}).encode())
        assert answer.status_code < 500, (path, answer.text)
        if answer.status_code == 200 and "request_id" in answer.json():
            outcome = client.http.post("retrieve_future", json={"request_id": answer.json()["request_id"]})
            assert outcome.status_code == 200, path
            assert "try_again" not in outcome.text, path
    followed = {"type": "sampling_session", "sampling_session_id": session}
    for fields in ({"prev_cursor": value}, {"retrieved_request_ids": value}, {"target": {**followed, "type": value}}):
        told = {"target": followed, "prev_cursor": 0, **fields}
        answer = client.http.post("retrieve_futures", content=json.dumps(told).encode())
        assert answer.status_code in (200, 400), answer.text
    if value:
        clone = {"target": {**followed, "cloned_sampler_id": value}}
        answer = client.http.post("retrieve_futures", content=json.dumps(clone).encode())
        assert answer.status_code == 400, answer.text


def test_front_still_does_its_work(client: Client) -> None:
    number = len([request for request in client.front.engine.requests if request.seq_id])
    assert "metrics" in client.result(client.optim_step(number + 1))

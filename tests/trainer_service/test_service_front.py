"""The front process over HTTP, with a stub engine behind it: sessions, models, order, and the life of the engine."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from plain_client import PROTOBUF, Client, json_pass, sample, wait_for
from running_front import RunningFront
from stub_engine import BASE_MODEL, CAPABILITIES

from patience import PATIENCE_S
from trainmaster.protocol.environment import TOKEN_HEADER
from trainmaster.trainer_service import schema
from trainmaster.trainer_service.messages import EngineReady


@pytest.fixture(scope="module")
def front() -> Iterator[RunningFront]:
    with RunningFront(hold_s=5) as started:
        yield started


def test_session_is_the_same_when_its_request_is_repeated(front: RunningFront) -> None:
    first, again, other = (
        front.http.post("create_session", json={"tags": []}, headers={"x-idempotency-key": key}).json()["session_id"]
        for key in ("a", "a", "b")
    )
    assert first == again
    assert first != other


def test_heartbeat_of_a_finished_session_is_gone_and_so_are_its_models(front: RunningFront) -> None:
    client = Client(front)
    assert client.post("session_heartbeat", session_id=client.session_id) == {"type": "session_heartbeat"}
    sampling_session_id = client.sampling_session()
    client.post(f"sessions/{client.session_id}/finish", reason={"type": "success"})
    assert front.http.post("session_heartbeat", json={"session_id": client.session_id}).status_code == 410
    wait_for(lambda: client.model_id not in front.engine.models)
    (ended,) = [one for one in client.requests("end_session") if one.fields["session_id"] == client.session_id]
    assert ended.fields["model_ids"] == [client.model_id]
    assert ended.fields["sampling_session_ids"] == [sampling_session_id]
    assert "was finished by its client" in client.result(client.optim_step(1))["error"]
    refused = client.result(client.post("asample", **sample(sampling_session_id, 0)))
    assert refused["category"] == "server"
    # Finishing twice is no mistake.
    client.post(f"sessions/{client.session_id}/finish")


def test_results_that_a_client_has_go_with_its_session(front: RunningFront) -> None:
    """What it never fetched stays: an answer may be on its way to it."""
    client = Client(front)
    fetched, waiting = client.optim_step(1), client.optim_step(2)
    assert client.result(fetched) == client.result(fetched)
    wait_for(lambda: [one.op for one in front.engine.requests].count("optim_step") == 2)
    client.post(f"sessions/{client.session_id}/finish", reason={"type": "success"})
    assert "error" in client.result(fetched)
    assert "error" not in client.result(waiting)


def test_unknown_session_has_no_heartbeat_and_no_models(front: RunningFront) -> None:
    assert front.http.post("session_heartbeat", json={"session_id": "sess-x"}).status_code == 410
    fields = {"session_id": "sess-x", "model_seq_id": 0, "base_model": BASE_MODEL}
    ack = front.http.post("create_model", json=fields).json()
    answer = front.http.post("retrieve_future", json=ack).json()
    assert "session 'sess-x' is not known here" in answer["error"]
    assert answer["category"] == "server"
    fields = {"session_id": "sess-x", "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    assert front.http.post("create_sampling_session", json=fields).status_code == 410


def test_sessions_of_the_server_are_taken_in(front: RunningFront) -> None:
    """The Tinker door's sessions are the server's: the front has not made them, and does not let them expire."""
    door = {"X-Trainmaster-Door": "tinker"}
    fields = {"session_id": "sess-of-server", "model_seq_id": 3, "base_model": BASE_MODEL}
    ack = front.http.post("create_model", json=fields, headers=door).json()
    assert ack["model_id"] == "sess-of-server:train:3"
    assert front.http.post("retrieve_future", json=ack).json()["model_id"] == ack["model_id"]
    beat = {"session_id": "sess-of-server"}
    assert front.http.post("session_heartbeat", json=beat, headers=door).status_code == 200
    front.http.post("sessions/sess-of-server/finish", json={}, headers=door)
    assert front.http.post("session_heartbeat", json=beat, headers=door).status_code == 410


def test_silent_session_expires() -> None:
    with RunningFront(session_expires_s=1.5) as front:
        client = Client(front)
        wait_for(lambda: client.requests("end_session"))
        assert [one.model_id for one in client.requests("leave_model")] == [client.model_id]
        assert client.requests("end_session")[0].fields["model_ids"] == []
        assert front.http.post("session_heartbeat", json={"session_id": client.session_id}).status_code == 410
        assert "expired" in client.result(client.optim_step(1))["error"]


def test_session_that_beats_lives_on() -> None:
    with RunningFront(session_expires_s=6.0) as front:
        client = Client(front)
        for _ in range(5):
            time.sleep(1.5)
            client.post("session_heartbeat", session_id=client.session_id)
        assert "metrics" in client.result(client.optim_step(1))


def test_telemetry_and_configuration_are_answered(front: RunningFront) -> None:
    assert front.http.post("telemetry", json={"events": []}).json() == {"status": "accepted"}
    assert front.http.post("client/config", json={"sdk_version": "1"}).json() == {}
    assert front.http.post("client/dynamic_config", json={}).json() == {"sample_cancel_enabled": True}


def test_model_is_made_once(front: RunningFront) -> None:
    client = Client(front)
    again = client.post("create_model", session_id=client.session_id, model_seq_id=0, base_model=BASE_MODEL)
    assert again["model_id"] == client.model_id
    assert client.result(again)["model_id"] == client.model_id
    assert [one.model_id for one in client.requests("create_model")].count(client.model_id) == 1


def test_model_that_cannot_be_made_says_so_for_all_that_follows(front: RunningFront) -> None:
    client = Client(front)
    ack = client.post("create_model", session_id=client.session_id, model_seq_id=1, base_model="other")
    failed = client.result(ack)
    assert failed == {"error": "there is no base model 'other' here", "category": "user"}
    step = client.post("optim_step", model_id=ack["model_id"], seq_id=1, adam_params={})
    assert "could not be made: there is no base model" in client.result(step)["error"]


def test_info_of_a_model(front: RunningFront) -> None:
    client = Client(front)
    info = client.post("get_info", model_id=client.model_id)
    assert info["model_data"] == {"model_name": BASE_MODEL, "tokenizer_id": "stub/tokenizer"}
    assert (info["model_id"], info["is_lora"]) == (client.model_id, False)
    assert front.http.post("get_info", json={"model_id": "none"}).status_code == 404


def test_capabilities_are_the_engines(front: RunningFront) -> None:
    assert front.http.get("get_server_capabilities").json() == CAPABILITIES


def test_unloaded_model_is_gone(front: RunningFront) -> None:
    client = Client(front)
    client.optim_step(1)
    ack = client.post("unload_model", model_id=client.model_id)
    assert client.result(ack)["model_id"] == client.model_id
    assert client.post("unload_model", model_id=client.model_id) == ack
    assert client.done() == [(1, "optim_step"), (0, "unload_model")]
    assert "was unloaded" in client.result(client.optim_step(2))["error"]


def test_chunks_out_of_order_are_done_in_order(front: RunningFront) -> None:
    client = Client(front)
    acks = {seq_id: client.forward_backward(seq_id) for seq_id in (3, 2, 4)}
    acks[5] = client.optim_step(5)
    acks[6] = client.forward_backward(6)
    assert client.done() == []
    acks[1] = client.forward_backward(1)
    steps = [client.result(acks[seq_id])["metrics"] for seq_id in sorted(acks)]
    assert [metrics.get("gradients_before:max") for metrics in steps] == [1, 2, 3, 4, None, 1]
    assert steps[4] == {"steps": 1, "gradients": 4}
    assert steps[5]["steps_before:max"] == 1
    assert [seq_id for seq_id, _ in client.done()] == [1, 2, 3, 4, 5, 6]


def test_repeat_is_acknowledged_alike_and_done_once(front: RunningFront) -> None:
    client = Client(front)
    waiting = [client.forward_backward(2) for _ in range(2)]
    first = [client.forward_backward(1) for _ in range(2)]
    assert waiting[0] == waiting[1]
    assert first[0] == first[1]
    results = [client.result(ack) for ack in (*first, *waiting)]
    assert client.forward_backward(1) == first[0]
    assert results[0] == results[1] == client.result(first[0])
    assert [seq_id for seq_id, _ in client.done()] == [1, 2]


def test_another_body_under_a_used_number_fails_alone(front: RunningFront) -> None:
    client = Client(front)
    ack = client.forward_backward(1)
    other = client.post("forward_backward", **json_pass(client.model_id, 1, targets=3))
    step = client.optim_step(1)
    for refused in (other, step):
        assert refused["request_id"] != ack["request_id"]
        answer = client.result(refused)
        assert answer["category"] == "user"
        assert "had the seq_id 1 before" in answer["error"]
    assert "metrics" in client.result(ack)
    assert "metrics" in client.result(client.optim_step(2))
    assert client.done() == [(1, "forward_backward"), (2, "optim_step")]


@pytest.mark.parametrize(
    "bad",
    [
        {"content": b"{"},
        {"content": b"\xff\xfe"},
        {"content": b""},
        {"json": [1]},
        {"json": {"model_id": "m"}},
        {"json": {"model_id": "m", "seq_id": "1"}},
        {"json": {"model_id": "m", "seq_id": 0}},
        {"json": {"model_id": "m", "seq_id": True}},
        {"content": b"\x0b\xff", "headers": PROTOBUF},
        {"content": b"", "headers": PROTOBUF},
        {"content": b"x", "headers": {**PROTOBUF, "content-encoding": "zstd"}},
        {"content": b"x", "headers": {**PROTOBUF, "content-encoding": "gzip"}},
    ],
)
@pytest.mark.parametrize("path", ["forward_backward", "optim_step"])
def test_body_that_cannot_be_placed_fails_through_a_future(front: RunningFront, bad: dict[str, Any], path: str) -> None:
    response = front.http.post(path, **bad)
    assert response.status_code == 200
    answer = front.http.post("retrieve_future", json=response.json()).json()
    assert answer["category"] == "user"
    assert answer["error"]


def test_bad_body_uses_up_its_number_and_no_more(front: RunningFront) -> None:
    client = Client(front)
    head = schema.ForwardBackwardRequest(model_id=client.model_id, seq_id=1).SerializeToString()
    ack = front.http.post("forward_backward", content=head + b"\x1a\xff", headers=PROTOBUF).json()
    assert "not a ForwardBackwardRequest" in client.result(ack)["error"]
    bad = client.post("forward_backward", model_id=client.model_id, seq_id=2)
    assert client.result(bad)["category"] == "user"
    assert "metrics" in client.result(client.optim_step(3))


def test_operation_that_is_not_offered_uses_up_its_number(front: RunningFront) -> None:
    client = Client(front)
    refused = client.post("weight_sync", model_id=client.model_id, seq_id=1, path="x")
    assert "not synchronised over RDMA" in client.result(refused)["error"]
    assert "metrics" in client.result(client.optim_step(2))


@pytest.mark.parametrize("path", ["create_custom_loss", "load_weights"])
def test_what_is_not_offered_says_why(front: RunningFront, path: str) -> None:
    client = Client(front)
    answer = client.result(client.post(path, session_id=client.session_id, model_seq_id=5, path="x"))
    assert answer["category"] == "user"
    assert "here: " in answer["error"]


def test_front_waits_for_the_engine_and_says_so() -> None:
    with RunningFront(hold_s=0.3, ready=False) as front:
        wait_for(lambda: _status(front.http, "healthz") == 503)
        assert front.http.get("healthz").json()["status"] == "loading"
        response = front.http.post("retrieve_future", json={"request_id": "job-1:1:m:1"})
        assert response.status_code == 503
        assert front.http.post("session_heartbeat", json={"session_id": "x"}).status_code == 410
        threading.Timer(0.1, front.engine.say, [EngineReady(capabilities=CAPABILITIES)]).start()
        wait_for(lambda: _status(front.http, "healthz") == 200)
        assert "metrics" in Client(front).result(Client(front).optim_step(1))


def test_request_that_comes_early_is_held_until_the_engine_is_ready() -> None:
    with RunningFront(hold_s=20, ready=False) as front:
        wait_for(lambda: _status(front.http, "healthz") == 503)
        threading.Timer(0.5, front.engine.say, [EngineReady(capabilities=CAPABILITIES)]).start()
        assert front.http.post("create_session", json={}).status_code == 200


@pytest.mark.parametrize("in_order", [True, False])
def test_those_who_wait_hear_that_the_engine_is_gone(in_order: bool) -> None:
    with RunningFront(hold_s=20, delays={"sample_s": 600.0}) as front:
        client = Client(front)
        client.result(client.post("save_weights", model_id=client.model_id, path="step-1", seq_id=1))
        waiting = [client.post("asample", **sample(client.sampling_session(), 0)), client.optim_step(3)]
        with ThreadPoolExecutor() as pool:
            answers = [pool.submit(client.result, ack) for ack in waiting]
            time.sleep(0.5)
            assert not any(answer.done() for answer in answers)
            if in_order:
                front.engine.stop("it was paused")
            else:
                front.engine.die()
            failed = [answer.result(PATIENCE_S) for answer in answers]
        why = "it was paused" if in_order else "its engine process died"
        assert all(answer["category"] == "server" for answer in failed)
        assert all(f"The trainer has stopped: {why}" in answer["error"] for answer in failed)
        assert failed[0]["error"] == f"The trainer has stopped: {why}."
        assert "last saved state is step-1" in failed[1]["error"]
        assert front.process.wait(PATIENCE_S) == (0 if in_order else 1)


def test_nobody_is_held_when_the_front_goes() -> None:
    """Whatever is under way ends at once with a word: no task has to be cancelled, which would be complained of."""
    with RunningFront(hold_s=60, last_answers_s=30, delays={"sample_s": 600.0}) as front:
        client = Client(front)
        session, idle = client.sampling_session(0), client.sampling_session(1)
        target = {"target": {"type": "sampling_session", "sampling_session_id": session}, "prev_cursor": 0}
        quiet = {"target": {"type": "sampling_session", "sampling_session_id": idle}, "prev_cursor": 0}
        sampled, behind_a_gap = client.post("asample", **sample(session, 0)), client.optim_step(2)
        host, port = front.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as stalled, ThreadPoolExecutor() as pool:
            stalled.sendall(b"POST /api/v1/forward_backward HTTP/1.1\r\nHost: x\r\nContent-Length: 999999\r\n\r\n{")
            asked = [
                pool.submit(front.http.post, path, json=body)
                for path, body in (
                    ("retrieve_future", sampled),
                    ("retrieve_future", behind_a_gap),
                    ("retrieve_futures", target),
                    ("retrieve_futures", quiet),
                )
            ]
            time.sleep(0.5)
            assert not any(answer.done() for answer in asked)
            front.engine.stop("it was paused")
            answers = [answer.result(PATIENCE_S) for answer in asked]
            stalled.settimeout(PATIENCE_S)
            assert stalled.recv(65536).startswith(b"HTTP/1.1 503")
        assert front.process.wait(PATIENCE_S) == 0
        assert [answer.status_code for answer in answers] == [200, 200, 200, 503]
        assert all("The trainer has stopped: it was paused" in answer.json()["error"] for answer in answers[:2])
        assert answers[2].json()["completions"] == [{"state": "failed", "request_id": sampled["request_id"]}]
        assert answers[3].json()["error"] == "The trainer has stopped: it was paused."


def test_nothing_is_held_that_comes_after_the_engine_has_gone() -> None:
    with RunningFront(hold_s=60, last_answers_s=30, delays={"sample_s": 600.0}) as front:
        client = Client(front)
        session = client.sampling_session()
        unheard = client.post("asample", **sample(session, 0))
        front.engine.stop("it was paused")
        wait_for(lambda: _status(front.http, "healthz") == 503)
        for ack in (client.optim_step(3), client.post("asample", **sample(session, 1))):
            assert "The trainer has stopped: it was paused" in client.result(ack)["error"]
        poll = {"target": {"type": "sampling_session", "sampling_session_id": client.session_id}}
        assert front.http.post("retrieve_futures", json=poll).status_code == 410
        assert client.result(unheard)["category"] == "server"
        assert front.process.wait(PATIENCE_S) == 0


def test_front_stays_for_those_who_have_not_heard_yet() -> None:
    """A client is between two questions when the engine goes."""
    with RunningFront(hold_s=20, last_answers_s=30, delays={"step_s": 60.0}) as front:
        client = Client(front)
        ack = client.optim_step(1)
        front.engine.channel.send(EngineReady(capabilities=CAPABILITIES))
        front.engine.die()
        time.sleep(1)
        assert front.process.poll() is None
        assert front.http.get("healthz").status_code == 503
        late = client.result(client.optim_step(2))
        assert "The trainer has stopped" in late["error"]
        assert "The trainer has stopped" in client.result(ack)["error"]
        assert front.process.wait(PATIENCE_S) == 1


def test_front_needs_no_torch() -> None:
    code = "import trainmaster.trainer_service.front.__main__, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code]).returncode == 0


def test_signal_to_the_whole_job_is_left_to_the_engine(front: RunningFront) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        front.process.send_signal(number)
    time.sleep(0.3)
    assert "metrics" in Client(front).result(Client(front).optim_step(1))


def _status(http: httpx.Client, path: str) -> int:
    try:
        return http.get(path).status_code
    except httpx.TransportError:
        return 0


def test_unknown_paths_say_why(front: RunningFront) -> None:
    unknown = front.http.get("nothing")
    assert unknown.status_code == 404
    assert unknown.json()["error"] == "a trainer has no answer to GET /api/v1/nothing"
    for path in ("training_runs", "training_runs/x/checkpoints", "sessions/s", "billing/usage/x", "audit"):
        answer = front.http.get(path)
        assert answer.status_code == 404
        assert "ask the server" in answer.json()["error"]
    wrong = front.http.get("optim_step")
    assert wrong.status_code == 405
    assert "is not asked with GET" in wrong.json()["error"]
    joined = front.http.post("join_sampling_session", json={})
    assert joined.status_code == 404
    assert joined.json()["error"]


def test_port_is_for_those_who_know_the_token_of_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    with RunningFront(token_file=tmp_path / "token") as front:
        assert front.http.get("healthz").status_code == 200
        for headers in ({}, {TOKEN_HEADER: "another"}):
            refused = front.http.post("create_session", json={}, headers=headers)
            assert refused.status_code == 401
            assert "go through the server" in refused.json()["error"]
        assert front.http.post("create_session", json={}, headers={TOKEN_HEADER: "secret"}).status_code == 200

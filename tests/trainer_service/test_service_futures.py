"""Futures of the front: held, written as clients read them, kept for a while, dead after a new start; saved weights."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from plain_client import PROTOBUF, Client, protobuf_pass, sample, wait_for
from running_front import RunningFront
from stub_engine import BASE_MODEL, checkpoint

from trainmaster.trainer_service import schema, wire


@pytest.fixture(scope="module")
def front() -> Iterator[RunningFront]:
    with RunningFront(hold_s=5) as started:
        yield started


def test_question_is_held_until_there_is_an_answer() -> None:
    with RunningFront(hold_s=300, delays={"step_s": 5.0}) as front:
        client = Client(front)
        began = time.monotonic()
        ack = client.optim_step(1)
        assert time.monotonic() - began < 4.9
        assert "metrics" in client.result(ack)
        assert 4.9 < time.monotonic() - began < 250


def test_question_that_is_held_too_long_is_to_be_asked_again() -> None:
    with RunningFront(hold_s=0.3, delays={"step_s": 1.5}) as front:
        client = Client(front)
        ack = client.optim_step(1)
        pending = client.retrieve(ack)
        assert pending.status_code == 408
        assert pending.json() == {"type": "try_again", "queue_state": "active"}
        wait_for(lambda: "metrics" in client.result(ack))


def test_gap_is_named_to_those_who_wait_behind_it() -> None:
    with RunningFront(hold_s=0.2) as front:
        client = Client(front)
        answer = client.result(client.optim_step(2))
        assert answer["type"] == "try_again"
        assert "waits for the operation with the seq_id 1" in answer["queue_state_reason"]


def test_result_can_be_fetched_more_than_once(front: RunningFront) -> None:
    client = Client(front)
    ack = client.forward_backward(1)
    assert client.result(ack) == client.result(ack) == client.result(ack)


def test_result_is_written_as_the_client_accepts_it(front: RunningFront) -> None:
    client = Client(front)
    ack = client.forward_backward(1)
    for accept in (wire.PROTOBUF, f"{wire.PROTOBUF}, application/json"):
        response = client.retrieve(ack, accept)
        assert response.headers["content-type"] == wire.PROTOBUF
        assert schema.ForwardBackwardOutput.FromString(response.content).metrics["loss:sum"] == 8
    for accept in ("application/json", "*/*"):
        response = client.retrieve(ack, accept)
        assert response.headers["content-type"] == "application/json"
        assert response.json()["loss_fn_outputs"] == [
            {"logprobs": {"data": [-4, -4], "dtype": "float32", "shape": [2]}}
        ]
    failed = client.post("forward_backward", model_id=client.model_id, seq_id=2)
    assert client.retrieve(failed, wire.PROTOBUF).json()["category"] == "user"


def test_large_result_is_announced_once_to_those_who_ask(front: RunningFront) -> None:
    client = Client(front)
    body = protobuf_pass(client.model_id, 1, targets=400_000)
    ack = front.http.post("forward_backward", content=body, headers=PROTOBUF).json()
    announced = client.retrieve(ack, wire.PROTOBUF, allow_metadata_only=True).json()
    whole = client.retrieve(ack, wire.PROTOBUF, allow_metadata_only=False)
    assert announced == {"status": "complete_metadata", "response_payload_size": len(whole.content)}
    assert len(whole.content) > 1_600_000
    as_json = client.retrieve(ack).json()
    assert len(as_json["loss_fn_outputs"][0]["logprobs"]["data"]) == 400_000
    small = client.optim_step(2)
    assert "metrics" in client.retrieve(small, allow_metadata_only=True).json()


def test_numbers_that_json_lacks_are_strings(front: RunningFront) -> None:
    """Some public clients have a strict parser."""
    client = Client(front)
    text = json.dumps({"model_id": client.model_id, "seq_id": 1, "adam_params": {"learning_rate": float("inf")}})
    ack = front.http.post("optim_step", content=text).json()
    assert '"grad_norm":"NaN"' in client.retrieve(ack).text


def test_unknown_future_is_not_found(front: RunningFront) -> None:
    for request_id in ("nonsense", "a:b:c", 3, None):
        assert front.http.post("retrieve_future", json={"request_id": request_id}).status_code == 404
    gone = front.http.post("retrieve_future", json={"request_id": "job-1:1:s:train:0:5"})
    assert gone.status_code == 410
    assert gone.json()["error"]


def test_result_is_kept_for_a_while_only() -> None:
    with RunningFront(keep_results_s=1) as front:
        client = Client(front)
        ack = client.optim_step(1)
        assert "metrics" in client.result(ack)
        wait_for(lambda: client.retrieve(ack).status_code == 410)
        # It is done, all the same; nothing is made again, either.
        assert client.optim_step(1) == ack
        client.post("create_model", session_id=client.session_id, model_seq_id=0, base_model=BASE_MODEL)
        session = client.sampling_session()
        wait_for(lambda: front.http.post("retrieve_future", json=ack).status_code == 410)
        time.sleep(2.5)
        assert client.sampling_session() == session
        assert client.done() == [(1, "optim_step")]
        assert len(client.requests("create_model")) == len(client.requests("create_sampling_session")) == 1


def test_results_that_were_fetched_make_room_for_others() -> None:
    with RunningFront(keep_fetched_bytes=2 << 20) as front:
        client = Client(front)
        acks = []
        for seq_id in range(1, 5):
            body = protobuf_pass(client.model_id, seq_id, targets=200_000)
            acks.append(front.http.post("forward_backward", content=body, headers=PROTOBUF).json())
        for ack in acks:
            assert len(client.retrieve(ack, wire.PROTOBUF).content) > 800_000
        assert [client.retrieve(ack, wire.PROTOBUF).status_code for ack in acks] == [410, 410, 200, 200]


def test_ids_of_another_start_are_dead_and_name_what_was_saved() -> None:
    saved = (
        checkpoint("step-2", "s:train:0"),
        checkpoint("step-4", "s:train:0"),
        checkpoint("x", "s:train:0", "sampler"),
    )
    with RunningFront(attempt=3, checkpoints=saved) as front:
        operation = {"model_id": "s:train:0", "seq_id": 7}
        for ack in (
            {"request_id": "job-1:2:s:train:0:6"},
            front.http.post("optim_step", json=operation).json(),
            front.http.post("forward_backward", content=protobuf_pass("s:train:0", 8), headers=PROTOBUF).json(),
            front.http.post("unload_model", json=operation).json(),
        ):
            answer = front.http.post("retrieve_future", json=ack).json()
            assert answer["category"] == "server"
            assert "has started 3 times" in answer["error"]
            assert "last saved state is step-4" in answer["error"]
        other = front.http.post("optim_step", json={"model_id": "s:train:9", "seq_id": 1}).json()
        assert "None of its states was saved" in front.http.post("retrieve_future", json=other).json()["error"]
        sampled = front.http.post("asample", json=sample("s:sample:0@job-1.2", 0)).json()
        answer = front.http.post("retrieve_future", json=sampled).json()
        assert answer["category"] == "server"
        assert "make a new sampling client" in answer["error"]


@pytest.mark.parametrize(
    ("door", "path", "sampler"),
    [
        ("fireworks", "step-1", "step-1-s"),
        ("tinker", "tinker://{}/weights/step-1", "tinker://{}/sampler_weights/step-1-s"),
    ],
)
def test_weights_are_saved_and_loaded(front: RunningFront, door: str, path: str, sampler: str) -> None:
    client = Client(front, door)
    path, sampler = path.format(client.model_id), sampler.format(client.model_id)
    client.optim_step(1)
    saved = client.result(client.post("save_weights", model_id=client.model_id, path="step-1", seq_id=2))
    assert saved["path"] == path
    for_sampling = client.post("save_weights_for_sampler", model_id=client.model_id, path="step-1-s", seq_id=3)
    assert client.result(for_sampling)["path"] == sampler
    client.optim_step(4)
    loaded = client.post("load_weights", model_id=client.model_id, path=path, optimizer=True, seq_id=5)
    assert client.result(loaded)["path"] == path
    assert client.result(client.optim_step(6))["metrics"]["steps"] == 2
    names = front.http.get("list_checkpoints").json()["checkpoints"]
    assert path in names
    assert sampler not in names
    info = client.post("weights_info", tinker_path=path)
    assert info["base_model"] == BASE_MODEL
    assert (info["is_lora"], info["lora_rank"], info["train_mlp"]) == (True, 8, True)
    assert front.http.post("weights_info", json={"tinker_path": "none"}).status_code == 404
    session = client.sampling_session(model_path=sampler)
    described = front.http.get(f"samplers/{session}").json()
    assert described == {"sampler_id": session, "base_model": BASE_MODEL, "model_path": sampler}
    missing = client.post("load_weights", model_id=client.model_id, path="none", optimizer=True, seq_id=7)
    assert client.result(missing) == {"error": "nothing was saved as 'none'", "category": "user"}


def test_what_the_server_refuses_fails_through_its_future_and_has_its_place(front: RunningFront) -> None:
    client = Client(front)
    body = {"model_id": client.model_id, "path": "cross_job://other/x", "seq_id": 2}
    ack = front.http.post("load_weights", json=body, headers={"X-Trainmaster-Refusal": quote("no job ünser")}).json()
    stepped = client.optim_step(3)
    client.result(client.optim_step(1))
    assert client.result(ack) == {"error": "no job ünser", "category": "user"}
    assert client.result(stepped)["metrics"]["steps"] == 2
    assert not [one for one in client.requests("load_weights") if one.model_id == client.model_id]


def test_where_a_path_leads_is_the_servers_to_say(front: RunningFront) -> None:
    client = Client(front)
    body = {"model_id": client.model_id, "adapter_path": "accounts/a/models/x", "seq_id": 1}
    headers = {b"X-Trainmaster-Source": "/modèles/x".encode()}
    ack = front.http.post("load_adapter", json=body, headers=headers).json()
    assert client.result(ack)["adapter_path"] == "accounts/a/models/x"
    assert client.requests("load_adapter")[-1].source == "/modèles/x"
    assert client.requests("load_adapter")[-1].door == "fireworks"


def test_repeated_save_for_sampling_gives_the_first_session(front: RunningFront) -> None:
    client = Client(front)
    acks = [
        client.post("save_weights_for_sampler", model_id=client.model_id, seq_id=1, sampling_session_seq_id=number)
        for number in (1, 2)
    ]
    assert acks[0] == acks[1]
    session = client.result(acks[0])["sampling_session_id"]
    assert session == f"{client.session_id}:sample:1@job-1.1"
    assert front.http.get(f"samplers/{session}").json()["base_model"] == BASE_MODEL
    assert front.http.get(f"samplers/{client.session_id}:sample:2@job-1.1").status_code == 404
    assert len(client.result(client.post("asample", **sample(session, 0)))["sequences"]) == 2

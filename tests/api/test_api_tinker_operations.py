"""The root Tinker door: what is asked of a model reaches its trainer as it was sent, and its futures come back."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import zstandard
from api_world import SERVICE, Served, post_then_read, wait_for
from tinker_world import Client, StandIn, TinkerWorld

from patience import PATIENCE_S
from trainmaster.server.doors import bodies, futures
from trainmaster.server.http import gateway, requests
from trainmaster.server.store import jobs
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

PROTOBUF = "application/x-protobuf"


def message(model_id: str, size: int = 100) -> bytes:
    """A ForwardBackwardRequest: its first field, and something."""
    name = model_id.encode()
    return bytes([0x0A, len(name)]) + name + b"\x10\x01" + b"\x1a" + bytes(size)


def post_bytes(client: Client, operation: str, body: Any, content_type: str, **headers: str) -> httpx.Response:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.http.post(operation, content=body, headers={"Content-Type": content_type, **sent})


@pytest.mark.parametrize("size", [100, pytest.param(300_000, marks=pytest.mark.long), 20_000_000])
def test_protobuf_reaches_the_trainer_byte_by_byte(client: Client, trainer: StandIn, size: int) -> None:
    model_id = client.model(trainer)
    body = message(model_id, size)
    ack = post_bytes(client, "forward_backward", body, PROTOBUF, x_mine="1").json()
    assert ack["model_id"] == model_id
    (sent,) = trainer.of("forward_backward")
    assert sent.body == body
    assert sent.headers["content-type"] == PROTOBUF
    assert sent.headers["x-mine"] == "1"


def test_body_of_unknown_length_reaches_the_trainer(client: Client, trainer: StandIn) -> None:
    model_id = client.model(trainer)
    body = message(model_id, 500_000)
    pieces: Iterator[bytes] = (body[start : start + 70_000] for start in range(0, len(body), 70_000))
    assert post_bytes(client, "forward_backward", pieces, PROTOBUF).status_code == 200
    assert trainer.of("forward_backward")[0].body == body


def test_compressed_protobuf_is_not_decompressed(client: Client, trainer: StandIn) -> None:
    model_id = client.model(trainer)
    body = zstandard.ZstdCompressor().compress(message(model_id, 100_000))
    response = post_bytes(client, "forward_backward", body, PROTOBUF, content_encoding="zstd")
    assert response.status_code == 200, response.text
    assert trainer.of("forward_backward")[0].body == body


@pytest.mark.parametrize(
    ("where", "size"), [("front", 10), ("end", 10), ("middle", 10), ("front", 400_000), ("end", 400_000)]
)
def test_json_finds_its_trainer_wherever_it_names_its_model(
    client: Client, trainer: StandIn, where: str, size: int
) -> None:
    """Of a large body, at its beginning or at its end."""
    model_id = client.model(trainer)
    filling = [1] * size
    # What only looks like the field must not be taken for it.
    decoy = {"model_id": "sess-decoy:train:0", "text": '"model_id":"sess-decoy:train:1"'}
    fields: dict[str, Any] = {"forward_backward_input": {"data": filling, **decoy}, "seq_id": 1}
    more = {"loss_fn_config": {"more": filling, **decoy}}
    document = {
        "front": {"model_id": model_id, **fields},
        "end": {**fields, "model_id": model_id},
        "middle": {**fields, "model_id": model_id, **more},
    }[where]
    body = json.dumps(document).encode()
    ack = post_bytes(client, "forward_backward", body, "application/json").json()
    assert ack["model_id"] == model_id
    assert trainer.of("forward_backward")[0].body == body


def test_only_the_server_speaks_as_the_server(client: Client, trainer: StandIn) -> None:
    model_id = client.model(trainer)
    client.post(
        "optim_step",
        {"model_id": model_id, "seq_id": 1},
        X_Trainmaster_Source="/etc",
        X_Trainmaster_Door="fireworks",
        Authorization="Bearer secret",
    )
    (sent,) = trainer.of("optim_step")
    assert sent.headers["x-trainmaster-door"] == "tinker"
    assert "x-trainmaster-source" not in sent.headers
    assert client.key not in json.dumps(sent.headers)
    assert "secret" not in json.dumps(sent.headers)


@pytest.mark.parametrize("operation", ["optim_step", "save_weights", "save_weights_for_sampler", "unload_model"])
def test_small_operations_reach_the_trainer(client: Client, trainer: StandIn, operation: str) -> None:
    model_id = client.model(trainer)
    ack = client.post(operation, {"model_id": model_id, "seq_id": 3})
    assert ack["request_id"].startswith(f"{trainer.trainer.job_id}:{trainer.trainer.attempt}:")
    assert trainer.of(operation)[0].json()["seq_id"] == 3


def test_result_comes_back_as_the_trainer_gave_it(client: Client, trainer: StandIn) -> None:
    model_id = client.model(trainer)
    trainer.results[":7"] = b"\x0a\x03abc" * 200_000
    ack = client.post("optim_step", {"model_id": model_id, "seq_id": 7})
    response = client.http.post("retrieve_future", json={"request_id": ack["request_id"]}, headers={"Accept": PROTOBUF})
    assert response.headers["content-type"] == PROTOBUF
    assert response.content == trainer.results[":7"]
    assert trainer.of("retrieve_future")[-1].headers["accept"] == PROTOBUF


def test_result_of_unknown_length_comes_back_in_pieces(client: Client, trainer: StandIn) -> None:
    model_id = client.model(trainer)
    pieces = trainer.results[":1"] = [bytes([number]) * 50_000 for number in range(20)]
    ack = client.post("optim_step", {"model_id": model_id, "seq_id": 1})
    for _ in range(3):  # over a connection that is kept
        response = client.http.post("retrieve_future", json={"request_id": ack["request_id"]})
        assert response.content == b"".join(pieces)


def test_poll_is_held_by_the_trainer_and_not_answered_before(client: Client, trainer: StandIn) -> None:
    model_id = client.model(trainer)
    ack = client.post("optim_step", {"model_id": model_id, "seq_id": 1})
    trainer.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.post, "retrieve_future", {"request_id": ack["request_id"]})
        wait_for(lambda: trainer.of("retrieve_future"))
        assert not asked.done()
        trainer.gate.set()
        assert asked.result(PATIENCE_S) == {}


def test_future_is_answered_after_the_server_was_restarted(tinker_world: TinkerWorld, trainer: StandIn) -> None:
    with Served.serve(tinker_world.context()) as served, Client.of(served, tinker_world, "again") as client:
        model_id = client.model(trainer)
        ack = client.post("optim_step", {"model_id": model_id, "seq_id": 1})
    trainer.results[":1"] = {"metrics": {"a": 1.0}}
    with Served.serve(tinker_world.context()) as served, Client.of(served, tinker_world, "again") as client:
        assert client.result(ack) == {"metrics": {"a": 1.0}}
        client.post("optim_step", {"model_id": model_id, "seq_id": 2})


def test_operations_of_another_account_are_not_there(client: Client, stranger: Client, trainer: StandIn) -> None:
    model_id = client.model(trainer)
    ack = client.post("optim_step", {"model_id": model_id, "seq_id": 1})
    count = len(trainer.sent)
    stranger.post("optim_step", {"model_id": model_id, "seq_id": 2}, expect=404)
    assert post_bytes(stranger, "forward_backward", message(model_id), PROTOBUF).status_code == 404
    stranger.post("get_info", {"model_id": model_id}, expect=404)
    stranger.post("retrieve_future", {"request_id": ack["request_id"]}, expect=404)
    stranger.post("cancel_future", {"request_id": ack["request_id"]}, expect=404)
    assert len(trainer.sent) == count


def test_operation_of_an_unknown_model_is_404(client: Client, trainer: StandIn) -> None:
    unknown = client.model(trainer).replace(":train:0", ":train:7")
    count = len(trainer.sent)
    for body, kind in (
        (message(unknown), PROTOBUF),
        (json.dumps({"model_id": unknown, "seq_id": 1}).encode(), "application/json"),
    ):
        answer = post_bytes(client, "forward_backward", body, kind)
        assert (answer.status_code, unknown in answer.text) == (404, True)
    client.post("optim_step", {"model_id": unknown, "seq_id": 1}, expect=404)
    assert len(trainer.sent) == count


def test_operation_of_a_model_that_is_lost_fails_through_its_future(client: Client, trainer: StandIn) -> None:
    model_id = client.model(trainer)
    path = f"tinker://{model_id}/weights/step-4"
    client.save(model_id, "step-4")
    pending = client.post("optim_step", {"model_id": model_id, "seq_id": 1})
    client.world.end(client.trainer_job().job_id, "KILLED_BY_SIGNAL", "killed by signal 9")
    trainer.stop()
    for ack in (
        client.post("optim_step", {"model_id": model_id, "seq_id": 2}),
        post_bytes(client, "forward_backward", message(model_id, 2_000_000), PROTOBUF).json(),
        pending,
    ):
        answer = wait_for(lambda ack=ack: client.result(ack))
        assert answer["category"] == "server"
        assert "killed by signal 9" in answer["error"]
        assert path in answer["error"]


def test_model_of_an_earlier_start_is_lost_though_its_trainer_runs_again(client: Client, trainer: StandIn) -> None:
    model_id = client.model(trainer)
    job_id = client.trainer_job().job_id
    pending = client.post("optim_step", {"model_id": model_id, "seq_id": 1})
    client.world.end(job_id, "KILLED_BY_SIGNAL")
    client.world.commands.resume(Scope(client.account_id), job_id).result()
    trainer.stop()
    with StandIn().serving() as again:
        client.start_trainer(again, job_id)
        for ack in (pending, client.post("optim_step", {"model_id": model_id, "seq_id": 2})):
            answer = client.result(ack)
            assert answer["category"] == "server"
            assert "started again" in answer["error"]
            assert "nothing of it was saved" in answer["error"]
        assert not again.sent


def test_trainer_that_does_not_answer_makes_clients_ask_again(
    client: Client, trainer: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is known to have ended, it may be back."""
    monkeypatch.setattr(futures, "BREAK_S", 0.01)
    model_id = client.model(trainer)
    ack = client.post("optim_step", {"model_id": model_id, "seq_id": 1})
    trainer.stop()
    assert client.post("optim_step", {"model_id": model_id, "seq_id": 2}, expect=502)["error"]["message"]
    assert client.post("retrieve_future", {"request_id": ack["request_id"]}, expect=408)["type"] == "try_again"


def test_answer_that_breaks_off_does_not_look_whole(client: Client, trainer: StandIn) -> None:
    model_id = client.model(trainer)
    trainer.breaks_off = True
    client.post("optim_step", {"model_id": model_id, "seq_id": 1}, expect=502)
    trainer.breaks_off = False
    client.post("optim_step", {"model_id": model_id, "seq_id": 1})


def test_model_that_is_not_made_yet_takes_nothing(client: Client) -> None:
    ack = client.ask_for_model(client.session())
    answer = client.result(client.post("optim_step", {"model_id": ack["model_id"], "seq_id": 1}))
    assert answer["category"] == "user"
    assert "not made yet" in answer["error"]


@pytest.mark.parametrize(
    ("operation", "document"),
    [
        ("optim_step", {}),
        ("optim_step", {"model_id": 5}),
        ("forward_backward", {"seq_id": 1}),
        ("load_weights", {"path": "tinker://a/weights/b"}),
        ("retrieve_future", {}),
        ("asample", {"num_samples": 1}),
    ],
)
def test_request_that_names_nothing_is_refused(client: Client, operation: str, document: dict[str, Any]) -> None:
    assert client.post(operation, document, expect=422)["error"]["details"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'"text"'])
def test_body_that_is_no_object_is_refused(client: Client, body: bytes) -> None:
    for operation in ("forward_backward", "optim_step", "asample", "retrieve_future", "create_session"):
        response = post_bytes(client, operation, body, "application/json")
        assert response.status_code in (200, 422), response.text
        assert response.status_code == 422 or (operation == "create_session" and not body)


@pytest.mark.parametrize("body", [b"", b"\x12\x01a", b"\x0a\xff\xff\xff\xff\x7f", b"\x0a\x02\xff\xfe", bytes(100_000)])
def test_message_that_begins_with_no_model_is_refused(client: Client, body: bytes) -> None:
    assert post_bytes(client, "forward_backward", body, PROTOBUF).status_code == 422


def large(model_id: str) -> bytes:
    """A body that names its model at its end."""
    return b'{"data": [%s1], "seq_id": 1, "model_id": "%s"}' % (b"1," * (300 << 10), model_id.encode())


def test_large_body_of_a_model_that_is_not_there_is_let_go_at_once(
    client: Client, stranger: Client, trainer: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a collection of garbage: errors that pass through threads live until the next one."""
    monkeypatch.setattr(bodies, "MAX_WHOLE_BYTES_IN_ALL", 4 << 20)
    model_id = client.model(trainer)
    gc.disable()
    try:
        for _ in range(8):
            assert stranger.http.post("forward_backward", content=large("none")).status_code == 404
        assert client.http.post("forward_backward", content=large(model_id)).status_code == 200
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("operation", "body", "status"),
    [
        ("forward_backward", message("none", 40 << 20), 404),
        ("forward_backward", b"\x10\x01\x1a" + bytes(40 << 20), 422),
        ("asample", message("none", 40 << 20), 404),
    ],
)
def test_client_that_sends_all_of_a_large_body_before_it_reads_sees_why_it_is_refused(
    client: Client, operation: str, body: bytes, status: int
) -> None:
    said = post_then_read(client.http, f"/api/v1/{operation}", client.key, body, PROTOBUF)
    assert said.startswith(f"HTTP/1.1 {status} ".encode())
    if status == 404:
        assert b"there is no" in said


def test_bodies_that_do_not_come_keep_nobody_else_out_and_are_given_up(
    client: Client, stranger: Client, trainer: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_WHOLE_BYTES_IN_ALL", 4 << 20)
    monkeypatch.setattr(requests, "PATIENCE_S", 1.0)
    model_id = client.model(trainer)
    head = f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: x\r\nX-API-Key: {stranger.key}\r\n"
    head += "Content-Type: application/json\r\nContent-Length: 90000000\r\n\r\n"
    with contextlib.ExitStack() as stack:
        stalled = []
        for _ in range(8):
            address = (client.http.base_url.host, client.http.base_url.port)
            stalled.append(stack.enter_context(socket.create_connection(address, timeout=PATIENCE_S)))
            stalled[-1].sendall(head.encode() + large("")[: 512 << 10])
        time.sleep(0.3)
        assert client.http.post("forward_backward", content=large(model_id)).status_code == 200
        for each in stalled:
            said = b"".join(iter(functools.partial(each.recv, 1 << 16), b""))  # to the end: the connection is closed
            assert said.startswith(b"HTTP/1.1 408 ")
            assert b"REQUEST_TIMEOUT" in said
            assert b"\r\nconnection: close\r\n" in said.lower()


@pytest.mark.parametrize("path", ["tinker://\ud800/weights/x", "tinker://a\0b/weights/x", "tinker://a/weights/\ud800"])
def test_path_that_no_weights_can_have_is_told_through_the_future(client: Client, trainer: StandIn, path: str) -> None:
    model_id = client.model(trainer)
    document = {"model_id": model_id, "seq_id": 1, "path": path, "weights_access_token": "\ud800"}
    # As ASCII: a lone surrogate is no proper UTF-8.
    assert client.http.post("load_weights", content=json.dumps(document).encode()).status_code == 200
    (sent,) = trainer.of("load_weights")
    assert sent.json()["path"] == path
    assert "x-trainmaster-source" not in sent.headers
    wanted = json.dumps({"tinker_path": path}).encode()
    assert client.http.post("weights_info", content=wanted).status_code in (404, 422)


def test_unknown_future_is_not_there(client: Client) -> None:
    client.post("retrieve_future", {"request_id": "nothing"}, expect=404)
    client.post("retrieve_future", {"request_id": "job-doesnotexist:1:a:1"}, expect=404)
    client.post("retrieve_future", {"request_id": "create_model:sess-x:train:0"}, expect=404)


def test_weights_are_named_to_the_trainer_by_the_server(client: Client, trainer: StandIn) -> None:
    model_id = client.model(trainer)
    where = client.save(model_id, "step-4")
    document = {"model_id": model_id, "seq_id": 1, "path": f"tinker://{model_id}/weights/step-4", "optimizer": True}
    client.post("load_weights", {**document, "weights_access_token": "tml-secret"})
    (sent,) = trainer.of("load_weights")
    assert sent.headers["x-trainmaster-source"] == where
    assert sent.json() == document  # and no token


def test_weights_of_others_are_loaded_when_they_are_public_or_lent(
    client: Client, stranger: Client, trainer: StandIn
) -> None:
    theirs = stranger.model(trainer)
    where = stranger.save(theirs, "step-4")
    path = f"tinker://{theirs}/weights/step-4"
    with StandIn().serving() as own:
        model_id = client.model(own)

        def source(seq_id: int, **fields: Any) -> str | None:
            client.post("load_weights", {"model_id": model_id, "seq_id": seq_id, "path": path, **fields})
            return own.of("load_weights")[-1].headers.get("x-trainmaster-source")

        # The trainer is asked all the same: it counts the request, and says through its future that there are none.
        assert source(1) is None
        assert source(2, weights_access_token="tml-nobodys") is None
        assert source(3, weights_access_token=stranger.key) == where
        stranger.post(f"training_runs/{theirs}/checkpoints/weights/step-4/publish")
        assert source(4) == where
        stranger.call("DELETE", f"training_runs/{theirs}/checkpoints/weights/step-4/publish")
        assert source(5) is None


def test_model_is_not_made_by_loading(client: Client) -> None:
    document = {"session_id": client.session(), "model_seq_id": 0, "path": "tinker://a/weights/b", "optimizer": True}
    answer = client.result(client.post("load_weights", document))
    assert answer["category"] == "user"
    assert "create_model" in answer["error"]


@pytest.mark.parametrize("field", ["base_model", "user_metadata", "optimizer_config"])
def test_loading_changes_nothing_that_create_model_says(client: Client, trainer: StandIn, field: str) -> None:
    document = {"model_id": client.model(trainer), "seq_id": 1, "path": "tinker://a/weights/b", field: {"type": "x"}}
    answer = client.result(client.post("load_weights", document))
    assert answer["category"] == "user"
    assert answer["error"].startswith(f"{field}: set by create_model")


def test_save_is_done_when_it_is_on_record(client: Client, trainer: StandIn) -> None:
    model_id = client.model(trainer)
    path = f"tinker://{model_id}/weights/late"
    trainer.results[":1"] = {"path": path}
    ack = client.post("save_weights", {"model_id": model_id, "seq_id": 1, "path": "late"})
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            client.post, "retrieve_future", {"request_id": ack["request_id"]}, X_Tinker_Request_Type="SaveWeights"
        )
        wait_for(lambda: trainer.of("retrieve_future"))
        assert not asked.done()
        client.save(model_id, "late")
        assert asked.result(PATIENCE_S) == {"path": path}
    assert client.post("weights_info", {"tinker_path": path})["lora_rank"] == 8


def test_what_is_only_called_a_save_comes_back_all_the_same(client: Client, trainer: StandIn) -> None:
    model_id = client.model(trainer)
    trainer.results[":1"] = b"\x0a\xff no JSON"
    ack = client.post("optim_step", {"model_id": model_id, "seq_id": 1})
    headers = {"X-Tinker-Request-Type": "SaveWeights"}
    response = client.http.post("retrieve_future", json={"request_id": ack["request_id"]}, headers=headers)
    assert (response.status_code, response.content) == (200, trainer.results[":1"])


def test_service_that_is_no_trainer_is_not_reached(
    client: Client, trainer: StandIn, tinker_served: Served, tinker_world: TinkerWorld
) -> None:
    made = client.http.post(f"{tinker_served.url}/v1/jobs", json=SERVICE)
    job_id = made.json()["data"]["job_id"]
    attempt = tinker_world.start(job_id).live.number
    tinker_world.see(job_id, endpoint=trainer.address)
    client.post("retrieve_future", {"request_id": f"{job_id}:{attempt}:m:1"}, expect=404)
    client.post("cancel_future", {"request_id": f"{job_id}:{attempt}:m:1"}, expect=404)
    client.get(f"samplers/s:sample:1@{job_id}.{attempt}", expect=404)
    assert trainer.sent == []


def test_operations_and_heartbeats_are_use_of_the_trainer(
    client: Client, trainer: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "WRITE_USE_EVERY_S", 0.1)

    def last_use() -> float:
        with client.world.database.read() as connection:
            return jobs.last_use(connection, Scope.everything(), client.trainer_job().job_id) or 0.0

    model_id = client.model(trainer)
    before = wait_for(last_use)
    client.post("optim_step", {"model_id": model_id, "seq_id": 1})
    before = wait_for(lambda: (now := last_use()) > before and now)
    client.post("session_heartbeat", {"session_id": model_id.partition(":")[0]})
    wait_for(lambda: last_use() > before)


def test_no_database_is_asked_to_pass_an_operation_on(
    client: Client, trainer: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_id = client.model(trainer)
    ack = client.post("optim_step", {"model_id": model_id, "seq_id": 1})
    client.post("retrieve_future", {"request_id": ack["request_id"]})
    reads: list[str] = []
    read = Database.read

    def counted(self: Database) -> Any:
        reads.append(threading.current_thread().name)
        return read(self)

    monkeypatch.setattr(Database, "read", counted)
    for seq_id in range(2, 62):
        ack = client.post("optim_step", {"model_id": model_id, "seq_id": seq_id})
        client.post("retrieve_future", {"request_id": ack["request_id"]})
    # 120 requests. The key and the trainer are looked up anew now and then, and the server looks for itself meanwhile.
    assert len(reads) < 60


def test_polls_by_the_hundred_are_held_at_once(client: Client, trainer: StandIn) -> None:
    model_id = client.model(trainer)
    acks = [client.post("optim_step", {"model_id": model_id, "seq_id": seq_id}) for seq_id in range(1, 101)]
    trainer.gate.clear()
    with ThreadPoolExecutor(100) as pool:
        asked = [pool.submit(client.result, ack) for ack in acks]
        wait_for(lambda: len(trainer.of("retrieve_future")) >= 100)
        client.post("session_heartbeat", {"session_id": model_id.partition(":")[0]})
        trainer.gate.set()
        assert all(each.result(PATIENCE_S) is not None for each in asked)


def test_door_belongs_to_the_gateway(tinker_world: TinkerWorld) -> None:
    with (
        Served.serve(tinker_world.context(roles=frozenset({"api"}))) as served,
        Client.of(served, tinker_world) as client,
    ):
        client.get("get_server_capabilities", expect=404)

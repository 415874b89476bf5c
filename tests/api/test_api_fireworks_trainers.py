"""What is sent to a trainer by the job's own address: passed on, or answered in its place."""

from __future__ import annotations

import gc
import json
import secrets
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from api_world import Served, World, post_then_read, wait_for
from fireworks_world import Door, door_of, knowing

from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.doors import bodies
from trainmaster.server.storage import ARTIFACTS
from trainmaster.server.store import jobs
from trainmaster.server.store.scope import Scope


class Handler(BaseHTTPRequestHandler):
    """A stand-in for a trainer: tells what it was sent, and has answers for futures."""

    protocol_version = "HTTP/1.1"
    futures: dict[str, dict[str, Any]] = {}

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        pass

    def answer(self) -> None:
        size = self.headers.get("Content-Length")
        sent = self.rfile.read(int(size)) if size else self.chunked() if "Transfer-Encoding" in self.headers else b""
        document: Any = {
            "method": self.command,
            "path": self.path,
            "headers": {name.lower(): value for name, value in self.headers.items()},
            "length": len(sent),
            "body": sent[:100].decode("latin-1"),
        }
        if self.path.startswith("/api/v1/retrieve_future"):
            document = self.futures.get(json.loads(sent)["request_id"], document)
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815

    def chunked(self) -> bytes:
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data


@pytest.fixture(scope="module")
def served(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with knowing(world, tmp_path_factory.mktemp("models")) as served:
        yield served


@pytest.fixture
def door(world: World, served: Served) -> Iterator[Door]:
    with door_of(world, served, f"account-{secrets.token_hex(4)}") as door:
        yield door


@pytest.fixture
def trainer() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def running(door: Door, trainer: str) -> str:
    """The address of a trainer that answers."""
    door.create("trainer")
    door.run("trainer", trainer)
    return at(door)


def at(door: Door, job_id: str = "trainer") -> str:
    return f"/training/v1/rlorTrainerJobs/{door.account_id}/{job_id}/api/v1"


def test_request_reaches_the_trainer_without_the_jobs_address(door: Door, running: str) -> None:
    headers = {
        "X-Mine": "1",
        "Authorization": f"Bearer {door.key}",
        "X-Trainmaster-Door": "tinker",
        "X-Trainmaster-Source": "/etc",
        "x-trainmaster-other": "x",
        "x-trainmaster-token": "mine",
    }
    seen = door.call("POST", f"{running}/a%2Fb?x=1", content=b"\x00\xff not JSON", headers=headers)
    assert (seen["method"], seen["path"], seen["length"]) == ("POST", "/api/v1/a%2Fb?x=1", 11)
    assert seen["headers"]["x-mine"] == "1"
    assert seen["headers"]["x-trainmaster-door"] == "fireworks"
    ours = {name for name in seen["headers"] if name.startswith("x-trainmaster-")}
    assert ours == {"x-trainmaster-door", "x-trainmaster-token"}
    attempt = door.job("trainer").attempt
    assert attempt is not None
    assert seen["headers"]["x-trainmaster-token"] == attempt.rank_token
    assert door.key not in json.dumps(seen)
    assert door.call("GET", f"{running}/healthz")["path"] == "/api/v1/healthz"


def test_large_body_is_passed_on_as_it_comes(door: Door, running: str) -> None:
    size = 80 << 20

    def pieces() -> Iterator[bytes]:
        for _ in range(80):
            yield bytes(1 << 20)

    headers = {"Content-Type": "application/x-protobuf", "Content-Length": str(size)}
    seen = door.call("POST", f"{running}/forward_backward", content=pieces(), headers=headers)
    assert (seen["length"], seen["headers"]["content-type"]) == (size, "application/x-protobuf")


def test_keys_are_asked_for(door: Door, running: str, world: World, served: Served) -> None:
    url = f"{served.url}{running}/healthz"
    assert httpx.get(url, verify=False).status_code == 401
    assert httpx.get(url, headers={"Authorization": f"Bearer {door.key}"}, verify=False).status_code == 200
    assert httpx.get(url, headers={"X-API-Key": door.key}, verify=False).status_code == 200
    viewer = {"X-API-Key": world.key(door.account_id, KeyScope.VIEW)}
    assert httpx.get(url, headers=viewer, verify=False).status_code == 200
    assert httpx.post(f"{served.url}{running}/optim_step", headers=viewer, json={}, verify=False).status_code == 403
    with door_of(world, served, f"account-{secrets.token_hex(4)}") as stranger:
        stranger.call("GET", f"{running}/healthz", 404)
        stranger.call("GET", f"{at(stranger)}/healthz", 404)


def test_job_that_is_no_trainer_is_not_found(door: Door) -> None:
    body = {"name": "x", "handle": "plain", "workload": {"kind": "service", "argv": ["true"]}}
    door.http.post("/v1/jobs", json=body)
    door.call("GET", f"{at(door, 'plain')}/healthz", 404)
    door.call("GET", f"{at(door, 'nobodys')}/healthz", 404)


def test_use_counts_and_being_asked_for_health_does_not(
    door: Door, world: World, running: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainmaster.server.http.gateway.WRITE_USE_EVERY_S", 0.2)
    job = door.job("trainer")

    def used() -> float | None:
        with world.database.read() as connection:
            return jobs.last_use(connection, Scope.everything(), job.job_id)

    for _ in range(3):
        door.call("GET", f"{running}/healthz")
    time.sleep(0.1)
    assert used() is None
    door.call("POST", f"{running}/session_heartbeat", json={"session_id": "s"})
    first = wait_for(used)
    time.sleep(0.01)
    door.call("POST", f"{running}/optim_step", json={})
    wait_for(lambda: (used() or 0) > first)


def test_weights_of_another_job_are_found_for_the_trainer(door: Door, world: World, running: str) -> None:
    door.create("other")
    other = door.run("other")
    training = door.save(other, "training", "step-4")
    sampler = door.save(other, "sampler", "step-4-aabbccdd", sampler_kind="base")

    def source(operation: str, **fields: Any) -> str | None:
        seen = door.call("POST", f"{running}/{operation}", json={"model_id": "m", "seq_id": 1, **fields})
        assert json.loads(seen["body"])["model_id"] == "m"
        return seen["headers"].get("x-trainmaster-source")

    assert source("load_weights", path="cross_job://other/step-4") == str(training)
    assert source("load_adapter", adapter_path="cross_job://other/step-4-aabbccdd") == str(sampler)
    # Names of the same job are its own to find.
    for path in ("step-4", 7):
        assert source("load_weights", path=path) is None
    # Also when that job has ended, and was deleted.
    world.end(other.job_id, "KILLED_BY_SIGNAL")
    door.call("DELETE", f"{door.jobs}/other")
    assert source("load_weights", path="cross_job://other/step-4") == str(training)


@pytest.mark.parametrize(
    ("operation", "path", "why"),
    [
        ("load_weights", "cross_job://trainer/nobodys", "trainer trainer has no training checkpoint 'nobodys'"),
        ("load_weights", "cross_job://nobodys/step-4", "there is no job nobodys"),
        ("load_weights", "cross_job://ünser/step-4\r\nx", "there is no job ünser"),
        ("load_weights", "cross_job://trainer", "cross_job://trainer is not cross_job://JOB/NAME"),
        ("load_weights", f"cross_job://trainer/{'x' * 10_000}", f"checkpoint '{'x' * 900}"),
        ("load_adapter", "cross_job://trainer/step-4", "trainer trainer has no sampler checkpoint 'step-4'"),
        ("load_adapter", "accounts/{account}/models/nobodys", "there is no model nobodys"),
        ("load_adapter", "accounts/other/models/mine", "there is no model accounts/other/models/mine"),
    ],
)
def test_trainer_is_told_what_is_missing(door: Door, running: str, operation: str, path: str, why: str) -> None:
    """It says so through the future."""
    member = "path" if operation == "load_weights" else "adapter_path"
    body = {"model_id": "m", "seq_id": 1, member: path.replace("{account}", door.account_id)}
    headers = door.call("POST", f"{running}/{operation}", json=body)["headers"]
    assert "x-trainmaster-source" not in headers
    assert why in unquote(headers["x-trainmaster-refusal"])


def test_weights_of_others_are_not_found(door: Door, world: World, served: Served, running: str) -> None:
    with door_of(world, served, f"account-{secrets.token_hex(4)}") as stranger:
        stranger.create("theirs")
        stranger.save(stranger.run("theirs"), "training", "step-4")
    body = {"model_id": "m", "seq_id": 1, "path": "cross_job://theirs/step-4"}
    assert "x-trainmaster-source" not in door.call("POST", f"{running}/load_weights", json=body)["headers"]


def test_promoted_adapter_is_loaded_from_where_it_lies(door: Door, world: World, running: str) -> None:
    door.save(door.job("trainer"), "sampler", "step-4-aabbccdd", sampler_kind="base")
    name = f"accounts/{door.account_id}/models/mine"
    body = {
        "output_model": name,
        "trainer_job_id": f"accounts/{door.account_id}/rlorTrainerJobs/trainer",
        "base_model": "accounts/fireworks/models/qwen3-8b",
    }
    door.call("POST", f"/v1/accounts/{door.account_id}/checkpoints/step-4-aabbccdd:promote", json=body)
    seen = door.call("POST", f"{running}/load_adapter", json={"adapter_path": name})
    place = world.roots.path(ARTIFACTS, f"models/{door.account_id}/mine")
    assert seen["headers"]["x-trainmaster-source"] == str(place)


# -- a trainer that is not there --


def future(door: Door, request_id: str, expect: int = 200, **headers: str) -> Any:
    body = {"request_id": request_id, "allow_metadata_only": True}
    return door.call("POST", f"{at(door)}/retrieve_future", expect, json=body, headers=headers)


def test_future_is_fetched_from_its_trainer(door: Door, running: str) -> None:
    request_id = f"{door.job('trainer').job_id}:1:s:train:0:1"
    Handler.futures[request_id] = {"metrics": {"loss:sum": 1.0}}
    assert future(door, request_id) == {"metrics": {"loss:sum": 1.0}}
    future(door, "job-other:1:s:train:0:1", 404)
    future(door, "nonsense", 404)


@pytest.mark.parametrize("path", ["cross_job://\ud800/x", "cross_job://a\0/x", "accounts/{}/models/\ud800"])
def test_path_that_no_weights_can_have_is_left_to_the_trainer(door: Door, running: str, path: str) -> None:
    # As ASCII: a lone surrogate is no proper UTF-8.
    body = json.dumps({"model_id": "m", "seq_id": 1, "path": path.format(door.account_id)}).encode()
    seen = door.call("POST", f"{running}/load_weights", content=body)
    assert seen["length"] == len(body)
    assert "x-trainmaster-source" not in seen["headers"]


def test_large_body_of_work_is_let_go_with_its_answer(
    door: Door, running: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a collection of garbage."""
    monkeypatch.setattr(bodies, "MAX_WHOLE_BYTES_IN_ALL", 4 << 20)
    body = json.dumps({"model_id": "m", "path": "x" * (600 << 10)}).encode()
    gc.disable()
    try:
        for _ in range(8):
            assert door.call("POST", f"{running}/load_weights", content=body)["length"] == len(body)
    finally:
        gc.enable()


def test_saved_weights_are_on_record_when_their_future_is(door: Door, world: World, running: str) -> None:
    job = door.job("trainer")
    request_id = f"{job.job_id}:1:s:train:0:2"
    Handler.futures[request_id] = {"path": "step-9"}
    later = threading.Timer(0.3, lambda: door.save(job, "training", "step-9"))
    later.start()
    assert future(door, request_id, **{"X-Tinker-Request-Type": "SaveWeights"}) == {"path": "step-9"}
    names = [row["name"] for row in door.call("GET", f"{door.jobs}/trainer/checkpoints")["checkpoints"]]
    assert [name.rpartition("/")[2] for name in names] == ["step-9"]
    later.join()


def test_work_of_a_trainer_that_ended_fails_through_its_future(door: Door, world: World, running: str) -> None:
    job = door.job("trainer")
    door.save(job, "training", "step-1", model_id="s:train:1")
    door.save(job, "training", "step-2", model_id="s:train:0")
    door.save(job, "training", "step-3", model_id="s:train:1")
    world.end(job.job_id, "KILLED_BY_SIGNAL", "killed")
    pending = f"{job.job_id}:1:s:train:0:4"
    lost = wait_for(lambda: (said := future(door, pending)).get("category") and said)
    assert lost["category"] == "server"
    assert "'step-2'" in lost["error"]
    assert "KILLED_BY_SIGNAL" in lost["error"]
    # What is asked of it later is taken, and fails in the same way: a refusal would be tried again for minutes.
    for operation in ("forward_backward", "optim_step", "save_weights", "load_weights"):
        taken = door.call("POST", f"{running}/{operation}", content=b"\x00" * 100_000)
        said = future(door, taken["request_id"])
        assert said["category"] == "server"
        assert "'step-3'" in said["error"]
    assert door.call("POST", f"{running}/telemetry", json={}) == {"status": "accepted"}
    assert door.call("POST", f"{running}/sessions/s/finish", json={}) == {}
    door.call("POST", f"{running}/session_heartbeat", 410, json={"session_id": "s"})
    assert "resume it" in door.call("POST", f"{running}/create_session", 400, json={})["error"]["message"]
    door.call("GET", f"{running}/healthz", 503)


def test_trainer_that_was_resumed_does_not_know_older_futures(
    door: Door, world: World, running: str, trainer: str
) -> None:
    job = door.job("trainer")
    world.end(job.job_id, "KILLED_BY_SIGNAL")
    door.call("POST", f"{door.jobs}/trainer:resume")
    waiting = wait_for(lambda: (r := door.http.post(f"{running}/create_session", json={})).status_code == 503 and r)
    assert waiting.headers["Retry-After"]
    door.run("trainer", trainer)
    Handler.futures[f"{job.job_id}:2:s:train:0:1"] = {"fresh": True}
    assert wait_for(lambda: future(door, f"{job.job_id}:2:s:train:0:1").get("fresh"))
    assert "attempt 2" in future(door, f"{job.job_id}:1:s:train:0:1")["error"]


def test_trainer_that_died_a_moment_ago_is_asked_again(door: Door, world: World) -> None:
    door.create("trainer")
    job = door.run("trainer", "127.0.0.1:1")
    began = time.monotonic()
    said = future(door, f"{job.job_id}:1:s:train:0:1", expect=408)
    # Held: clients ask again at once.
    assert said["type"] == "try_again"
    assert time.monotonic() - began > 0.5
    door.call("POST", f"{at(door)}/optim_step", 502, json={})
    world.end(job.job_id, "WORKER_LOST")
    body = {"request_id": f"{job.job_id}:1:s:train:0:1"}
    ended = wait_for(lambda: (r := door.http.post(f"{at(door)}/retrieve_future", json=body)).status_code == 200 and r)
    assert ended.json()["category"] == "server"


@pytest.mark.parametrize(("operation", "size"), [("optim_step", 2), ("load_weights", 2), ("forward_backward", 2 << 20)])
def test_trainer_that_ended_while_it_was_being_sent_to_is_answered_for(
    door: Door, world: World, operation: str, size: int
) -> None:
    door.create("trainer")
    job = door.run("trainer", "127.0.0.1:1")
    body = b"{" + b" " * (size - 2) + b"}"
    door.call("POST", f"{at(door)}/{operation}", 502, content=body)
    world.end(job.job_id, "WORKER_LOST")
    # It was seen to run less than a second ago.
    taken = door.call("POST", f"{at(door)}/{operation}", content=body)
    assert "WORKER_LOST" in future(door, taken["request_id"])["error"]


def test_deleted_trainer_answers_for_its_futures_alone(door: Door, world: World, running: str) -> None:
    job = door.job("trainer")
    world.end(job.job_id, "KILLED_BY_SIGNAL")
    door.call("DELETE", f"{door.jobs}/trainer")
    error = wait_for(lambda: "deleted" in (said := future(door, f"{job.job_id}:1:s:train:0:1"))["error"] and said)
    assert "nothing was saved" in error["error"]
    door.call("POST", f"{running}/create_session", 404, json={})


def test_jobs_other_address_does_not_let_our_headers_in_either(door: Door, running: str) -> None:
    headers = {"X-Trainmaster-Source": "/etc", "X-Trainmaster-Door": "tinker", "X-Trainmaster-Token": "mine"}
    seen = door.call("GET", "/v1/jobs/trainer/proxy/x", headers=headers)["headers"]
    assert {name for name in seen if name.startswith("x-trainmaster-")} == {"x-trainmaster-token"}
    attempt = door.job("trainer").attempt
    assert attempt is not None
    assert seen["x-trainmaster-token"] == attempt.rank_token


def test_large_body_for_a_trainer_that_does_not_exist_is_read_before_it_is_refused(door: Door) -> None:
    path = f"/training/v1/rlorTrainerJobs/{door.account_id}/nobodys/api/v1/forward_backward"
    said = post_then_read(door.http, path, door.key, bytes(40 << 20), "application/x-protobuf")
    assert said.startswith(b"HTTP/1.1 404 ")
    assert b"nobodys" in said

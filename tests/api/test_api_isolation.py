"""What one account can learn from what others do, what a key can make the server hold, and what strangers are told."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from api_world import COMMAND, EVERYTHING, SEALER, Api, Served, World, wait_for

from patience import PATIENCE_S
from trainmaster.server.coordinator.webhook_subscriptions import Subscriptions
from trainmaster.server.core.errors import StoreUnavailableError
from trainmaster.server.core.resources import Gpu, Node, Share
from trainmaster.server.http import auth
from trainmaster.server.http.routes.events import AT_ONCE_OF_AN_ACCOUNT
from trainmaster.server.settings.encryption import Sealer
from trainmaster.server.store import nodes, schema


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A cluster of one's own: what waits in it is known."""
    with World.open(tmp_path) as world:
        yield world


@pytest.fixture
def served(world: World) -> Iterator[Served]:
    with Served.serve(world.context()) as served:
        yield served


@pytest.fixture
def stranger(api: Api) -> Iterator[Api]:
    """A client of another account."""
    key = api.world.key("stranger")
    with httpx.Client(base_url=api.http.base_url, headers={"X-API-Key": key}, timeout=PATIENCE_S, verify=False) as http:
        yield Api(http=http, world=api.world, account_id="stranger", key=key)


def submit(api: Api, gpus: int, handle: str | None = None, **scheduling: Any) -> str:
    job_id = api.submit(resource_config={"gpu_count": gpus}, scheduling_config=scheduling, handle=handle)
    api.world.queue(job_id)
    return job_id


def test_queue_names_no_job_of_another_account_that_is_preempted(api: Api, stranger: Api, world: World) -> None:
    gpus = tuple(Gpu(index=i, device=str(i), type="H100-80GB", memory_mb=81920) for i in range(2))
    room: dict[str, Any] = {"cpu_cores": 64, "ram_mb": 64_000, "storage_mb": 1_000_000}
    node = Node(node_id="n1", hostname="n1", backend="local", last_seen_at=time.time(), gpus=gpus, **room)
    world.database.write_now(lambda connection: nodes.put(connection, EVERYTHING, [node]))
    victim = submit(api, 2, "hidden-project", preemptible=True, priority=0)
    world.start(victim, Share(node_id="n1", gpus=(0, 1)))
    urgent = submit(stranger, 2, priority=10)
    answer = stranger.http.get("/v1/queue")
    (entry,) = answer.json()["data"]["entries"]
    assert entry["job_id"] == urgent
    assert "room is being made" in entry["reason"]
    assert "hidden-project" not in answer.text
    assert victim not in answer.text


def test_page_token_of_a_queue_tells_nothing_of_others(api: Api, stranger: Api) -> None:
    theirs = [submit(api, 1) for _ in range(4)]
    seen: list[int] = []
    token = None
    while True:
        page = stranger.call("GET", "/v1/queue", params={"page_size": 2, **({"page_token": token} if token else {})})
        seen += [entry["position"] for entry in page["entries"]]
        token = page["next_page_token"]
        if token is None:
            break
        plain = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        assert not any(job_id.encode() in plain or job_id in token for job_id in theirs)
        # Neither another queue's nor another account's.
        api.call("GET", "/v1/queue", 422, params={"page_token": token})
    assert seen == [1, 2, 3, 4]


def test_body_with_secrets_cannot_be_guessed_from_its_fingerprint(api: Api, world: World) -> None:
    body = json.dumps({**COMMAND, "workload": {**COMMAND["workload"], "environment": {"PIN": "4711"}}}).encode()
    made = api.call("POST", "/v1/jobs", 201, content=body, headers={"Idempotency-Key": "k"})
    with world.database.read() as connection:
        stored = connection.execute(sa.select(schema.idempotency.c.fingerprint)).scalar_one()
    assert stored != hashlib.sha256(b"POST\n/v1/jobs\n\n" + body).hexdigest()
    again = api.http.post("/v1/jobs", content=body, headers={"Idempotency-Key": "k"})
    assert again.headers["Idempotent-Replayed"] == "true"
    assert again.json()["data"]["job_id"] == made["job_id"]


def test_fingerprint_is_the_keys_own_and_known_again_after_its_replacement() -> None:
    old, new = bytes(32), bytes([1]) * 32
    (before,) = Sealer(old).fingerprints(b"what was asked")
    now, *earlier = Sealer(new, [old]).fingerprints(b"what was asked")
    assert earlier == [before]
    assert now != before
    assert Sealer(new).fingerprints(b"something else") != (now,)


def test_body_of_too_many_values_is_refused_before_it_is_looked_at(api: Api) -> None:
    flood = {**COMMAND, "workload": {"kind": "command", "argv": [1] * 300_000}}
    error = api.call("POST", "/v1/jobs", 422, json=flood)
    (problem,) = error["details"]
    assert "values" in problem["message"]
    api.submit(workload={"kind": "command", "argv": ["sh", "-c", "," * 100_000]})


def test_error_about_many_unknown_parameters_is_short(api: Api) -> None:
    query = "&".join(f"pagesize{number}=1" for number in range(2000))
    error = api.call("GET", f"/v1/jobs?{query}", 422)
    assert len(error["details"]) <= 101


def test_list_by_more_labels_than_a_job_can_have_is_refused(api: Api) -> None:
    api.call("GET", "/v1/jobs?" + "&".join(f"labels.k{number}=v" for number in range(64)))
    error = api.call("GET", "/v1/jobs?" + "&".join(f"labels.k{number}=v" for number in range(1500)), 422)
    assert error["details"][0]["field"] == "labels."


def test_name_of_an_account_that_left_jobs_behind_is_not_given_to_another(api: Api, world: World) -> None:
    api.call("POST", "/v1/accounts", 201, json={"account_id": "team"})
    first = api.call("POST", "/v1/keys", 201, json={"name": "n", "account_id": "team", "scopes": ["view", "manage"]})
    theirs = {"X-API-Key": first["key"]}
    job_id = api.call("POST", "/v1/jobs", 201, json=COMMAND, headers=theirs)["job_id"]
    api.call("DELETE", f"/v1/jobs/{job_id}", headers=theirs)
    api.call("DELETE", f"/v1/keys/{first['key_id']}")
    api.call("DELETE", "/v1/accounts/team")
    error = api.call("POST", "/v1/accounts", 409, json={"account_id": "team"})
    assert "another name" in error["message"]
    api.call("POST", "/v1/accounts", 201, json={"account_id": "empty"})
    api.call("DELETE", "/v1/accounts/empty")
    api.call("POST", "/v1/accounts", 201, json={"account_id": "empty"})


@contextlib.contextmanager
def silent_receivers() -> Iterator[str]:
    """Where connections are taken and nothing is ever answered."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"


def test_tests_of_webhooks_at_the_same_time_are_few(world: World) -> None:
    patient = Subscriptions(world.database, SEALER, private_addresses=True, timeout_s=PATIENCE_S)
    key = world.key("tests")
    with (
        Served.serve(world.context(subscriptions=patient)) as served,
        silent_receivers() as url,
        contextlib.ExitStack() as stack,
    ):
        made = httpx.post(
            f"{served.url}/v1/webhooks", json={"url": url}, headers={"X-API-Key": key}, timeout=PATIENCE_S, verify=False
        )
        path = f"/v1/webhooks/{made.json()['data']['webhook_id']}/test"
        asked = [stack.enter_context(connect(served)) for _ in range(AT_ONCE_OF_AN_ACCOUNT + 1)]
        for connection in asked:
            connection.sendall(request("POST", path, key))
        answered, _, _ = select.select(asked, [], [], PATIENCE_S)
        assert [connection.recv(12) for connection in answered] == [b"HTTP/1.1 429"]


def test_streams_of_a_key_at_the_same_time_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "AT_ONCE", 100)
    first, second = world.key("many"), world.key("many")
    with (
        Served.serve(world.context(rate_limit_per_s=100_000.0, rate_burst=100_000)) as served,
        httpx.Client(base_url=served.url, timeout=PATIENCE_S, verify=False) as http,
        contextlib.ExitStack() as stack,
    ):
        streams = []
        for _ in range(auth.AT_ONCE):
            stream = stack.enter_context(connect(served))
            stream.sendall(request("GET", "/v1/events", first, "Accept: text/event-stream"))
            assert stream.recv(12) == b"HTTP/1.1 200"
            streams.append(stream)
        refused = http.get("/v1/nodes", headers={"X-API-Key": first})
        assert refused.status_code == 429
        assert refused.json()["error"]["retry_after"] >= 1
        assert http.get("/v1/nodes", headers={"X-API-Key": second}).status_code == 200
        for stream in streams:
            stream.close()
        wait_for(lambda: http.get("/v1/nodes", headers={"X-API-Key": first}).status_code == 200)


@pytest.mark.parametrize("path", ["/readyz", "/v1/jobs", "/v1/blobs/" + "0" * 64])
def test_stranger_is_not_told_what_the_database_says(world: World, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        Served.serve(world.context()) as served,
        httpx.Client(base_url=served.url, timeout=PATIENCE_S, verify=False) as http,
    ):

        def broken() -> Any:
            raise StoreUnavailableError('cannot be reached (connection to "10.1.2.3" as user "canary" failed)')

        monkeypatch.setattr(world.database, "read", broken)
        monkeypatch.setattr(world.database, "probe", broken)
        answer = http.get(path, headers={"X-API-Key": "tm_guess"})
        assert answer.status_code == 503
        assert "canary" not in answer.text


def connect(served: Served) -> socket.socket:
    url = httpx.URL(served.url)
    return socket.create_connection((url.host, int(url.port or 0)), timeout=PATIENCE_S)


def request(method: str, path: str, key: str, *headers: str) -> bytes:
    lines = (f"{method} {path} HTTP/1.1", "Host: here", f"X-API-Key: {key}", "Content-Length: 0", *headers, "", "")
    return "\r\n".join(lines).encode()


def test_job_cannot_go_on_from_a_checkpoint_of_another_account(api: Api, stranger: Api, world: World) -> None:
    theirs = stranger.submit()
    world.start(theirs)
    world.save(theirs, "their-checkpoint", 1)
    training = {"training_type": "SFT", "base_model": {"model_id": "org/model"}}
    document = {
        "name": "n",
        "training_config": {**training, "resume_from_checkpoint": "their-checkpoint"},
        "data_config": {"sources": [{"path": "hf://org/data"}]},
    }
    stranger.call("POST", "/v1/jobs", 201, json=document)
    error = api.call("POST", "/v1/jobs", 422, json=document)
    assert error["details"][0]["message"] == "there is no committed checkpoint 'their-checkpoint'"
    own = api.submit()
    world.start(own)
    world.end(own, "EXITED_NONZERO")
    api.call("POST", f"/v1/jobs/{own}/retry", 404, json={"checkpoint_id": "their-checkpoint"})

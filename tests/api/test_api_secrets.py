"""Secrets over HTTP: sealed on the way in, handed to the attempt's worker alone, forgotten when they should be."""

from __future__ import annotations

import json
import secrets as randomness
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

import httpx
import pytest
import sqlalchemy as sa
from api_world import COMMAND, SERVICE, Api, Served, World

from patience import PATIENCE_S
from trainmaster.server.core.errors import RefusedError
from trainmaster.server.core.job import Job
from trainmaster.server.core.spec.documents import SPEC_VERSION
from trainmaster.server.http.token_exchange import TokenExchange
from trainmaster.server.store import job_inputs, schema
from trainmaster.server.store.scope import Scope

FORWARDED = {"X-ScaiDrive-Token": "drive-token", "X-ScaiAtlas-Token": "atlas-token"}
TOKENS = {"scaidrive_token": "drive-token", "scaiatlas_token": "atlas-token"}


def with_environment(**variables: str) -> dict[str, Any]:
    return {**COMMAND, "workload": {**COMMAND["workload"], "environment": variables}}


def training(*, hub_token: str, **variables: str) -> dict[str, Any]:
    """A training, which has a token for the Hub beside its environment."""
    framework = {"type": "CUSTOM", "custom_script_path": "/srv/train.py"}
    config = {"training_type": "LORA", "base_model": {"model_id": "m"}, "framework": framework}
    return {
        "name": "tune",
        "training_config": {**config, "environment": variables},
        "data_config": {"sources": [{"path": "file:///data"}]},
        "resource_config": {"gpu_count": 0},
        "output_config": {"hub_token": hub_token},
    }


def submit(api: Api, document: dict[str, Any], headers: dict[str, str] | None = None) -> str:
    return str(api.call("POST", "/v1/jobs", 201, json=document, headers=headers)["job_id"])


def delivered(api: Api, job: Job, expect: int = 200, token: str | None = None) -> Any:
    """What the worker of the current attempt is given."""
    path = f"/v1/worker/attempts/{job.job_id}.{job.attempt_count}/secrets"
    return api.call("GET", path, expect, headers={"Authorization": f"Bearer {token or job.live.token}"})


def kept(world: World, job_id: str) -> set[str]:
    """The names of the secrets that are stored."""
    with world.database.read() as connection:
        return {secret.name for secret in job_inputs.secrets_of_job(connection, Scope.everything(), job_id)}


def place(world: World, job_id: str) -> Job:
    world.queue(job_id)
    return world.place(job_id)


def test_secrets_are_given_to_the_worker_and_shown_to_nobody(api: Api, world: World) -> None:
    job_id = submit(api, training(hub_token="hf_canary", PASSWORD="hunter2", EMPTY=""), FORWARDED)
    shown = api.show(job_id)
    assert shown["training_config"]["environment"] == {"PASSWORD": "***", "EMPTY": "***"}
    assert shown["output_config"]["hub_token"] == "***"
    job = place(world, job_id)
    assert delivered(api, job) == {
        "environment": {"PASSWORD": "hunter2", "EMPTY": ""},
        "tokens": {"hub_token": "hf_canary", **TOKENS},
    }
    request = world.directory(job).request()
    assert request.launch.environment == {}
    assert request.launch.secrets == {"PASSWORD": "secret:env.PASSWORD", "EMPTY": "secret:env.EMPTY"}
    stored = json.dumps([job.spec, request.to_json()], default=dict)
    assert not any(value in stored for value in ("hunter2", "hf_canary", *TOKENS.values()))


def test_secrets_may_be_fetched_while_the_attempt_lives_and_by_its_worker_alone(api: Api, world: World) -> None:
    job = place(world, submit(api, with_environment(PASSWORD="hunter2")))
    other = place(world, submit(api, with_environment(PASSWORD="another")))
    assert delivered(api, job) == delivered(api, job)
    for token in (job.live.rank_token, other.live.token, api.key):
        assert delivered(api, job, 401, token)["code"] == "AUTH_TOKEN_INVALID"
    world.end(job.job_id)
    assert delivered(api, job, 410)["code"] == "ATTEMPT_ENDED"


def test_secrets_are_not_to_be_kept_by_anybody_on_the_way(api: Api, world: World) -> None:
    job = place(world, submit(api, with_environment(PASSWORD="hunter2")))
    path = f"/v1/worker/attempts/{job.job_id}.1/secrets"
    answer = api.http.get(path, headers={"Authorization": f"Bearer {job.live.token}"})
    assert answer.headers["Cache-Control"] == "no-store"


def test_retry_gives_the_child_copies_that_open_without_the_parent(api: Api, world: World) -> None:
    parent = submit(api, training(hub_token="t", PASSWORD="hunter2"), FORWARDED)
    place(world, parent)
    world.end(parent, "EXITED_NONZERO")
    assert kept(world, parent) == {"env.PASSWORD", "hub_token"}
    child = api.call("POST", f"/v1/jobs/{parent}/retry", 201, headers={"X-ScaiDrive-Token": "newer"})["job_id"]
    api.call("DELETE", f"/v1/jobs/{parent}")
    assert kept(world, parent) == set()
    assert delivered(api, place(world, child)) == {
        "environment": {"PASSWORD": "hunter2"},
        "tokens": {"hub_token": "t", "scaidrive_token": "newer"},
    }


def test_resume_replaces_the_tokens_that_it_brings(api: Api, world: World) -> None:
    job_id = submit(api, {**with_environment(A="b"), "handle": f"h-{randomness.token_hex(4)}"}, FORWARDED)
    world.start(job_id)
    api.call("POST", f"/v1/jobs/{job_id}/pause", json={"save_checkpoint": False})
    world.end(job_id, "PAUSED")
    assert kept(world, job_id) == {"env.A", *TOKENS}
    handle = api.show(job_id)["handle"]
    api.call("POST", f"/v1/jobs/{handle}/resume", headers={"X-ScaiAtlas-Token": "newer"})
    assert delivered(api, place(world, job_id))["tokens"] == {**TOKENS, "scaiatlas_token": "newer"}


def test_tokens_are_forgotten_with_the_end(api: Api, world: World) -> None:
    ended, cancelled = (submit(api, with_environment(A="b"), FORWARDED) for _ in range(2))
    world.start(ended)
    assert kept(world, ended) == {"env.A", *TOKENS}
    world.end(ended)
    api.call("POST", f"/v1/jobs/{cancelled}/cancel")
    assert kept(world, ended) == kept(world, cancelled) == {"env.A"}


def test_tokens_of_a_job_that_is_tried_again_stay(api: Api, world: World) -> None:
    job_id = submit(api, {**COMMAND, "scheduling_config": {"max_retries": 1}}, FORWARDED)
    world.start(job_id)
    assert world.end(job_id, "KILLED_BY_SIGNAL").status == "QUEUED"
    assert kept(world, job_id) == set(TOKENS)


def test_service_that_ended_takes_new_tokens_when_it_is_resumed(api: Api, world: World) -> None:
    job_id = submit(api, SERVICE, FORWARDED)
    world.start(job_id)
    world.end(job_id, "KILLED_BY_SIGNAL")
    assert kept(world, job_id) == set()
    api.call("POST", f"/v1/jobs/{job_id}/resume", headers=FORWARDED)
    assert kept(world, job_id) == set(TOKENS)


def test_deletion_forgets_everything_once_the_job_has_stopped(api: Api, world: World) -> None:
    job_id = submit(api, with_environment(A="b"), FORWARDED)
    world.start(job_id)
    api.call("DELETE", f"/v1/jobs/{job_id}")
    assert kept(world, job_id) == {"env.A", *TOKENS}
    world.end(job_id, "DELETED")
    assert kept(world, job_id) == set()


def test_job_that_is_submitted_twice_has_its_secrets_once(api: Api, world: World) -> None:
    headers = {"Idempotency-Key": randomness.token_hex(8)}
    first = submit(api, with_environment(A="b"), {**headers, **FORWARDED})
    again = submit(api, with_environment(A="b"), {**headers, "X-ScaiDrive-Token": "renewed"})
    assert first == again
    assert delivered(api, place(world, first))["tokens"] == TOKENS


def test_job_of_spec_version_1_keeps_its_values_and_so_does_its_child(api: Api, world: World) -> None:
    job_id = submit(api, with_environment(A="replaced"))

    def as_version_1_left_it(connection: sa.Connection) -> None:
        spec = json.loads(json.dumps(world.job(job_id).spec, default=dict))
        spec["workload"]["environment"] = {"A": "in the clear"}
        del spec["output_config"]["hub_token"]
        its = schema.jobs.c.job_id == job_id
        connection.execute(sa.update(schema.jobs).where(its).values(spec=json.dumps(spec), spec_version=1))
        connection.execute(sa.delete(schema.secrets).where(schema.secrets.c.job_id == job_id))

    world.database.write_now(as_version_1_left_it)
    job = place(world, job_id)
    assert delivered(api, job)["environment"] == {"A": "in the clear"}
    assert "in the clear" not in json.dumps(world.directory(job).request().to_json())
    assert api.show(job_id)["workload"]["environment"] == {"A": "***"}
    world.end(job_id, "EXITED_NONZERO")
    child = place(world, api.call("POST", f"/v1/jobs/{job_id}/retry", 201)["job_id"])
    assert child.spec_version == SPEC_VERSION
    assert "in the clear" not in json.dumps(child.spec, default=dict)
    assert delivered(api, child)["environment"] == {"A": "in the clear"}


def test_secret_in_another_job_s_row_does_not_open(api: Api, world: World) -> None:
    victim, thief = (place(world, submit(api, with_environment(A=value))) for value in ("precious", "worthless"))

    def steal(connection: sa.Connection) -> None:
        sealed = sa.select(schema.secrets.c.sealed).where(schema.secrets.c.job_id == victim.job_id)
        loot = connection.execute(sealed).scalar_one()
        connection.execute(sa.update(schema.secrets).where(schema.secrets.c.job_id == thief.job_id).values(sealed=loot))

    world.database.write_now(steal)
    error = delivered(api, thief, 503)
    assert error["code"] == "SECRET_KEY"
    assert "precious" not in str(error)


@pytest.mark.parametrize("value", ["two words", "tab\tbed", "x" * (16 * 1024 + 1)])
def test_malformed_token_is_refused_by_its_header_s_name(api: Api, value: str) -> None:
    error = api.call("POST", "/v1/jobs", 422, json=COMMAND, headers={"X-ScaiDrive-Token": value})
    assert error["details"][0]["field"] == "X-ScaiDrive-Token"
    assert value not in str(error)


@pytest.mark.parametrize(
    "document",
    [
        with_environment(A="canary-value\0"),
        {**COMMAND, "workload": {**COMMAND["workload"], "environment": ["A=canary-value"]}},
        {**COMMAND, "workload": {**COMMAND["workload"], "environment": {"A": ["canary-value"]}}},
        {**COMMAND, "workload": {**COMMAND["workload"], "enviroment": {"A": "canary-value"}}},
        {**COMMAND, "output_config": {"hub_token": ["canary-value"]}},
        {**COMMAND, "output_config": {"hub_token": "canary-value" * 1000}},
        {**COMMAND, "output_config": {"hub_tokn": "canary-value"}},
        {**COMMAND, "hub_token": "canary-value"},
        "canary-value",
    ],
)
def test_error_does_not_repeat_a_secret(api: Api, document: Any) -> None:
    assert "canary-value" not in str(api.call("POST", "/v1/jobs", 422, json=document))


Answer = Callable[[dict[str, str]], tuple[int, object]]


class Exchange:
    """An endpoint for token exchange, and what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, str]] = []
        self.answer: Answer = lambda form: (200, {"access_token": f"{form['audience']} for {form['subject_token']}"})
        exchange = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                form = {name: values[0] for name, values in parse_qs(self.rfile.read(length).decode()).items()}
                exchange.asked.append(form)
                status, document = exchange.answer(form)
                body = document if isinstance(document, bytes) else json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                if 300 <= status < 400:
                    self.send_header("Location", exchange.url)
                self.end_headers()
                with suppress(BrokenPipeError):  # the client gave up
                    self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/token"

    @contextmanager
    def serving(self) -> Iterator[Exchange]:
        thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            self.server.shutdown()
            thread.join()
            self.server.server_close()


@pytest.fixture
def exchange() -> Iterator[Exchange]:
    with Exchange().serving() as exchange:
        yield exchange


@pytest.fixture
def exchanging(world: World, exchange: Exchange) -> Iterator[Api]:
    """A client of a server that exchanges credentials."""
    account_id = f"account-{randomness.token_hex(4)}"
    key = world.key(account_id)
    with (
        Served.serve(world.context(token_exchange=TokenExchange(exchange.url, timeout_s=PATIENCE_S))) as served,
        httpx.Client(
            base_url=served.url, headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE_S, verify=False
        ) as http,
    ):
        yield Api(http=http, world=world, account_id=account_id, key=key)


def test_exchange_gives_the_tokens_that_a_request_lacks(exchanging: Api, exchange: Exchange, world: World) -> None:
    job = place(world, submit(exchanging, COMMAND, {"X-ScaiDrive-Token": "mine"}))
    tokens = {"scaidrive_token": "mine", "scaiatlas_token": f"scaiatlas for {exchanging.key}"}
    assert delivered(exchanging, job)["tokens"] == tokens
    assert exchange.asked == [
        {
            "grant_type": "urn:ietf:params:oauth:grant-type:token-exchange",
            "subject_token": exchanging.key,
            "subject_token_type": "urn:ietf:params:oauth:token-type:access_token",
            "requested_token_type": "urn:ietf:params:oauth:token-type:access_token",
            "audience": "scaiatlas",
        }
    ]


def test_exchange_serves_resume_and_retry_too(exchanging: Api, exchange: Exchange, world: World) -> None:
    job_id = submit(exchanging, COMMAND, FORWARDED)
    assert exchange.asked == []
    world.start(job_id)
    exchanging.call("POST", f"/v1/jobs/{job_id}/pause", json={"save_checkpoint": False})
    world.end(job_id, "PAUSED")
    exchanging.call("POST", f"/v1/jobs/{job_id}/resume")
    world.start(job_id)
    world.end(job_id, "EXITED_NONZERO")
    child = exchanging.call("POST", f"/v1/jobs/{job_id}/retry", 201)["job_id"]
    assert sorted(form["audience"] for form in exchange.asked) == ["scaiatlas", "scaiatlas", "scaidrive", "scaidrive"]
    assert kept(world, child) == set(TOKENS)


def test_exchange_that_refuses_says_why_and_no_job_is_made(exchanging: Api, exchange: Exchange) -> None:
    exchange.answer = lambda form: (
        400,
        {"error": "invalid_grant", "error_description": f"no  such\nuser {form['subject_token']}"},
    )
    error = exchanging.call("POST", "/v1/jobs", 403, json=COMMAND)
    assert error["code"] == "CREDENTIALS_REFUSED"
    assert "no such user ***" in error["message"]
    assert exchanging.key not in str(error)
    assert exchanging.call("GET", "/v1/jobs")["jobs"] == []


@pytest.mark.parametrize(
    "answer",
    [
        (500, {}),
        (429, {}),
        (302, {}),
        (200, b"not JSON"),
        (200, b'{"access_token": "t"}' + b" " * (1 << 20)),
        (200, {"access_token": "two\nlines"}),
        (200, b"[" * 100_000),
        (200, []),
        (200, {}),
        (200, {"access_token": ""}),
        (200, {"access_token": 7}),
    ],
)
def test_exchange_that_answers_nonsense_is_unavailable(
    exchanging: Api, exchange: Exchange, answer: tuple[int, object]
) -> None:
    exchange.answer = lambda form: answer
    error = exchanging.call("POST", "/v1/jobs", 503, json=COMMAND)
    assert (error["code"], error["retry_after"]) == ("TOKEN_EXCHANGE_UNAVAILABLE", 1)
    assert exchanging.call("GET", "/v1/jobs")["jobs"] == []


def test_exchange_that_is_away_or_slow_is_unavailable(world: World, exchange: Exchange) -> None:
    gate = threading.Event()

    def slow(form: dict[str, str]) -> tuple[int, object]:
        gate.wait(PATIENCE_S)
        return 200, {}

    exchange.answer = slow
    key = world.key(f"account-{randomness.token_hex(4)}")
    with Exchange().serving() as gone:
        pass
    for url in (exchange.url, gone.url):
        with (
            Served.serve(world.context(token_exchange=TokenExchange(url, timeout_s=0.2))) as served,
            httpx.Client(
                base_url=served.url, headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE_S, verify=False
            ) as http,
        ):
            answer = http.post("/v1/jobs", json=COMMAND)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "TOKEN_EXCHANGE_UNAVAILABLE"
            assert answer.headers["Retry-After"] == "1"
    gate.set()


@pytest.mark.parametrize(
    "url", ["http://issuer.example/token", "ftp://issuer.example", "issuer.example", "https://me:pw@issuer.example"]
)
def test_exchange_address_to_which_no_credential_may_go_is_refused(url: str) -> None:
    with pytest.raises(RefusedError, match="token_exchange") as refused:
        TokenExchange(url)
    assert "pw" not in str(refused.value)


def test_exchange_address_may_be_https_or_loopback() -> None:
    for url in ("https://issuer.example/token", "http://127.0.0.1:1/", "http://localhost/", "http://[::1]/"):
        TokenExchange(url)

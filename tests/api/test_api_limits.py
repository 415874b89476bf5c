"""Rate limits: for each key, and for wrong credentials from each address."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx
import pytest
from api_world import COMMAND, Served, World

from patience import PATIENCE_S
from trainmaster.server.http.auth import FAILURES_AT_ONCE, Buckets

SLOW = 0.001
"""Requests in a second: so few that none comes back while a test runs."""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_bucket_gives_what_it_holds_and_then_what_flows_in() -> None:
    clock = Clock()
    buckets = Buckets(2.0, 3, clock)
    assert [buckets.take("a") for _ in range(3)] == [0.0, 0.0, 0.0]
    assert buckets.take("a") == pytest.approx(0.5)
    assert buckets.wait_s("a") == pytest.approx(0.5)
    clock.now = 0.5
    assert buckets.take("a") == 0.0
    assert buckets.take("a") > 0
    clock.now = 1000.0
    assert [buckets.take("a") for _ in range(4)] == [0.0, 0.0, 0.0, pytest.approx(0.5)]


def test_buckets_are_apart_and_bounded() -> None:
    clock = Clock()
    buckets = Buckets(1.0, 1, clock)
    assert buckets.take("a") == 0.0
    assert buckets.take("b") == 0.0
    for number in range(30_000):
        buckets.take(str(number))
    assert len(buckets._buckets) <= 10_000


@contextlib.contextmanager
def limited(world: World, burst: int = 3, **changes: object) -> Iterator[httpx.Client]:
    context = world.context(rate_limit_per_s=SLOW, rate_burst=burst, **changes)
    with Served.serve(context) as served, httpx.Client(base_url=served.url, timeout=PATIENCE_S, verify=False) as http:
        yield http


def test_key_that_asks_too_often_is_told_when_to_come_back(world: World) -> None:
    first, second = ({"X-API-Key": world.key("limits")} for _ in range(2))
    with limited(world) as http:
        assert [http.get("/v1/nodes", headers=first).status_code for _ in range(3)] == [200] * 3
        answer = http.get("/v1/nodes", headers=first)
        assert answer.status_code == 429
        error = answer.json()["error"]
        assert error["code"] == "RATE_LIMITED"
        assert error["retry_after"] >= 1
        assert answer.headers["Retry-After"] == str(error["retry_after"])
        assert http.post("/v1/jobs", json=COMMAND, headers=first).status_code == 429
        assert http.get("/v1/nodes", headers=second).status_code == 200
        assert [http.get("/healthz").status_code for _ in range(9)] == [200] * 9


def test_worker_is_never_held_up(world: World) -> None:
    key = {"X-API-Key": world.key("limits")}
    with limited(world) as http:
        job_id = http.post("/v1/jobs", json=COMMAND, headers=key).json()["data"]["job_id"]
        token = {"Authorization": f"Bearer {world.start(job_id).live.token}"}
        path = f"/v1/worker/attempts/{job_id}.1/control"
        assert [http.get(path, headers=token).status_code for _ in range(60)] == [200] * 60


def test_address_that_guesses_has_to_wait_and_whoever_was_known_has_not(world: World) -> None:
    known, new = ({"X-API-Key": world.key("limits")} for _ in range(2))
    with limited(world, burst=1000) as http:
        assert http.get("/v1/nodes", headers=known).status_code == 200
        guesses = [http.get("/v1/nodes", headers={"X-API-Key": f"guess-{n}"}) for n in range(FAILURES_AT_ONCE + 5)]
        assert [answer.status_code for answer in guesses[:FAILURES_AT_ONCE]] == [401] * FAILURES_AT_ONCE
        assert guesses[-1].status_code == 429
        assert guesses[-1].json()["error"]["retry_after"] >= 1
        assert http.get("/v1/nodes", headers=new).status_code == 429
        assert http.get("/v1/nodes", headers=known).status_code == 200


def test_one_wrong_key_again_and_again_is_limited_too(world: World) -> None:
    with limited(world) as http:
        answers = [http.get("/v1/nodes", headers={"X-API-Key": "wrong"}) for _ in range(FAILURES_AT_ONCE + 5)]
        assert {answer.status_code for answer in answers[:FAILURES_AT_ONCE]} == {401}
        assert answers[-1].status_code == 429


def test_proxy_tells_addresses_apart_only_where_there_is_one(world: World) -> None:
    def guess(http: httpx.Client, address: str) -> int:
        headers = {"X-API-Key": "guess", "X-Forwarded-For": f"10.0.0.1, {address}"}
        return http.get("/v1/nodes", headers=headers).status_code

    with limited(world, behind_proxy=True) as http:
        for _ in range(FAILURES_AT_ONCE):
            guess(http, "192.0.2.1")
        assert guess(http, "192.0.2.1") == 429
        assert guess(http, "192.0.2.2") == 401
    with limited(world) as http:
        for number in range(FAILURES_AT_ONCE):
            guess(http, f"192.0.2.{number}")
        assert guess(http, "192.0.2.200") == 429


def test_without_a_limit_nothing_is_limited(world: World, served: Served) -> None:
    key = {"X-API-Key": world.key("limits")}
    with httpx.Client(base_url=served.url, timeout=PATIENCE_S, verify=False) as http:
        assert {http.get("/v1/nodes", headers=key).status_code for _ in range(100)} == {200}
        assert {http.get("/v1/nodes", headers={"X-API-Key": "x"}).status_code for _ in range(100)} == {401}

"""What holds for every route: credentials, envelopes, request ids, refusals."""

from __future__ import annotations

import io
import json
import logging
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_world import COMMAND, Api, Served, World, wait_for
from fastapi import FastAPI
from sqlalchemy import Connection

from trainmaster.server.app import create_app, routers_of
from trainmaster.server.core.accounts import KeyScope, key_id_of
from trainmaster.server.settings.settings import LogFormat
from trainmaster.server.settings.telemetry import JsonLines
from trainmaster.server.store import accounts
from trainmaster.server.store.scope import Scope

ROUTES = [
    ("GET", "/v1/jobs"),
    ("POST", "/v1/jobs"),
    ("GET", "/v1/jobs/x/logs"),
    ("GET", "/v1/events"),
    ("GET", "/v1/nodes"),
    ("PUT", f"/v1/blobs/{'0' * 64}"),
    ("GET", f"/v1/blobs/{'0' * 64}"),
    ("GET", "/v1/worker/attempts/x.1/request"),
    ("GET", "/v1/jobs/x/proxy/"),
    ("GET", "/openapi.json"),
    ("GET", "/nothing/here"),
    ("GET", "/v1/modules/scaimind/jobs"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_request_without_credentials_is_refused(served: Served, method: str, path: str) -> None:
    response = httpx.request(method, served.url + path, verify=False)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "AUTH_TOKEN_MISSING"


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_request_with_an_unknown_key_is_refused(served: Served, method: str, path: str) -> None:
    response = httpx.request(method, served.url + path, headers={"X-API-Key": "eyJ-nothing"}, verify=False)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "AUTH_TOKEN_INVALID"
    assert response.headers["WWW-Authenticate"] == "Bearer"


def test_key_is_taken_from_either_header(api: Api, served: Served) -> None:
    for headers in (
        {"X-API-Key": api.key},
        {"Authorization": f"Bearer {api.key}"},
        {"authorization": f"bearer {api.key}"},
    ):
        assert httpx.get(f"{served.url}/v1/jobs", headers=headers, verify=False).status_code == 200


def test_revoked_key_is_refused(world: World, served: Served) -> None:
    key = world.key("revoked")
    world.database.write_now(_revoke)
    assert httpx.get(f"{served.url}/v1/jobs", headers={"X-API-Key": key}, verify=False).status_code == 401


def _revoke(connection: Connection) -> None:
    (key,) = accounts.all_keys(connection, Scope("revoked"))
    accounts.revoke_key(connection, Scope("revoked"), key.key_id, 1.0)


def test_key_without_manage_may_read_and_not_write(api: Api, world: World) -> None:
    job_id = api.submit()
    viewer = {"Authorization": f"Bearer {world.key(api.account_id, KeyScope.VIEW)}"}
    assert api.call("GET", f"/v1/jobs/{job_id}", headers=viewer)["job_id"] == job_id
    for method, path in (
        ("POST", "/v1/jobs"),
        ("PATCH", f"/v1/jobs/{job_id}"),
        ("DELETE", f"/v1/jobs/{job_id}"),
        ("POST", f"/v1/jobs/{job_id}/cancel"),
        ("PUT", f"/v1/blobs/{'0' * 64}"),
    ):
        error = api.call(method, path, 403, headers=viewer, json=COMMAND)
        assert error["code"] == "AUTH_INSUFFICIENT_SCOPE"
        assert "manage" in error["message"]


def test_key_without_view_may_not_read(api: Api, world: World) -> None:
    manager = {"Authorization": f"Bearer {world.key(api.account_id, KeyScope.MANAGE)}"}
    assert "view" in api.call("GET", "/v1/jobs", 403, headers=manager)["message"]


def test_another_accounts_job_is_not_found(api: Api, world: World) -> None:
    job_id = api.submit()
    other = {"Authorization": f"Bearer {world.key('other')}"}
    for method, path in (
        ("GET", f"/v1/jobs/{job_id}"),
        ("GET", f"/v1/jobs/{job_id}/logs"),
        ("GET", f"/v1/jobs/{job_id}/metrics"),
        ("GET", f"/v1/jobs/{job_id}/metrics/stream"),
        ("GET", f"/v1/jobs/{job_id}/events"),
        ("POST", f"/v1/jobs/{job_id}/cancel"),
        ("DELETE", f"/v1/jobs/{job_id}"),
        ("GET", f"/v1/jobs/{job_id}/proxy/"),
    ):
        assert api.call(method, path, 404, headers=other)["code"] == "JOB_NOT_FOUND"
    assert api.call("GET", "/v1/jobs", headers=other)["jobs"] == []


def test_health_needs_no_key(served: Served) -> None:
    for path, word in (("/healthz", "alive"), ("/readyz", "ready")):
        response = httpx.get(served.url + path, verify=False)
        assert response.status_code == 200
        assert response.json()["data"][word] is True


def test_readiness_without_a_database_is_refused(tmp_path: Path) -> None:
    with World.open(tmp_path) as world, Served.serve(world.context()) as served:
        world.database.close()
        (tmp_path / "store.db").write_bytes(b"no database" * 1000)
        response = httpx.get(f"{served.url}/readyz", verify=False)
        assert httpx.get(f"{served.url}/healthz", verify=False).status_code == 200
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "UNAVAILABLE"


def test_readiness_says_what_keeps_the_server_from_its_work(world: World) -> None:
    problems: list[str | None] = ["the coordinator has ended", None]
    with Served.serve(world.context(healthy=lambda: problems[0])) as served:
        response = httpx.get(f"{served.url}/readyz", verify=False)
        assert response.status_code == 503
        assert response.json()["error"] == {"code": "UNHEALTHY", "message": "the coordinator has ended"}
        assert httpx.get(f"{served.url}/healthz", verify=False).status_code == 200
        del problems[0]
        assert httpx.get(f"{served.url}/readyz", verify=False).status_code == 200


def test_unknown_route_has_the_envelope(api: Api) -> None:
    assert api.call("GET", "/v1/nothing", 404)["code"] == "ROUTE_NOT_FOUND"
    assert api.call("GET", "/v1/jobs/", 404)["code"] == "ROUTE_NOT_FOUND"


def test_wrong_method_has_the_envelope_and_says_what_is_allowed(api: Api) -> None:
    response = api.http.put("/v1/nodes")
    assert response.status_code == 405
    assert response.json()["error"]["code"] == "METHOD_NOT_ALLOWED"
    assert "GET" in response.headers["Allow"]


def test_sane_request_id_is_kept(api: Api) -> None:
    assert api.http.get("/v1/nodes", headers={"X-Request-Id": "mine-1"}).headers["X-Request-Id"] == "mine-1"
    odd = api.http.get("/v1/nodes", headers={"X-Request-Id": "no\tway" * 100}).headers["X-Request-Id"]
    assert odd.startswith("req-")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1", b"\xff\xfe", b"NaN", b'{"name": Infinity}', b"[" * 100_000, b"1" * 5000, b"null", b"[]"]
)
def test_body_that_is_no_job_is_refused(api: Api, body: bytes) -> None:
    assert api.call("POST", "/v1/jobs", 422, content=body)["code"] == "VALIDATION_ERROR"


def test_body_over_the_limit_is_refused(api: Api) -> None:
    body = b'{"name": "' + b"x" * (9 << 20) + b'"}'
    assert api.call("POST", "/v1/jobs", 413, content=body)["code"] == "PAYLOAD_TOO_LARGE"


def test_body_of_unknown_length_over_the_limit_is_refused(api: Api) -> None:
    def pieces() -> object:
        for _ in range(9):
            yield b" " * (1 << 20)

    assert api.call("POST", "/v1/jobs", 413, content=pieces())["code"] == "PAYLOAD_TOO_LARGE"


def test_client_that_leaves_in_the_middle_of_its_body_does_no_harm(
    api: Api, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/jobs HTTP/1.1\r\nHost: {host}\r\nX-API-Key: {api.key}\r\nContent-Length: 100\r\n\r\n{{"
        connection.sendall(head.encode())
    assert api.call("GET", "/v1/jobs")["jobs"] == []
    assert "failed" not in caplog.text


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/jobs?page_siz=3", "page_siz"),
        ("/v1/jobs?page_size=0", "page_size"),
        ("/v1/jobs?page_size=1e9", "page_size"),
        ("/v1/jobs?page_size=" + "9" * 4000, "page_size"),
        ("/v1/jobs?page_token=xyz", "page_token"),
        ("/v1/jobs?order_by=colour", "order_by"),
        ("/v1/jobs?status=RUNNING", "status"),
        ("/v1/jobs?queue=%00", "queue"),
        ("/v1/jobs?labels.=1", "labels."),
        ("/v1/events?after=-1", "after"),
        ("/v1/events?after=" + "9" * 30, "after"),
        ("/v1/nodes?x=1", "x"),
    ],
)
def test_bad_query_parameter_is_named(api: Api, path: str, field: str) -> None:
    error = api.call("GET", path, 422)
    assert error["code"] == "VALIDATION_ERROR"
    assert [detail["field"] for detail in error["details"]] == [field]


def test_unknown_query_parameter_names_the_nearest(api: Api) -> None:
    (detail,) = api.call("GET", "/v1/jobs?page_siz=3", 422)["details"]
    assert "page_size" in detail["message"]


def test_roles_decide_which_routes_there_are(world: World) -> None:
    key = {"X-API-Key": world.key("roles")}
    for roles, jobs_status, proxy_code in (
        (frozenset({"api"}), 200, "ROUTE_NOT_FOUND"),
        (frozenset({"gateway"}), 404, "JOB_NOT_FOUND"),
    ):
        with Served.serve(world.context(roles=roles)) as served:
            assert httpx.get(f"{served.url}/v1/jobs", headers=key, verify=False).status_code == jobs_status
            answer = httpx.get(f"{served.url}/v1/jobs/nobody/proxy/", headers=key, verify=False).json()
            assert answer["error"]["code"] == proxy_code
            assert httpx.get(f"{served.url}/healthz", verify=False).status_code == 200


def test_web_socket_is_refused(served: Served) -> None:
    headers = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    assert httpx.get(f"{served.url}/v1/jobs", headers=headers, verify=False).status_code in {401, 403, 426}


def test_mistake_of_the_server_is_hidden_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with World.open(tmp_path) as world:
        key = {"X-API-Key": world.key("a")}

        monkeypatch.setattr("trainmaster.server.http.routes.cluster.nodes.all", _explode)
        with Served.serve(world.context()) as served:
            response = httpx.get(f"{served.url}/v1/nodes", headers=key, verify=False)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "INTERNAL"
    assert "secret" not in response.text
    assert response.headers["X-Request-Id"] in caplog.text


def test_every_line_of_a_request_says_whose_it_is(
    api: Api, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(JsonLines())
    ours = logging.getLogger("trainmaster.server.http")
    ours.addHandler(handler)
    caplog.set_level(logging.INFO, logger=ours.name)
    monkeypatch.setattr("trainmaster.server.http.routes.cluster.nodes.all", _explode)
    try:
        with Served.serve(world.context(log_format=LogFormat.JSON)) as served:
            headers = {"X-API-Key": api.key, "Cookie": "of-somebody"}
            answer = httpx.get(f"{served.url}/v1/nodes", headers=headers, verify=False)
            wait_for(lambda: "/v1/nodes 500" in lines.getvalue())
    finally:
        ours.removeHandler(handler)
    failed, access = (json.loads(line) for line in lines.getvalue().splitlines())
    whose = {"request_id": answer.headers["X-Request-Id"], "key": key_id_of(api.key), "account": api.account_id}
    for line in (failed, access):
        assert whose.items() <= line.items()
    assert "ZeroDivisionError" in failed["exception"]
    assert access["logger"] == "trainmaster.server.http.access"
    assert (access["method"], access["path"], access["status"]) == ("GET", "/v1/nodes", 500)
    assert access["ms"] > 0
    assert api.key not in lines.getvalue()
    assert "of-somebody" not in lines.getvalue()


def _explode(*arguments: object, **options: object) -> object:
    raise ZeroDivisionError("a secret")


def test_access_log_is_quiet_unless_it_is_asked_for(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="trainmaster.server.http.access"):
        api.call("GET", "/v1/nodes")
    assert not [record for record in caplog.records if record.name == "trainmaster.server.http.access"]


def test_routes_are_made_once_and_not_by_the_first_requests(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """FastAPI would make those of included routers once more, in the loop, which takes half a second."""
    made: list[FastAPI] = []

    class Watched(FastAPI):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            made.append(self)

    monkeypatch.setattr("trainmaster.server.app.FastAPI", Watched)
    context = world.context()
    create_app(context).close()
    (app,) = made
    declared = [route for router in routers_of(context.settings.roles) for route in router.routes]
    assert [route for route in app.routes if getattr(route, "path", None) != "/openapi.json"] == declared

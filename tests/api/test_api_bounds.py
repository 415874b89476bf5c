"""What one request may cost the server: its body in bytes and time, and what it takes to read it."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from api_world import COMMAND, Api, Served, World

from patience import PATIENCE_S
from trainmaster.server.core.errors import SpecError
from trainmaster.server.http import requests
from trainmaster.server.http.requests import MAX_COMMAS, parse_json

COSTLY = "def train():\n    return f'" + "{x}" * 25_000 + "'\n"
"""Takes this Python some tenths of a second to parse."""


def half_sent(served: Served, api: Api, path: str, method: str = "POST") -> bytes:
    """What is answered to a request of whose body only the beginning comes."""
    address = urlsplit(served.url)
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S) as connection:
        head = f"{method} {path} HTTP/1.1\r\nHost: h\r\nX-API-Key: {api.key}\r\nContent-Length: 1000\r\n\r\n"
        connection.sendall(head.encode() + b"{")
        received = b""
        while piece := connection.recv(65536):
            received += piece
        return received


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/jobs"),
        ("POST", "/v1/jobs/validate"),
        ("PUT", "/v1/blobs/" + "0" * 64),
        ("POST", "/v1/webhooks"),
        ("POST", "/v1/accounts/{account}/rlorTrainerJobs"),
        ("POST", "/api/v1/create_session"),
    ],
)
def test_body_whose_rest_does_not_come_is_answered_408_and_closed(
    monkeypatch: pytest.MonkeyPatch, served: Served, api: Api, method: str, path: str
) -> None:
    monkeypatch.setattr(requests, "PATIENCE_S", 0.05)
    received = half_sent(served, api, path.format(account=api.account_id), method)
    assert received.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in received.lower()


def test_body_that_drips_is_answered_408(monkeypatch: pytest.MonkeyPatch, served: Served, api: Api) -> None:
    monkeypatch.setattr(requests, "PATIENCE_S", 0.5)
    address = urlsplit(served.url)
    with socket.create_connection((address.hostname, address.port), timeout=0.1) as connection:
        head = f"POST /v1/jobs HTTP/1.1\r\nHost: h\r\nX-API-Key: {api.key}\r\nContent-Length: 100000\r\n\r\n"
        connection.sendall(head.encode())
        received = b""
        for _ in range(100):  # ten seconds, with a byte in every tenth of one
            connection.sendall(b" ")
            try:
                received = connection.recv(65536)
                break
            except TimeoutError:
                continue
        assert received.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("length", [str(1 << 40), "9" * 19])
def test_blob_that_says_it_is_too_large_is_refused_before_any_of_it_comes(
    served: Served, api: Api, world: World, length: str
) -> None:
    digest = hashlib.sha256(length.encode()).hexdigest()
    address = urlsplit(served.url)
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S) as connection:
        head = f"PUT /v1/blobs/{digest} HTTP/1.1\r\nHost: h\r\nX-API-Key: {api.key}\r\nContent-Length: {length}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(13) == b"HTTP/1.1 413 "
    assert not world.roots.path("blobs", api.account_id).exists()


def test_server_answers_others_while_a_costly_source_is_checked(api: Api, served: Served) -> None:
    workload = {"kind": "function", "source": COSTLY, "name": "train"}
    body = {"name": "n", "workload": workload, "resource_config": {"gpu_count": 0}}
    statuses: list[int] = []

    def submit() -> None:
        statuses.append(api.http.post("/v1/jobs", json=body).status_code)

    thread = threading.Thread(target=submit)
    answered = 0
    with httpx.Client(base_url=served.url, timeout=PATIENCE_S, verify=False) as other:
        thread.start()
        while thread.is_alive():
            assert other.get("/healthz").status_code == 200
            answered += 1
        thread.join()
    assert answered > 10
    assert statuses == [201]


def test_wrong_source_is_refused_at_submission(api: Api) -> None:
    def refusal(source: str, path: str) -> Any:
        workload = {"kind": "function", "source": source, "name": "train"}
        error = api.call("POST", path, 422, json={"name": "n", "workload": workload})
        (problem,) = error["details"]
        return problem

    for path in ("/v1/jobs", "/v1/jobs/validate"):
        assert refusal("def tain(): ...", path) == {"field": "workload.source", "message": "does not define 'train'"}
        assert refusal("def train(:", path)["message"].startswith("is no Python: line 1: ")


def test_body_with_millions_of_values_is_refused_undecoded(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({**COMMAND, "labels": {"commas": "," * 1000}}).encode()
    assert parse_json(text)
    monkeypatch.setattr(requests.json, "loads", None)
    with pytest.raises(SpecError) as caught:
        parse_json(b"[" + b"[]," * MAX_COMMAS + b"[],[]]")
    assert "commas" in caught.value.problems[0].message

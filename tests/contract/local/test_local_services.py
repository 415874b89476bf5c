"""Services: reached through the gateway, killed, resumed, and parked when nobody uses them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from local_servers import LocalServer, over

SERVES = """
import http.server, os, pathlib, sys, threading

gate, released = pathlib.Path(sys.argv[1]), threading.Event()

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status, body, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/ready":
            self.answer(200 if gate.exists() else 503, b"")
        elif self.path == "/stream":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"5\\r\\nfirst\\r\\n")
            released.wait(60)
            self.wfile.write(b"6\\r\\nsecond\\r\\n0\\r\\n\\r\\n")
        else:
            secret = "key" if "x-api-key" in self.headers or "authorization" in self.headers else "no key"
            self.answer(200, f"{os.getpid()} {self.path} {secret}".encode())

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        released.set()
        self.answer(201, body[::-1], **{"X-Length": str(len(body))})

http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


@pytest.fixture
def gate(scripts: Path) -> Path:
    """The service is ready once this exists."""
    return scripts / "gate"


@pytest.fixture
def serves(scripts: Path, gate: Path) -> dict[str, Any]:
    (scripts / "serves.py").write_text(SERVES)
    return {
        "argv": [str(scripts / "serves.py"), str(gate)],
        "python": True,
        "readiness": {"path": "/ready", "timeout_s": 60.0},
    }


def call(server: LocalServer, job_id: str, path: str = "/", method: str = "GET", **options: Any) -> httpx.Response:
    return server.ask(method, f"/v1/jobs/{job_id}/proxy{path}", **options)


def test_service_is_reached_once_it_is_ready(server: LocalServer, serves: dict[str, Any], gate: Path) -> None:
    job_id = server.submit_workload("service", serves)
    server.rank_pids(job_id)
    early = call(server, job_id)
    assert (early.status_code, early.json()["error"]["code"]) == (503, "SERVICE_NOT_READY")
    assert int(early.headers["Retry-After"]) > 0
    assert server.job(job_id)["status"] == "PREPARING"
    gate.touch()
    job = server.until(job_id, "TRAINING")
    assert job["endpoint"]["path"] == f"/v1/jobs/{job_id}/proxy/"
    answer = call(server, job_id, "/a%2Fb/c?x=1&y=%20")
    assert answer.text == f"{server.rank_pids(job_id)[0]} /a%2Fb/c?x=1&y=%20 no key"
    posted = call(server, job_id, "/anything", "POST", content=b"abc" * 100_000)
    assert (posted.status_code, posted.headers["X-Length"]) == (201, "300000")
    assert posted.content == b"cba" * 100_000


def test_streamed_answer_arrives_piece_by_piece(server: LocalServer, serves: dict[str, Any], gate: Path) -> None:
    gate.touch()
    job_id = server.submit_workload("service", serves)
    server.until(job_id, "TRAINING")
    url = f"{server.url}/v1/jobs/{job_id}/proxy/stream"
    with httpx.stream("GET", url, headers={"X-API-Key": server.key}, timeout=60) as answer:
        pieces = answer.iter_bytes()
        assert next(pieces) == b"first"
        # The service sends the rest only after this, so that the first piece cannot have waited for it.
        assert call(server, job_id, "/", "POST", content=b"go").status_code == 201
        assert b"".join(pieces) == b"second"


def test_killed_service_fails_and_is_resumed_as_another_attempt(
    server: LocalServer, serves: dict[str, Any], gate: Path
) -> None:
    gate.touch()
    job_id = server.submit_workload("service", serves, scheduling_config={"max_retries": 3})
    server.until(job_id, "TRAINING")
    first = server.rank_pids(job_id)[0]
    os.kill(first, signal.SIGKILL)
    job = server.until(job_id, "FAILED")
    assert (job["error_type"], job["endpoint"], job["retries_used"]) == ("KILLED_BY_SIGNAL", None, 0)
    dead = call(server, job_id)
    assert dead.status_code == 503
    assert "resume" in dead.json()["error"]["message"]
    assert server.control(job_id, "resume")["status"] == "QUEUED"
    job = server.until(job_id, "TRAINING")
    assert job["attempt"] == 2
    pid, _, _ = call(server, job_id).text.split(maxsplit=2)
    assert int(pid) == server.rank_pids(job_id, attempt=2)[0] != first


def test_service_that_is_never_ready_fails(server: LocalServer, serves: dict[str, Any]) -> None:
    job_id = server.submit_workload("service", {**serves, "readiness": {"path": "/ready", "timeout_s": 1.0}})
    job = server.until(job_id, "FAILED")
    assert job["error_type"] == "NOT_READY"
    assert "503" in job["error_message"]


def test_unused_service_is_parked_and_resumed(server: LocalServer, serves: dict[str, Any], gate: Path) -> None:
    gate.touch()
    job_id = server.submit_workload("service", {**serves, "inactivity_timeout_s": 1.0})
    job = server.until(job_id, "PAUSED")
    assert (job["status_reason"], job["endpoint"], job["error"]) == ("INACTIVE", None, None)
    assert server.events_of(job_id, "inactive")
    assert call(server, job_id).status_code == 503
    server.control(job_id, "resume")
    assert server.until(job_id, "PAUSED")["attempt"] == 2


@over("files")
def test_used_service_stays(server: LocalServer, serves: dict[str, Any], gate: Path) -> None:
    gate.touch()
    job_id = server.submit_workload("service", {**serves, "inactivity_timeout_s": 5.0})
    server.until(job_id, "TRAINING")
    began = latest = time.monotonic()
    # Longer than the time-out without a long gap: on a busy machine that takes more than one try.
    while latest - began < 7.0:
        answer = call(server, job_id)
        if time.monotonic() - latest > 1.0:
            began = time.monotonic()
        latest = time.monotonic()
        assert answer.status_code == 200
        time.sleep(0.1)
    job = server.job(job_id)
    assert (job["status"], job["attempt"]) == ("TRAINING", 1)
    assert job["last_activity_at"] is not None


def test_command_has_no_gateway(server: LocalServer) -> None:
    job_id = server.submit("sleep", "600")
    server.until(job_id, "TRAINING")
    assert call(server, job_id).status_code == 409

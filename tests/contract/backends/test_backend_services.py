"""Services: reached through the gateway, killed, resumed, and parked when nobody uses them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from backends_under_test import BackendUnderTest, long_on

from job_server import JobServer
from patience import PATIENCE_S
from trainmaster.protocol.launch import Lifetime

SERVES = """
import http.server, os, signal, sys, threading, uuid

started, probes, released = uuid.uuid4().hex, 0, threading.Event()

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
        global probes
        if self.path == "/ready":
            probes += 1
            self.answer(200 if probes >= int(sys.argv[1]) else 503, b"")
        elif self.path == "/stream":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"5\\r\\nfirst\\r\\n")
            released.wait(300)
            self.wfile.write(b"6\\r\\nsecond\\r\\n0\\r\\n\\r\\n")
        else:
            secret = "key" if "x-api-key" in self.headers or "authorization" in self.headers else "no key"
            self.answer(200, f"{started} {self.path} {secret}".encode())

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/die":
            os.kill(os.getpid(), signal.SIGKILL)
        released.set()
        self.answer(201, body[::-1], **{"X-Length": str(len(body))})

place = (os.environ["TRAINMASTER_SERVICE_HOST"], int(os.environ["PORT"]))
http.server.ThreadingHTTPServer(place, Handler).serve_forever()
"""

NEVER = 1_000_000


@pytest.fixture(autouse=True)
def services(backend: BackendUnderTest) -> None:
    """Where they can be run at all."""
    if Lifetime.SERVICE not in backend.capabilities.lifetimes:
        pytest.skip("the backend runs no services")


def serve(server: JobServer, *, ready_at_probe: int = 1, timeout_s: float = PATIENCE_S, **fields: Any) -> str:
    """Submit the service; its id."""
    workload = {
        "argv": ["serves.py", str(ready_at_probe)],
        "python": True,
        "files": [{"path": "serves.py", "sha256": server.upload_files(SERVES.encode())}],
        "readiness": {"path": "/ready", "timeout_s": timeout_s},
    }
    return server.submit_workload("service", {**workload, **fields}, scheduling_config={"max_retries": 3})


def call(server: JobServer, job_id: str, path: str = "/", method: str = "GET", **options: Any) -> httpx.Response:
    return server.ask(method, f"/v1/jobs/{job_id}/proxy{path}", **options)


@long_on("local-http")
def test_service_is_reached_once_it_is_ready_and_answers_piece_by_piece(server: JobServer) -> None:
    job_id = serve(server, ready_at_probe=3)
    early = call(server, job_id)
    assert (early.status_code, early.json()["error"]["code"]) == (503, "SERVICE_NOT_READY")
    assert int(early.headers["Retry-After"]) > 0
    job = server.until(job_id, "TRAINING")
    assert job["endpoint"]["path"] == f"/v1/jobs/{job_id}/proxy/"
    assert call(server, job_id, "/a%2Fb/c?x=1&y=%20").text.split(maxsplit=1)[1] == "/a%2Fb/c?x=1&y=%20 no key"

    url = f"{server.url}/v1/jobs/{job_id}/proxy/stream"
    with httpx.stream("GET", url, headers={"X-API-Key": server.key}, timeout=PATIENCE_S) as answer:
        pieces = answer.iter_bytes()
        assert next(pieces) == b"first"
        # The service sends the rest only after this, so that the first piece cannot have waited for it.
        posted = call(server, job_id, "/anything", "POST", content=b"abc" * 100_000)
        assert (posted.status_code, posted.headers["X-Length"]) == (201, "300000")
        assert posted.content == b"cba" * 100_000
        assert b"".join(pieces) == b"second"


@long_on("local-files", "container")
def test_killed_service_fails_and_is_resumed_as_another_attempt(backend: BackendUnderTest, server: JobServer) -> None:
    job_id = serve(server)
    server.until(job_id, "TRAINING")
    first = call(server, job_id).text
    assert call(server, job_id, "/die", "POST", content=b"").status_code >= 500
    job = server.until(job_id, "FAILED")
    assert (job["error_type"], job["endpoint"], job["retries_used"]) == ("KILLED_BY_SIGNAL", None, 0)
    dead = call(server, job_id)
    assert dead.status_code == 503
    assert "resume" in dead.json()["error"]["message"]
    assert server.control(job_id, "resume")["status"] == "QUEUED"
    assert server.until(job_id, "TRAINING")["attempt"] == 2
    assert call(server, job_id).text != first
    server.control(job_id, "cancel")
    server.until(job_id, "CANCELLED")
    backend.wait_until_nothing_is_left(job_id)


@long_on("local-http", "container")
def test_service_that_is_never_ready_fails_and_one_that_nobody_uses_is_parked(server: JobServer) -> None:
    never = serve(server, ready_at_probe=NEVER, timeout_s=5.0)
    unused = serve(server, inactivity_timeout_s=1.0)
    job = server.until(never, "FAILED")
    assert job["error_type"] == "NOT_READY"
    assert "503" in job["error_message"]
    job = server.until(unused, "PAUSED")
    assert (job["status_reason"], job["endpoint"], job["error"]) == ("INACTIVE", None, None)
    assert server.events_of(unused, "inactive")
    assert call(server, unused).status_code == 503

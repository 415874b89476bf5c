"""Requests to a dashboard that asks for a token, refuses, fails, or is something else."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from pydantic import ValidationError

from ray_launches import launch_of
from trainmaster.backends.cluster.engine import EngineAwayError, EnginePhase, EngineRefusedError
from trainmaster.backends.ray import client, connection
from trainmaster.backends.ray.client import RayEngine
from trainmaster.backends.ray.options import RayOptions
from trainmaster.protocol.reasons import Reason

JOBS = "GET /api/jobs/"
NO_DOCUMENT = (500, "A file is not found at: /tmp/ray/logs/trainmaster-k3f9.json")


def listed(*entries: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    return 200, {"result": True, "data": {"result": {"result": list(entries)}}}


def driver(status: str, *, start_time: int = 1, **details: Any) -> dict[str, Any]:
    """A Ray job of the instance, as the dashboard lists it."""
    name = f"trainmaster-k3f9-{start_time}"
    known = {"submission_id": name, "metadata": {"trainmaster_instance": "k3f9"}, "start_time": start_time}
    return {**known, "status": status, **details}


def written(**attempts: dict[str, Any]) -> tuple[int, str]:
    """The document of a driver."""
    known = {name.replace("_", "-"): {"attempt": "job-1.1", "nodes": 1, **each} for name, each in attempts.items()}
    return 200, json.dumps({"version": "v", "attempts": known})


class Dashboard(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[str, tuple[int, Any]] = {}
        self.headers: list[dict[str, str]] = []
        self.asked: list[str] = []
        self.busy_every = 0
        """It has too many requests at each so many of them."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Dashboard

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.headers.append(dict(self.headers))
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        status, body = self.server.answers.get(f"{self.command} {path}", self.server.answers.get(path, (404, "")))
        if self.server.busy_every and len(self.server.asked) % self.server.busy_every == 0:
            status, body = 429, "later"
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(body, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    with Dashboard() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        server.answers["/api/version"] = (200, {"ray_version": "2.60.0", "session_name": "one"})
        server.answers["/api/jobs/"] = (200, [])
        server.answers["/api/v0/nodes"] = listed({"node_id": "aa", "is_head_node": True, "state": "ALIVE"})
        server.answers["/api/v0/logs/file"] = NO_DOCUMENT
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def engine(dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayEngine]:
    monkeypatch.setattr(connection, "_PAUSE_S", 0.0)
    engine = RayEngine("ray", "k3f9", RayOptions(address=dashboard.address))
    yield engine
    engine.close()


def test_token_and_headers_go_with_every_request(dashboard: Dashboard) -> None:
    options = RayOptions(address=f"{dashboard.address}/", token="top", headers="X-Team: ours\nX-Key:  a:b \n")
    assert "top" not in repr(options)
    assert "ours" not in repr(options)
    engine = RayEngine("ray", "k3f9", options)
    assert engine.jobs() == {}
    engine.close()
    for headers in dashboard.headers:
        assert headers["Authorization"] == "Bearer top"
        assert (headers["X-Team"], headers["X-Key"]) == ("ours", "a:b")


def test_request_that_is_one_too_many_is_sent_again(dashboard: Dashboard, engine: RayEngine) -> None:
    """Every third one: to look at jobs takes four."""
    dashboard.busy_every = 3
    for _ in range(3):
        assert engine.jobs() == {}


@pytest.mark.parametrize("address", ["", "head:8265", "ray://head:10001", "http://he ad"])
def test_address_is_that_of_a_dashboard(address: str) -> None:
    with pytest.raises(ValidationError, match="address"):
        RayOptions(address=address)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((401, "who are you"), "set the option token"),
        ((403, "no"), "set the option token"),
        ((429, "later"), "too many requests"),
        ((500, "Traceback\nGCS is away"), "GCS is away"),
        ((200, "<html>"), "no dashboard of Ray"),
    ],
)
def test_answer_without_a_list_says_nothing_of_jobs(
    dashboard: Dashboard, engine: RayEngine, answer: tuple[int, str], words: str
) -> None:
    dashboard.answers["/api/jobs/"] = dashboard.answers["/api/version"] = answer
    with pytest.raises(EngineAwayError, match=words):
        engine.jobs()
    assert words in engine.facts().problem


def test_list_that_the_state_api_cannot_make_says_nothing_of_nodes(dashboard: Dashboard, engine: RayEngine) -> None:
    dashboard.answers["/api/v0/nodes"] = (200, {"result": False, "msg": "the GCS is slow", "data": {}})
    with pytest.raises(EngineAwayError, match="the GCS is slow"):
        engine.nodes()


@pytest.fixture(autouse=True)
def takes_packages(monkeypatch: pytest.MonkeyPatch, dashboard: Dashboard) -> list[str]:
    """What was sent to the driver, by its names."""
    sent: list[str] = []
    monkeypatch.setattr(RayEngine, "_send", lambda _, *request: sent.append(".".join(filter(None, request[:2]))))
    return sent


def test_what_ray_refuses_is_refused(dashboard: Dashboard, engine: RayEngine) -> None:
    launch = launch_of()
    dashboard.answers["POST /api/jobs/"] = (500, "RuntimeError: Request failed with status code 400: bad entrypoint")
    with pytest.raises(EngineRefusedError, match="bad entrypoint"):
        engine.start(launch)
    dashboard.answers["POST /api/jobs/"] = (500, "No available agent to submit job, please try again later.")
    with pytest.raises(EngineAwayError, match="No available agent"):
        engine.start(launch)


def test_attempt_waits_until_the_driver_has_accepted_it_and_is_lost_after_a_while(
    dashboard: Dashboard, engine: RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = launch_of()
    dashboard.answers["POST /api/jobs/"] = (200, {})
    engine.start(launch)
    dashboard.answers[JOBS] = (200, [driver("RUNNING")])
    assert engine.jobs()[launch.name].phase is EnginePhase.QUEUED
    monkeypatch.setattr(client, "ACCEPTED_WITHIN_S", 0.0)
    assert engine.jobs() == {}


def test_attempt_that_the_driver_does_not_know_any_more_is_reported_until_it_is_forgotten(
    dashboard: Dashboard, engine: RayEngine
) -> None:
    dashboard.answers[JOBS] = (200, [driver("RUNNING")])
    dashboard.answers["/api/v0/logs/file"] = written(tm_1={"phase": "waiting"})
    engine.jobs()
    dashboard.answers["/api/v0/logs/file"] = written()
    for _ in range(2):
        job = engine.jobs()["tm-1"]
        assert job.loss is not None
        assert (job.loss.reason, job.loss.message) == (
            Reason.ENGINE_CANCELLED,
            "the Ray cluster does not know it any more",
        )
    assert engine.find("tm-1") == job
    engine.forget("tm-1")
    assert engine.jobs() == {}


@pytest.mark.parametrize("answer", [(200, ""), NO_DOCUMENT, (200, "{"), (500, "the agent is away")])
def test_document_that_is_not_shown_any_more_says_nothing(
    dashboard: Dashboard, engine: RayEngine, answer: tuple[int, str]
) -> None:
    dashboard.answers[JOBS] = (200, [driver("RUNNING")])
    dashboard.answers["/api/v0/logs/file"] = written(tm_1={"phase": "running", "addresses": {"0": "10.0.0.1"}})
    job = engine.jobs()["tm-1"]
    assert (job.phase, job.addresses) == (EnginePhase.RUNNING, {0: "10.0.0.1"})
    dashboard.answers["/api/v0/logs/file"] = answer
    with pytest.raises(EngineAwayError):
        engine.jobs()


def test_driver_that_died_is_started_again_while_anything_waits_or_runs(
    dashboard: Dashboard, engine: RayEngine
) -> None:
    old, dead = driver("STOPPED", start_time=1), driver("FAILED", start_time=2, driver_exit_code=-9)
    dashboard.answers[JOBS] = (200, [old, dead])
    dashboard.answers["/api/v0/logs/file"] = written(tm_1={"phase": "ended", "results": {}})
    engine.jobs()
    assert "POST /api/jobs/" not in dashboard.asked
    dashboard.answers["/api/v0/logs/file"] = written(tm_1={"phase": "waiting"})
    dashboard.answers["POST /api/jobs/"] = (200, {})
    dashboard.answers["DELETE /api/jobs/trainmaster-k3f9-1"] = (200, {})
    assert engine.jobs()["tm-1"].phase is EnginePhase.QUEUED
    assert dashboard.asked[-2:] == ["POST /api/jobs/", "DELETE /api/jobs/trainmaster-k3f9-1"]


def test_wait_ends_early_when_something_was_asked(dashboard: Dashboard, engine: RayEngine) -> None:
    dashboard.answers["POST /api/jobs/"] = (200, {})
    engine.cancel("tm-1")
    engine.wait(3600)

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
from trainmaster.backends.cluster.engine import EngineAwayError, EngineRefusedError
from trainmaster.backends.ray.client import RayEngine
from trainmaster.backends.ray.options import RayOptions


class Dashboard(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[str, tuple[int, Any]] = {}
        self.headers: list[dict[str, str]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Dashboard

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.headers.append(dict(self.headers))
        path = self.path.partition("?")[0]
        status, body = self.server.answers.get(f"{self.command} {path}", self.server.answers.get(path, (404, "")))
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
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def engine(dashboard: Dashboard) -> Iterator[RayEngine]:
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


@pytest.mark.parametrize("status", [400, 500])
def test_job_that_ray_has_already_is_found(dashboard: Dashboard, engine: RayEngine, status: int) -> None:
    launch = launch_of()
    dashboard.answers[f"/api/packages/gcs/{launch.name}.zip"] = (200, "")
    dashboard.answers["POST /api/jobs/"] = (status, f"ValueError: Job with submission_id {launch.name} already exists.")
    assert engine.start(launch) == launch.name


def test_job_that_ray_refuses_is_refused(dashboard: Dashboard, engine: RayEngine) -> None:
    launch = launch_of()
    dashboard.answers[f"/api/packages/gcs/{launch.name}.zip"] = (200, "")
    dashboard.answers["POST /api/jobs/"] = (500, "RuntimeError: Request failed with status code 400: bad entrypoint")
    with pytest.raises(EngineRefusedError, match="bad entrypoint"):
        engine.start(launch)
    dashboard.answers["POST /api/jobs/"] = (500, "No available agent to submit job, please try again later.")
    with pytest.raises(EngineAwayError, match="No available agent"):
        engine.start(launch)


def details(name: str, status: str = "RUNNING", nodes: int = 1) -> dict[str, Any]:
    metadata = {"trainmaster_instance": "k3f9", "trainmaster_attempt": "job-1.1", "trainmaster_nodes": str(nodes)}
    return {"type": "SUBMISSION", "submission_id": name, "status": status, "metadata": metadata, "job_id": "02000000"}


def listed(*entries: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    return 200, {"result": True, "data": {"result": {"result": list(entries)}}}


def test_job_that_somebody_removed_is_reported_until_it_is_forgotten(dashboard: Dashboard, engine: RayEngine) -> None:
    dashboard.answers["/api/jobs/"] = (200, [details("tm-1", "PENDING")])
    engine.jobs()
    dashboard.answers["/api/jobs/"] = (200, [])
    for _ in range(2):
        job = engine.jobs()["tm-1"]
        assert job.loss is not None
        assert (job.loss.reason, job.loss.message) == ("ENGINE_CANCELLED", "somebody removed it from the Ray cluster")
    assert engine.find("tm-1") == job
    engine.forget("tm-1")
    assert engine.jobs() == {}


def test_job_whose_workers_have_ended_runs_until_its_driver_ends(dashboard: Dashboard, engine: RayEngine) -> None:
    actor = {"name": "tm-1/0", "node_id": "aa", "state": "ALIVE"}
    dashboard.answers["/api/jobs/"] = (200, [details("tm-1")])
    dashboard.answers["/api/v0/actors"] = listed(actor)
    dashboard.answers["/api/v0/placement_groups"] = listed()
    dashboard.answers["/api/v0/nodes"] = listed({"node_id": "aa", "node_ip": "10.0.0.1"})
    running = engine.jobs()["tm-1"]
    assert (running.phase, running.addresses) == ("running", {0: "10.0.0.1"})
    dashboard.answers["/api/v0/actors"] = listed()
    assert engine.jobs()["tm-1"] == running


def test_worker_that_ends_with_its_node_is_lost_with_it(dashboard: Dashboard, engine: RayEngine) -> None:
    cause = {"actor_died_error_context": {"reason": "WORKER_DIED", "error_message": "the connection broke"}}
    dead = {"name": "tm-1/1", "node_id": "bb", "state": "DEAD", "death_cause": cause}
    nodes = [{"node_id": "aa", "node_ip": "10.0.0.1", "state": "ALIVE"}, {"node_id": "bb", "node_ip": "10.0.0.2"}]
    dashboard.answers["/api/jobs/"] = (200, [details("tm-1", nodes=2)])
    dashboard.answers["/api/v0/actors"] = listed({"name": "tm-1/0", "node_id": "aa", "state": "ALIVE"}, dead)
    engine._living = lambda: {"tm-1": {0: "aa"}}  # type: ignore[method-assign] - this dashboard filters nothing
    reasons = []
    for state in ("ALIVE", "DEAD"):
        dashboard.answers["/api/v0/nodes"] = listed(nodes[0], nodes[1] | {"state": state})
        job = engine.jobs()["tm-1"]
        reasons.append({number: loss.reason for number, loss in job.node_losses.items()})
    assert job.phase == "running"
    assert reasons == [{1: "WORKER_LOST"}, {1: "NODE_LOST"}]


def test_wait_ends_early_when_something_was_asked(engine: RayEngine) -> None:
    engine.cancel("tm-1")
    engine.wait(3600)

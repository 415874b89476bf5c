"""A workload kind that nothing in the package knows runs on the local backend, over either transport."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from local_servers import PYTHON, LocalServer

TESTS = Path(__file__).parents[2]
SERVER_WITH_THE_KIND = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from toy_kind import ToySpec
from trainmaster.cli import main
from trainmaster.server.core.workloads import register

register(ToySpec)
main()
"""


@pytest.fixture(scope="module")
def shared_server(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A server into which somebody has registered a kind of their own."""
    server = LocalServer(tmp_path_factory.mktemp(transport) / "data", transport)
    server.command = (PYTHON, "-c", SERVER_WITH_THE_KIND)
    try:
        server.start()
        yield server
    finally:
        server.clean_up()


def test_kind_of_somebody_else_runs_all_its_steps(server: LocalServer) -> None:
    job_id = server.submit_workload("toy", {"greeting": "good morning"})
    job = server.until(job_id)
    assert (job["status"], job["kind"]) == ("COMPLETED", "toy")
    assert server.lines(job_id, step="main") == ["good morning"]
    listed = server.data("GET", "/v1/jobs?kind=toy")["jobs"]
    assert [job["job_id"] for job in listed] == [job_id]


def test_kind_of_somebody_else_checks_its_own_spec(server: LocalServer) -> None:
    body = {"name": "n", "workload": {"kind": "toy", "greeting": "it's"}}
    answer = server.ask("POST", "/v1/jobs", body)
    assert answer.status_code == 422
    assert answer.json()["error"]["details"] == [{"field": "workload.greeting", "message": "must not hold a quote"}]


def test_failing_step_of_a_kind_is_named(server: LocalServer) -> None:
    job_id = server.submit_workload("toy", {"greeting": "hello", "environment": {"PATH": "/nowhere"}})
    job = server.until(job_id, "FAILED")
    assert (job["error_type"], job["error"]["step"]) == ("COMMAND_NOT_FOUND", "prepare")

"""A real server for the commands to talk to, and the commands in this process or in one of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_server import TRAINMASTER, VARIABLES, Server, wait_for
from click.testing import CliRunner, Result

from real_server import running
from trainmaster.client import Client


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    # Whatever a test forgets to name must not reach the user's own server.
    monkeypatch.setenv("TRAINMASTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the tests of a module."""
    with running(tmp_path_factory.mktemp("server")) as started:
        yield Server(url=started.url, api_key=started.key, directory=started.directory)


@pytest.fixture
def connected(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server, named in the environment."""
    monkeypatch.setenv("TRAINMASTER_URL", server.url)
    monkeypatch.setenv("TRAINMASTER_API_KEY", server.api_key)
    return server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url, server.api_key) as client:
        yield client


@pytest.fixture
def tm() -> Callable[..., Result]:
    """Run a command in this process."""

    def run(*arguments: str, stdin: str | None = None) -> Result:
        return CliRunner().invoke(TRAINMASTER, list(arguments), input=stdin)

    return run


@pytest.fixture
def submit(client: Client) -> Iterator[Callable[..., str]]:
    """Submit a shell script as a job; returns its id. What still runs after the test is cancelled."""
    made: list[str] = []

    def run(script: str, **fields: Any) -> str:
        document = {
            "name": "test",
            "workload": {"kind": "command", "argv": ["sh", "-c", script]},
            "resource_config": {"gpu_count": 0},
            **fields,
        }
        made.append(client.submit(document)["job_id"])
        return made[-1]

    yield run
    for job_id in made:
        with contextlib.suppress(Exception):
            client.delete(job_id, purge=True)


@pytest.fixture
def status(client: Client) -> Callable[..., Any]:
    """Wait until a job has one of some statuses; returns the job."""

    def wait(job_id: str, *wanted: str) -> Any:
        def reached() -> Any:
            job = client.get(job_id)
            return job if job["status"] in wanted else None

        return wait_for(reached)

    return wait

"""Each engine once for all tests here, and one server on both."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from cluster_engines import ENGINES, MISSING
from cluster_servers import ClusterServer
from engine_under_test import EngineUnderTest
from local_servers import quiet_port
from tiny_trainings import EXAMPLES


@pytest.fixture(scope="session")
def running_engines() -> Iterator[Callable[[str], EngineUnderTest]]:
    """Starts an engine when it is first wanted; all of them end with the session."""
    running: dict[str, EngineUnderTest] = {}
    with contextlib.ExitStack() as stack:

        def start(kind: str) -> EngineUnderTest:
            if (reason := MISSING[kind]()) is not None:
                pytest.skip(reason)
            if kind not in running:
                running[kind] = stack.enter_context(ENGINES[kind]())
            return running[kind]

        yield start


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, running_engines: Callable[[str], EngineUnderTest]) -> EngineUnderTest:
    """One engine after the other."""
    return running_engines(request.param)


def data_roots(places: pytest.TempPathFactory) -> list[str]:
    """What lets jobs read the model and the data of the tests."""
    return ["--data-root", str(places.getbasetemp()), "--data-root", str(EXAMPLES)]


@pytest.fixture(scope="module")
def shared_server(engine: EngineUnderTest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterServer]:
    """A server for all tests of a file on an engine."""
    home = tmp_path_factory.mktemp(engine.kind)
    roots = data_roots(tmp_path_factory)
    server = ClusterServer(home / "data", quiet_port(), {engine.kind: engine}, *roots)
    try:
        yield server.start()
    finally:
        server.clean_up()


@pytest.fixture
def server(shared_server: ClusterServer) -> Iterator[ClusterServer]:
    """After each test, nothing of any job is left."""
    yield shared_server
    shared_server.end_all_jobs()

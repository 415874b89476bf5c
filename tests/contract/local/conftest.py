"""The local contract suite: the same promises over both transports.

CI runs it over HTTP, the harder one; nearly all the other suites report by files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from local_servers import LocalServer


@pytest.fixture(scope="module", params=["http", pytest.param("files", marks=pytest.mark.long)])
def transport(request: pytest.FixtureRequest) -> str:
    """How workers report."""
    return str(request.param)


@pytest.fixture(scope="module")
def simulated_gpus() -> str:
    """The GPUs of a module's server; modules that need some say so."""
    return ""


@pytest.fixture(scope="session")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], LocalServer]]:
    """Starts a server with a transport and GPUs when it is first wanted; all of them end with the session."""
    running: dict[tuple[str, str], LocalServer] = {}
    root = str(tmp_path_factory.getbasetemp())
    with contextlib.ExitStack() as stack:

        def start(transport: str, simulated_gpus: str) -> LocalServer:
            wanted = (transport, simulated_gpus)
            if wanted not in running:
                directory, gpus = tmp_path_factory.mktemp(transport) / "data", simulated_gpus
                server = LocalServer(directory, transport, "--data-root", root, TRAINMASTER_SIMULATED_GPUS=gpus)
                stack.callback(server.clean_up)
                server.start()
                running[wanted] = server
            return running[wanted]

        yield start


@pytest.fixture(scope="module")
def shared_server(transport: str, simulated_gpus: str, started: Callable[[str, str], LocalServer]) -> LocalServer:
    """One server for all tests of all modules that want the same."""
    return started(transport, simulated_gpus)


@pytest.fixture
def server(shared_server: LocalServer) -> Iterator[LocalServer]:
    """The shared server; after each test nothing of its jobs is left."""
    yield shared_server
    shared_server.end_all_jobs()


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """Where a test may put scripts that its server accepts by path."""
    return tmp_path

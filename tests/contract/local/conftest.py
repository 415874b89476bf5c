"""The local contract suite: the same promises over both transports.

CI runs it over HTTP, the harder one; nearly all the other suites report by files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from local_servers import LocalServer, serving


@pytest.fixture(scope="module", params=["http", pytest.param("files", marks=pytest.mark.long)])
def transport(request: pytest.FixtureRequest) -> str:
    """How workers report."""
    return str(request.param)


@pytest.fixture(scope="module")
def simulated_gpus() -> str:
    """The GPUs of a module's server; modules that need some say so."""
    return ""


@pytest.fixture(scope="module")
def shared_server(
    transport: str, simulated_gpus: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalServer]:
    """One server for all tests of a module."""
    directory = tmp_path_factory.mktemp(transport) / "data"
    root = str(tmp_path_factory.getbasetemp())
    with serving(directory, transport, "--data-root", root, TRAINMASTER_SIMULATED_GPUS=simulated_gpus) as server:
        yield server


@pytest.fixture
def server(shared_server: LocalServer) -> Iterator[LocalServer]:
    """The module's server; after each test nothing of its jobs is left."""
    yield shared_server
    shared_server.end_all_jobs()


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """Where a test may put scripts that its server accepts by path."""
    return tmp_path

"""Trainings of a tiny model as jobs of a real server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from local_servers import LocalServer, serving
from tiny_trainings import EXAMPLES


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the examples, made once."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import make_tiny_model
    finally:
        sys.path.remove(str(EXAMPLES))
    directory = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model.main(directory)
    return directory


@pytest.fixture(scope="module")
def simulated_gpus() -> str:
    """The GPUs of a module's server; modules that need some say so."""
    return ""


@pytest.fixture(scope="module")
def shared_server(simulated_gpus: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """One server for all tests of a module."""
    roots = [argument for root in (tmp_path_factory.getbasetemp(), EXAMPLES) for argument in ("--data-root", str(root))]
    directory = tmp_path_factory.mktemp("training") / "data"
    # Tests run beside each other: threads that wait for one another on a busy core make everything crawl.
    variables = {"TRAINMASTER_SIMULATED_GPUS": simulated_gpus, "OMP_NUM_THREADS": "1"}
    with serving(directory, "files", *roots, **variables) as server:
        yield server


@pytest.fixture
def server(shared_server: LocalServer) -> Iterator[LocalServer]:
    """The module's server; after each test nothing of its jobs is left."""
    yield shared_server
    shared_server.end_all_jobs()

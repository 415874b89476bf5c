"""Servers that run jobs in real containers, on the engine and the images of `container_engine`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from container_engine import Engine, missing, python_image, running_engine
from container_servers import ContainerServer


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """A real container engine."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with running_engine() as started:
        yield started


@pytest.fixture(scope="session")
def shared_container_server(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerServer]:
    """A server with the container backend first, and the local one beside it."""
    home: Path = tmp_path_factory.mktemp("containers")
    server = ContainerServer(home, engine, python_image(engine))
    with contextlib.ExitStack() as stack:
        stack.callback(server.clean_up)
        server.start()
        yield server


@pytest.fixture(scope="module")
def container_server(shared_container_server: ContainerServer) -> Iterator[ContainerServer]:
    """The server; after each module nothing of its jobs is left."""
    yield shared_container_server
    shared_container_server.end_all_jobs()

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import root_saves
from api_world import Served, World

from served_attempt import ServedAttempt, open_attempt
from trainmaster.jobs.roots import Root, open_root


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World.open(tmp_path_factory.mktemp("world")) as world:
        yield world


@pytest.fixture(scope="module")
def served(world: World) -> Iterator[Served]:
    with Served.serve(world.context()) as served:
        yield served


@pytest.fixture
def attempt(world: World, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServedAttempt:
    """A new attempt, in whose name this process asks the server."""
    attempt = open_attempt(world, served, tmp_path)
    for name, value in attempt.environment.items():
        monkeypatch.setenv(name, value)
    root_saves.SERVED[attempt.checkpoints] = attempt
    return attempt


@pytest.fixture(params=["directory", "s3", "server"])
def root_uri(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where a new, empty root is; what object stores keep on this machine lies below the test's own directory."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    if request.param == "directory":
        return str(tmp_path / "root")
    if request.param == "server":
        return str(request.getfixturevalue("attempt").checkpoints)
    return str(request.getfixturevalue("s3_root"))


@pytest.fixture
def root(root_uri: str) -> Root:
    """A new, empty root of each kind."""
    return open_root(root_uri)

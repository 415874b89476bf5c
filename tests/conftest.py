"""Fixtures that several suites share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from distribution import SuiteScheduling, place_of
from postgres_server import PostgresServer, running_postgres
from real_server import RealServer, running
from seaweed_server import SeaweedServer, running_seaweed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place_of(item.path.relative_to(Path(__file__).parent).as_posix()))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SuiteScheduling:
    return SuiteScheduling(config, log)


@pytest.fixture
def toy_kind() -> Iterator[Any]:
    """A workload kind that nothing in the package knows: it greets, in so many words, and is gone after the test."""
    from toy_kind import ToySpec
    from trainmaster.server.core.workloads import register, unregister

    register(ToySpec)
    yield ToySpec
    unregister("toy")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RealServer]:
    """A real server process on an empty data directory."""
    with running(tmp_path / "data", "--data-root", str(tmp_path)) as started:
        yield started


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real PostgreSQL server; each test takes a database of its own on it."""
    with running_postgres() as started:
        yield started


@pytest.fixture(scope="session")
def seaweed() -> Iterator[SeaweedServer]:
    """A real S3 server; each test takes a prefix of its own on it."""
    with running_seaweed() as started:
        yield started


@pytest.fixture
def s3_root(seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A URI on the S3 server that nothing lies below, and what reaching it takes in the environment."""
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    return seaweed.new_prefix()


# An example that takes long on a busy machine is not wrong.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")

# Before torch is imported, here or in a process that a test starts: threads of small models spend their time on waiting
# for one another, and take it from the tests beside them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A suite that is started in the background ignores the signal, and so would all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

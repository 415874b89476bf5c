"""Real workers, forked by a real fork server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from worker_attempts import Attempts, ForkServerProcess


@pytest.fixture(scope="module")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServerProcess]:
    """One for all tests of a file that do not harm it; one that nobody asks anything for ten minutes ends."""
    server = ForkServerProcess(tmp_path_factory.mktemp("forkserver"))
    yield server
    server.stop()


@pytest.fixture
def mortal_fork_server(tmp_path: Path) -> Iterator[ForkServerProcess]:
    """One of the test's own."""
    server = ForkServerProcess(tmp_path / "mortal")
    yield server
    if server.process.poll() is None:
        server.stop()


@pytest.fixture
def attempts(fork_server: ForkServerProcess, tmp_path: Path) -> Iterator[Attempts]:
    made = Attempts(fork_server, tmp_path)
    yield made
    for attempt in made.made:
        attempt.clean_up()

"""One real Slurm cluster for all tests here; each test has an instance of its own on it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_cluster import SlurmCluster, missing, running_cluster, slurm_launch, wait_for
from trainmaster.backends.cluster.engine import EngineLaunch
from trainmaster.backends.slurm.client import SlurmEngine

_NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[SlurmCluster]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with running_cluster() as started:
        yield started


@pytest.fixture
def cluster(shared_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster; after each test, no job of it is left."""
    yield shared_cluster
    shared_cluster.end_all_jobs()


@pytest.fixture
def instance() -> str:
    return f"t{next(_NUMBERS)}"


@pytest.fixture
def engine(cluster: SlurmCluster, instance: str) -> SlurmEngine:
    return cluster.engine(instance)


class Programs:
    """Workers that leave notes in a directory, one file for each node."""

    def __init__(self, directory: Path, instance: str) -> None:
        self.directory = directory
        self._instance = instance

    def launch(self, script: str, **values: object) -> EngineLaunch:
        return slurm_launch(self._instance, f"cd {self.directory}\n{script}", **values)  # type: ignore[arg-type]

    def waiting(self, **values: object) -> EngineLaunch:
        """It notes `up`, and `TERM` when it gets that signal, and runs until there is a file `go`."""
        script = (
            "note() { echo $1 >> notes.$SLURM_NODEID; }\n"
            "trap 'note TERM' TERM\n"
            "note up\n"
            "while [ ! -e go ]; do sleep 0.2; done"
        )
        return self.launch(script, **values)

    def go(self) -> None:
        (self.directory / "go").touch()

    def notes(self, node: int = 0) -> list[str]:
        file = self.directory / f"notes.{node}"
        return file.read_text().split() if file.exists() else []

    def wait_for_note(self, note: str, *, nodes: int = 1) -> None:
        wait_for(lambda: all(note in self.notes(node) for node in range(nodes)), f"the note {note}")


@pytest.fixture
def programs(tmp_path: Path, instance: str) -> Programs:
    return Programs(tmp_path, instance)

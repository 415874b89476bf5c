"""One real Slurm cluster for all tests here; each test has an instance of its own on it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_programs import Programs

from slurm_cluster import SlurmCluster, missing, running_cluster
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


@pytest.fixture(params=["programs", pytest.param("slurmrestd", marks=pytest.mark.long)])
def engine(request: pytest.FixtureRequest, cluster: SlurmCluster, instance: str) -> Iterator[SlurmEngine]:
    """A client that reaches the cluster by Slurm's programs, and one by slurmrestd."""
    made = cluster.engine(instance) if request.param == "programs" else cluster.rest_engine(instance)
    yield made
    made.close()


@pytest.fixture
def programs(tmp_path: Path, instance: str) -> Iterator[Programs]:
    """After the test, those that wait end by themselves: Slurm would wait ten seconds for those that ignore SIGTERM."""
    made = Programs(tmp_path, instance)
    yield made
    made.go()

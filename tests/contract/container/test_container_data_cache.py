"""The data cache in containers: a head and writers, each of its own size, make a table's shards before the job runs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from container_engine import SITE
from container_servers import PACKAGES, ContainerServer
from patience import PATIENCE_S
from process_signals import kill_claimant
from real_server import wait_for
from training.iceberg_tables import ROWS, table_at
from trainmaster.training.fetching.access import Access
from trainmaster.training.fetching.cache import Cache
from trainmaster.training.tables.shard_writer import KIND
from trainmaster.training.tables.table_reader import Source

READS = """
from trainmaster.jobs import data_cache
rows = [row for batch in data_cache.record_batches() for row in batch["id"].to_pylist()]
print("rows", *rows, flush=True)
"""
SIZES = {"head_cpu": "1500m", "head_mem": "768Mi", "worker_cpu": "1", "worker_mem": "512Mi"}
HEAD, WRITER = (1_500_000_000, 768 << 20), (1_000_000_000, 512 << 20)
COUNT = 2


@pytest.fixture
def location(container_server: ContainerServer, tmp_path: Path) -> str:
    """Where the metadata of a table lies that jobs may read, and whose shards nobody has made yet."""
    return table_at(f"file://{container_server.home}/warehouse/{tmp_path.name}", tmp_path)


def submit(server: ContainerServer, location: str, **sizes: str) -> str:
    """Have two ranks read the table."""
    dataset = {"type": "cache", "storage_uri": "cache://made/rows", "metadata_loc": location, "num_data_nodes": COUNT}
    warehouse = str(server.home / "warehouse")
    # What an image for this has installed, the one of the tests has mounted.
    installed = {"source": str(PACKAGES), "target": SITE, "read_only": True}
    workload = {
        "ranks_per_node": 2,
        "initializers": {"dataset": {**dataset, "image": server.image, **SIZES, **sizes}},
        "volumes": [installed, {"source": warehouse, "target": warehouse, "read_only": True}],
    }
    return server.run("python3", "-c", READS, workload=workload)


@contextlib.contextmanager
def others_make_it(server: ContainerServer, location: str) -> Iterator[None]:
    """Keep whoever wants the table's shards waiting, for the length of a block."""
    cache = Cache(server.directory / "cache" / "default")
    access = Access(cache=cache.root, working_directory=server.home, data_roots=(server.home,))
    source = Source.reached(location, access)
    with cache.lock(KIND, source.key(source.table(), COUNT)):
        yield


def sizes_of(server: ContainerServer, names: list[str]) -> list[tuple[int, int]]:
    found: list[dict[str, Any]] = json.loads(server.engine.podman("inspect", *sorted(names)))
    return [(each["HostConfig"]["NanoCpus"], each["HostConfig"]["Memory"]) for each in found]


def wait_for_gang(server: ContainerServer, job_id: str) -> list[str]:
    """The names of the containers of a job's gang, once its head waits for another."""
    said = lambda: " ".join(server.lines(job_id, step="dataset-initializer"))  # noqa: E731
    wait_for(lambda: "waiting for another job" in said(), "the head")
    names = server.containers(job_id)
    assert len(names) == 1 + COUNT
    return names


@pytest.mark.long  # tests/training/test_table_gang.py makes the same shards
def test_gang_of_containers_makes_shards_that_ranks_read(container_server: ContainerServer, location: str) -> None:
    server = container_server
    with others_make_it(server, location):
        job_id = submit(server, location)
        gang = wait_for_gang(server, job_id)
        assert sizes_of(server, gang) == [HEAD, WRITER, WRITER]
    job = server.until(job_id, timeout_s=PATIENCE_S)
    assert job["status"] == "COMPLETED", json.dumps(job["error"])
    shares = [[int(row) for row in line.split()[1:]] for line in server.lines(job_id, step="main")]
    assert sorted(row for share in shares for row in share) == list(ROWS)
    assert sorted(map(len, shares)) == [495, 495]
    lines = server.lines(job_id, step="dataset-initializer")
    assert any("becomes 2 shards" in line for line in lines)
    server.wait_until_cleared(job_id)


@pytest.mark.long
def test_nothing_is_left_of_a_gang_whose_job_is_cancelled(container_server: ContainerServer, location: str) -> None:
    server = container_server
    with others_make_it(server, location):
        job_id = submit(server, location)
        wait_for_gang(server, job_id)
        server.control(job_id, "cancel")
        assert server.until(job_id)["status"] == "CANCELLED"
        server.wait_until_cleared(job_id)


@pytest.mark.long
def test_nothing_is_left_of_a_gang_whose_worker_is_killed(container_server: ContainerServer, location: str) -> None:
    server = container_server
    with others_make_it(server, location):
        job_id = submit(server, location)
        wait_for_gang(server, job_id)
        kill_claimant(server.run_directory(job_id).claimant(0))
        job = server.until(job_id)
        assert (job["status"], job["error"]["error_type"]) == ("FAILED", "WORKER_LOST")
        server.wait_until_cleared(job_id)


def test_writer_that_needs_more_memory_is_why_the_step_fails(container_server: ContainerServer, location: str) -> None:
    server = container_server
    job_id = submit(server, location, worker_mem="16Mi")  # too little for it to say so itself
    error = server.until(job_id)["error"]
    assert (error["error_type"], error["step"]) == ("OUT_OF_MEMORY", "dataset-initializer")
    assert "-dataset-initializer-" in error["error_message"]
    server.wait_until_cleared(job_id)

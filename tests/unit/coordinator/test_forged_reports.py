"""What somebody who holds a worker's token, and not only a rank's, could report."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from trainmaster.backends.base import endpoint_on_node
from trainmaster.protocol.run_directory import RunDirectory, endpoint_document, worker_stream
from trainmaster.server.coordinator.launch import attempt_request, compiled_launch
from trainmaster.server.coordinator.observation import observe_attempt
from trainmaster.server.core.commands import submit
from trainmaster.server.core.job import Job
from trainmaster.server.core.observations import admit, observe, place
from trainmaster.server.core.reports import AttemptObservation, Liveness
from trainmaster.server.core.resources import Node, Share
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.core.spec.submit import compile_job
from trainmaster.server.storage import ARTIFACTS, BLOBS, RUNS, Roots, run_directory

NODE = Node(
    node_id="n",
    backend="local",
    hostname="n",
    cpu_cores=1,
    ram_mb=1,
    storage_mb=1,
    last_seen_at=1.0,
    address="10.0.0.7",
)


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    return Roots({RUNS: tmp_path / "runs", ARTIFACTS: tmp_path / "artifacts", BLOBS: tmp_path / "blobs"})


def running(roots: Roots, kind: str) -> tuple[Job, RunDirectory]:
    document = {"name": "j", "workload": {"kind": kind, "argv": ["x"]}, "resource_config": {"gpu_count": 0}}
    made = submit(
        compile_job(parse_submit(document)),
        account_id="a",
        job_id="job-mine",
        created_by="t",
        now=1.0,
        default_backend="local",
    )
    admitted = admit(made.job, now=1.0)
    assert admitted is not None
    placed = place(admitted.job, now=1.0, shares=[Share(node_id="n")], token="t")
    assert placed is not None
    job = placed.job
    directory = run_directory(roots, job.job_id, 1)
    directory.create(
        attempt_request(
            job,
            compiled_launch(job),
            nodes={"n": NODE},
            roots=roots,
            resume=None,
            hint_socket=None,
            server_url="http://server",
        )
    )
    return job, directory


def said_by_the_worker(directory: RunDirectory, *records: dict[str, Any]) -> None:
    directory.append(worker_stream(0), 0, b"".join(json.dumps(record).encode() + b"\n" for record in records))


def seen(job: Job, directory: RunDirectory, roots: Roots) -> AttemptObservation:
    return observe_attempt(
        job,
        directory,
        [Liveness.ALIVE],
        ranks_per_node=1,
        roots=roots,
        endpoint=partial(endpoint_on_node, directory.request()),
    )


@pytest.mark.parametrize("path", ["/etc", "job-theirs/checkpoints/best", "job-mine/checkpoints/c"])
def test_checkpoint_in_the_workers_stream_registers_nothing(roots: Roots, path: str) -> None:
    job, directory = running(roots, "command")
    forged = {"type": "checkpoint", "checkpoint_id": "c", "step": 1, "root": ARTIFACTS, "path": path}
    said_by_the_worker(directory, {"type": "claimed"}, {"type": "started"}, forged)
    change = observe(job, seen(job, directory, roots), now=2.0)
    assert change is not None
    assert change.checkpoints == ()
    assert change.job.latest_checkpoint_id is None


@pytest.mark.parametrize("host", ["169.254.169.254", "127.0.0.1", "database.internal"])
def test_endpoint_on_another_machine_is_not_where_requests_go(roots: Roots, host: str) -> None:
    job, directory = running(roots, "service")
    directory.put_document(endpoint_document(0), {"host": host, "port": 80})
    said_by_the_worker(directory, {"type": "claimed"}, {"type": "started"}, {"type": "ready"})
    assert seen(job, directory, roots).nodes[0].endpoint is None


def test_endpoint_on_the_attempts_own_node_is(roots: Roots) -> None:
    job, directory = running(roots, "service")
    directory.put_document(endpoint_document(0), {"host": "10.0.0.7", "port": 80})
    said_by_the_worker(directory, {"type": "claimed"}, {"type": "started"}, {"type": "ready"})
    assert seen(job, directory, roots).nodes[0].endpoint == "10.0.0.7:80"

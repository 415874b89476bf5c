"""One thing that is broken must not stop the rest: a backend, a path, a file that a power cut left empty."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import ACCOUNT, Cluster

from trainmaster.backends.scripted import Act
from trainmaster.core.errors import StoreUnavailableError
from trainmaster.core.states import JobStatus
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.request import AttemptRequest


def runs_on(request: AttemptRequest, node: int) -> Iterator[Act]:
    yield {"type": "started", "ranks": []}
    yield from itertools.repeat({})


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, runs_on)
    yield made
    made.database.close()


def reached(cluster: Cluster, job_id: str, *statuses: JobStatus) -> None:
    cluster.until(lambda: cluster.job(job_id).status in statuses)


def test_backend_that_cannot_tell_its_nodes_keeps_those_that_are_known(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.tick()

    def broken() -> Any:
        raise RuntimeError("GPU is lost")

    monkeypatch.setattr(cluster.backend, "inventory", broken)
    job = cluster.submit()
    reached(cluster, job.job_id, JobStatus.TRAINING)


def test_path_that_cannot_be_looked_at_fails_its_job_alone(cluster: Cluster) -> None:
    workload = {"kind": "script", "path": f"/{'a' * 300}.py"}
    strange, plain = cluster.submit(workload=workload), cluster.submit()
    reached(cluster, plain.job_id, JobStatus.TRAINING)
    assert cluster.job(strange.job_id).reason is Reason.ADMISSION


@pytest.mark.parametrize("name", ["claims/0.json", "request.json"])
def test_file_that_a_power_cut_left_empty_costs_the_attempt_and_no_more(cluster: Cluster, name: str) -> None:
    job = cluster.submit(scheduling_config={"max_retries": 1})
    reached(cluster, job.job_id, JobStatus.TRAINING)
    cluster.die()
    cluster.world.workers.clear()
    (cluster.directory / "runs" / job.job_id / "1" / name).write_bytes(b"")
    cluster.boot()
    cluster.until(lambda: cluster.job(job.job_id).attempt_count == 2)
    reached(cluster, job.job_id, JobStatus.TRAINING)
    assert cluster.job(job.job_id).retries_used == 1


def test_database_that_cannot_be_read_at_a_launch_costs_no_attempt(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    submit = cluster.backend.submit

    def unreadable_at_first(*arguments: Any) -> Any:
        asked.append("")
        if len(asked) < 3:
            raise StoreUnavailableError
        return submit(*arguments)

    monkeypatch.setattr(cluster.backend, "submit", unreadable_at_first)
    job = cluster.submit()
    reached(cluster, job.job_id, JobStatus.TRAINING)
    assert cluster.job(job.job_id).attempt_count == 1


def test_act_that_fails_is_tried_again_later_and_later(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    job = cluster.submit()
    reached(cluster, job.job_id, JobStatus.TRAINING)
    tries: list[float] = []
    stop = cluster.backend.stop

    def full(*arguments: Any) -> None:
        tries.append(cluster.now)
        if len(tries) < 5:
            raise OSError("No space left on device")
        stop(*arguments)

    monkeypatch.setattr(cluster.backend, "stop", full)
    cluster.commands.cancel(ACCOUNT, job.job_id).result()
    reached(cluster, job.job_id, JobStatus.CANCELLED)
    waits = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert waits == sorted(waits)
    assert waits[-1] >= 8


def test_worker_that_reacts_to_nothing_is_killed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    job = cluster.submit()
    reached(cluster, job.job_id, JobStatus.TRAINING)
    monkeypatch.setattr(cluster.backend, "stop", lambda *_: None)
    cluster.commands.cancel(ACCOUNT, job.job_id).result()
    asked_at = cluster.now
    reached(cluster, job.job_id, JobStatus.CANCELLED)
    assert cluster.now - asked_at > 50
    assert cluster.world.swept == [(f"{job.job_id}.1", 0)]
    assert cluster.allocated() == 0


def test_cancel_of_a_job_that_cannot_be_launched_ends(cluster: Cluster) -> None:
    cluster.backend.broken = "no engine"
    job = cluster.submit()
    cluster.until(lambda: cluster.job(job.job_id).message is not None)
    cluster.commands.cancel(ACCOUNT, job.job_id).result()
    reached(cluster, job.job_id, JobStatus.CANCELLED)

"""One thing that is broken must not stop the rest: a backend, a path, a file that a power cut left empty."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from harness import ACCOUNT, Cluster

from scripted_backend import Act
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.request import AttemptRequest
from trainmaster.protocol.run_directory import beat_document
from trainmaster.server.coordinator import loop
from trainmaster.server.core.errors import StoreUnavailableError
from trainmaster.server.core.states import JobStatus
from trainmaster.server.storage import run_directory


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


def claims_and_dies(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have workers die right after their claim, before they have said anything."""

    def submit(request: AttemptRequest, *_: Any) -> None:
        for node in range(len(request.nodes)):
            cluster.world.run_directory(request).claim(node, {"nonce": str(node)})

    monkeypatch.setattr(cluster.backend, "submit", submit)


@pytest.mark.parametrize("nodes", [1, 2])
def test_worker_that_dies_right_after_its_claim_is_swept_and_ends_its_attempt(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    claims_and_dies(cluster, monkeypatch)
    job = cluster.submit(resource_config={"gpu_count": nodes, "node_count": nodes})
    cluster.until(lambda: cluster.job(job.job_id).status is JobStatus.FAILED, ticks=30)
    assert cluster.job(job.job_id).reason is Reason.WORKER_LOST
    assert (f"{job.job_id}.1", 0) in cluster.world.swept
    assert cluster.allocated() == 0


@pytest.mark.parametrize("restarts", [pytest.param(False, marks=pytest.mark.long), True])
def test_job_that_no_worker_ever_claims_fails_after_a_few_launches(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    monkeypatch.setattr(cluster.backend, "submit", lambda *_: None)
    job = cluster.submit(scheduling_config={"max_retries": 5})
    for launches in (2, 3) if restarts else ():
        cluster.until(lambda launches=launches: cluster.job(job.job_id).attempt_count == launches, ticks=1000)
        cluster.die()
        cluster.boot()
    cluster.until(lambda: cluster.job(job.job_id).status is JobStatus.FAILED, ticks=1000)
    ended = cluster.job(job.job_id)
    assert (ended.reason, ended.attempt_count, ended.retries_used) == (Reason.NEVER_STARTED, 3, 0)
    assert "3 launches in a row" in (ended.message or "")
    assert cluster.allocated() == 0


def test_job_whose_third_launch_is_claimed_runs(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = cluster.backend.submit

    def ignore_two(request: AttemptRequest, *secrets: Any) -> Any:
        return submit(request, *secrets) if request.attempt == 3 else None

    monkeypatch.setattr(cluster.backend, "submit", ignore_two)
    job = cluster.submit()
    cluster.until(lambda: cluster.job(job.job_id).status is JobStatus.TRAINING, ticks=1000)
    assert cluster.job(job.job_id).attempt_count == 3


def test_write_that_fails_is_the_trouble_of_its_own_job_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "FAILED_WAIT_S", 0.0)

    def says_something(request: AttemptRequest, node: int) -> Iterator[Act]:
        yield {"type": "started", "ranks": []}
        yield {"rank": {"type": "note", "message": "poison" if request.job_id == jobs[0].job_id else "fine"}}
        yield {"exit": {"reason": Reason.SUCCEEDED, "message": "done"}}

    cluster = Cluster(tmp_path, says_something)
    with closing(sqlite3.connect(tmp_path / "tm.db")) as connection:
        connection.execute(
            "CREATE TRIGGER poisoned BEFORE INSERT ON events WHEN NEW.message = 'poison' "
            "BEGIN SELECT RAISE(ABORT, 'cannot be stored'); END"
        )
    jobs = [cluster.submit(), cluster.submit()]
    cluster.until(lambda: all(cluster.job(job.job_id).status is JobStatus.COMPLETED for job in jobs), ticks=60)
    poisoned, fine = ([event.type for event in cluster.events(job.job_id)] for job in jobs)
    assert ("reports_cut" in poisoned, "note" in poisoned) == (True, False)
    assert ("reports_cut" in fine, "note" in fine) == (False, True)
    assert all(cluster.job(job.job_id).attempt_count == 1 for job in jobs)
    cluster.database.close()


def crashes_once(request: AttemptRequest, node: int) -> Iterator[Act]:
    yield {"type": "started", "ranks": []}
    if request.attempt == 1:
        yield {"exit": {"reason": Reason.KILLED_BY_SIGNAL, "message": "killed"}}
    yield from itertools.repeat({})


def test_clock_that_goes_back_does_not_stretch_a_backoff(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, crashes_once)
    job = cluster.submit(scheduling_config={"max_retries": 1})
    cluster.until(lambda: cluster.job(job.job_id).retries_used == 1)
    cluster.now -= 86_400
    cluster.until(lambda: cluster.job(job.job_id).status is JobStatus.TRAINING, ticks=20)
    cluster.database.close()


def test_clock_that_goes_back_does_not_spare_a_worker_that_reacts_to_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = cluster.submit()
    reached(cluster, job.job_id, JobStatus.TRAINING)
    monkeypatch.setattr(cluster.backend, "stop", lambda *_: None)
    cluster.commands.cancel(ACCOUNT, job.job_id).result()
    cluster.tick()
    cluster.now -= 86_400
    cluster.until(lambda: cluster.job(job.job_id).status is JobStatus.CANCELLED, ticks=100)


def test_worker_that_was_stopped_by_a_preparing_step_does_not_prepare_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_at = 0.0

    def prepares(request: AttemptRequest, node: int) -> Iterator[Act]:
        nonlocal stopped_at
        yield {"type": "step_started", "step": "prepare", "starts_ranks": False}
        for _ in range(100):  # longer than the job may run, as a large model takes
            run_directory(cluster.roots, request.job_id, request.attempt).put_document(
                beat_document(node), {"t": cluster.now, "seq": 1}
            )
            stopped_at = cluster.now
            yield {}
        yield from itertools.repeat({})

    cluster = Cluster(tmp_path, prepares)
    monkeypatch.setattr(cluster.backend, "stop", lambda *_: None)
    job = cluster.submit(scheduling_config={"max_runtime_seconds": 60, "max_retries": 3})
    reached(cluster, job.job_id, JobStatus.PREPARING)
    cluster.until(lambda: cluster.job(job.job_id).status is not JobStatus.PREPARING, ticks=600)
    ended = cluster.job(job.job_id)
    assert (ended.status, ended.reason, ended.attempt_count) == (JobStatus.FAILED, Reason.TIMEOUT, 1)
    assert 60 < cluster.now - stopped_at < 200
    assert cluster.allocated() == 0
    cluster.database.close()


def test_worker_that_was_stopped_by_its_own_job_does_not_outlive_its_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.backend, "stop", lambda *_: None)
    job = cluster.submit(scheduling_config={"max_runtime_seconds": 60, "max_retries": 3})
    reached(cluster, job.job_id, JobStatus.TRAINING)
    began = cluster.now
    cluster.until(lambda: cluster.job(job.job_id).status is JobStatus.FAILED, ticks=300)
    ended = cluster.job(job.job_id)
    assert (ended.reason, ended.attempt_count) == (Reason.TIMEOUT, 1)
    assert 60 < cluster.now - began < 200
    assert cluster.allocated() == 0

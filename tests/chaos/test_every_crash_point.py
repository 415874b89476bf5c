"""Kill the server before and after every commit and every side effect of a job's life, and start it again.

Each scenario runs once undisturbed, to count the points it passes; then once for each point, with the
server killed there. Whatever the point: no job is lost, none runs twice at the same time, every event is
there once, and what was held is released.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from harness import ACCOUNT, Cluster, Crash

from scripted_backend import Act, Script
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.request import AttemptRequest
from trainmaster.server import failpoints
from trainmaster.server.core.errors import ConflictError
from trainmaster.server.core.states import TERMINAL, TRANSITIONS, JobStatus


def saved(request: AttemptRequest, node: int, step: int) -> Act:
    if node != 0:
        return {}
    path = f"{request.checkpoint_dir}/checkpoint-{step}"
    return {"rank": {"type": "checkpoint", "checkpoint_id": f"{request.attempt_id}-{step}", "step": step, "path": path}}


def trains(request: AttemptRequest, node: int) -> Iterator[Act]:
    yield {"type": "started", "ranks": []}
    yield {"rank": {"type": "phase", "phase": "checkpointing"}}
    yield saved(request, node, 10)
    yield {"rank": {"type": "phase", "phase": "training"}}
    yield {"exit": {"reason": Reason.SUCCEEDED, "message": "done"}}


def dies_once(request: AttemptRequest, node: int) -> Iterator[Act]:
    yield {"type": "started", "ranks": []}
    if request.attempt == 1:
        yield saved(request, node, 5)
        yield {"vanish": True}
    yield {"exit": {"reason": Reason.SUCCEEDED, "message": "done"}}


def runs_on(request: AttemptRequest, node: int) -> Iterator[Act]:
    yield {"type": "started", "ranks": []}
    yield saved(request, node, request.attempt * 10)
    if request.attempt > 1:
        yield {"exit": {"reason": Reason.SUCCEEDED, "message": "done"}}
    yield from itertools.repeat({})


def serves(request: AttemptRequest, node: int) -> Iterator[Act]:
    yield {"type": "started", "ranks": []}
    yield {"endpoint": {"host": "127.0.0.1", "port": 1000 + request.attempt}}
    yield {"type": "ready"}
    if request.attempt == 1:
        yield {"vanish": True}
    yield from itertools.repeat({})


@dataclass(frozen=True)
class Scenario:
    script: Script
    steps: tuple[Callable[[Cluster, str], bool], ...]
    """Each is tried once a tick, in order, until it says that it is done."""
    end: JobStatus
    document: dict[str, object]
    attempts: int = 1
    starts_like: str = ""
    """A scenario whose points are the same until the job trains; it is killed there."""


def reaches(*statuses: JobStatus) -> Callable[[Cluster, str], bool]:
    return lambda cluster, job_id: cluster.job(job_id).status in statuses


def asks(name: str, **arguments: object) -> Callable[[Cluster, str], bool]:
    """Give a command; a client whose server died under it asks again, and may find that it was done."""

    def ask(cluster: Cluster, job_id: str) -> bool:
        with contextlib.suppress(ConflictError):
            getattr(cluster.commands, name)(ACCOUNT, job_id, **arguments).result()
        return True

    return ask


def has_checkpoint(cluster: Cluster, job_id: str) -> bool:
    return cluster.job(job_id).latest_checkpoint_id is not None


SCENARIOS = {
    "completes": Scenario(trains, (reaches(JobStatus.COMPLETED),), JobStatus.COMPLETED, {}),
    "gang": Scenario(
        trains,
        (reaches(JobStatus.COMPLETED),),
        JobStatus.COMPLETED,
        {"resource_config": {"gpu_count": 2, "node_count": 2}},
    ),
    "retried": Scenario(
        dies_once,
        (reaches(JobStatus.COMPLETED),),
        JobStatus.COMPLETED,
        {"scheduling_config": {"max_retries": 1}},
        attempts=2,
        starts_like="completes",
    ),
    "failed": Scenario(dies_once, (reaches(JobStatus.FAILED),), JobStatus.FAILED, {}, starts_like="completes"),
    "paused": Scenario(
        runs_on,
        (
            has_checkpoint,
            asks("pause"),
            reaches(JobStatus.PAUSED),
            asks("resume"),
            reaches(JobStatus.COMPLETED),
        ),
        JobStatus.COMPLETED,
        {},
        attempts=2,
        starts_like="completes",
    ),
    "cancelled": Scenario(
        runs_on,
        (reaches(JobStatus.TRAINING), asks("cancel"), reaches(JobStatus.CANCELLED)),
        JobStatus.CANCELLED,
        {},
        starts_like="completes",
    ),
    "deleted": Scenario(
        runs_on,
        (
            reaches(JobStatus.TRAINING),
            asks("delete"),
            lambda cluster, job_id: cluster.job(job_id).deleted_at is not None,
        ),
        JobStatus.CANCELLED,
        {},
        starts_like="completes",
    ),
    "service": Scenario(
        serves,
        (
            reaches(JobStatus.TRAINING),
            reaches(JobStatus.FAILED),
            asks("resume"),
            reaches(JobStatus.TRAINING),
            asks("cancel"),
            reaches(JobStatus.CANCELLED),
        ),
        JobStatus.CANCELLED,
        {"workload": {"kind": "service", "argv": ["x"]}},
        attempts=2,
    ),
}


def play(cluster: Cluster, scenario: Scenario) -> str:
    """Run a scenario to its end, starting the server again whenever it was killed."""
    job_id = None
    steps = list(scenario.steps)
    for _ in range(300):
        try:
            if job_id is None:
                known = cluster.all_jobs()
                job_id = known[0].job_id if known else cluster.submit(**scenario.document).job_id
            while steps and steps[0](cluster, job_id):
                steps.pop(0)
            if not steps:
                return job_id
            cluster.tick()
        except Crash:
            cluster.die()
            cluster.boot()
    raise AssertionError(f"stuck before {len(steps)} more steps: {cluster.all_jobs()}")


def points_of(directory: Path, scenario: Scenario) -> tuple[list[str], int]:
    """The points that a scenario passes, and how many of them before its job trains."""
    reached: list[str] = []
    cluster = Cluster(directory, scenario.script)
    failpoints.arm(reached.append)
    play(cluster, replace(scenario, steps=(reaches(JobStatus.TRAINING),)))
    start = len(reached)
    play(cluster, scenario)
    failpoints.arm(None)
    cluster.database.close()
    return reached, start


def check(cluster: Cluster, job_id: str, scenario: Scenario) -> None:
    job = cluster.job(job_id)
    assert len(cluster.all_jobs()) == 1, "the job was lost or doubled"
    assert job.status is scenario.end
    assert job.status in TERMINAL
    assert job.attempt is None
    assert cluster.allocated() == 0, "resources were not released"
    assert cluster.most_alive.get(job_id, 0) <= 1, "two attempts ran at the same time"
    assert not cluster.world.alive(), "a worker was left running"
    assert len(set(cluster.world.started)) == len(cluster.world.started), "an attempt was started twice"
    ran = {attempt for attempt, _ in cluster.world.started}
    assert len(ran) == scenario.attempts, "an attempt too many or too few ran"
    told = cluster.events(job_id)
    assert [event.seq for event in told] == list(range(1, len(told) + 1))
    status = None
    for event in told:
        if event.type == "status":
            assert event.from_status is status
            edges = {edge.to for (source, _), edge in TRANSITIONS.items() if source is status}
            assert event.to_status in edges
            status = event.to_status
    noted = [event.data["checkpoint_id"] for event in told if event.type == "checkpoint"]
    assert len(noted) == len(set(noted)), "a checkpoint was taken in twice"
    assert {checkpoint.checkpoint_id for checkpoint in cluster.checkpoints(job_id)} == set(noted)


# A gang starts and completes as one node does; who fails, is cancelled or serves passes no point of another kind.
PROVEN_BY_OTHERS = ("completes", "failed", "cancelled", "service")
NAMES = [pytest.param(name, marks=pytest.mark.long if name in PROVEN_BY_OTHERS else ()) for name in SCENARIOS]


@pytest.mark.parametrize("name", NAMES)
def test_server_killed_at_every_point_loses_nothing(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    reached, start = points_of(tmp_path / "undisturbed", scenario)
    points = len(reached)
    first = 0
    if scenario.starts_like:
        known, first = points_of(tmp_path / "known", SCENARIOS[scenario.starts_like])
        assert reached[:start] == known[:first]
    assert points - first > 10
    for point in range(first, points):
        cluster = Cluster(tmp_path / str(point), scenario.script)
        passed = itertools.count()

        def crash(reached: str, passed: Iterator[int] = passed, point: int = point) -> None:
            if next(passed) == point:
                raise Crash(reached)

        failpoints.arm(crash)
        try:
            job_id = play(cluster, scenario)
            check(cluster, job_id, scenario)
        except AssertionError as error:
            raise AssertionError(f"killed at point {point} of {points}: {error}") from error
        finally:
            failpoints.arm(None)
            cluster.database.close()

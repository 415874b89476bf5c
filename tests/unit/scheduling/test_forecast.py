"""When jobs end and when others start, as far as that can be known."""

from __future__ import annotations

from typing import Any

from trainmaster.protocol.launch import Lifetime
from trainmaster.protocol.reasons import StopCause
from trainmaster.server.core.job import Attempt, Job, JobProgress
from trainmaster.server.core.resources import Gpu, Needs, Node, Share
from trainmaster.server.core.states import JobStatus
from trainmaster.server.scheduling.obstacles import estimated_waits, expected_end
from trainmaster.server.scheduling.view import ClusterView

NOW = 1_000_000.0


def job(job_id: str, gpus: int, *, at: float = NOW - 1, **more: Any) -> Job:
    return Job(
        account_id="a",
        job_id=job_id,
        name=job_id,
        root_job_id=job_id,
        created_at=at,
        queued_at=at,
        spec_version=1,
        spec={},
        workload_kind="command",
        backend="local",
        updated_at=at,
        status_at=at,
        **{"status": JobStatus.QUEUED, "needs": Needs(gpus_per_node=gpus), **more},
    )


def running(job_id: str, *gpus: int, since: float = NOW, stop: dict[str, Any] | None = None, **more: Any) -> Job:
    attempt = Attempt(
        number=1,
        token="",
        backend="local",
        shares=(Share(node_id="n", gpus=gpus),),
        created_at=since,
        started_at=since,
        **(stop or {}),
    )
    return job(job_id, len(gpus), status=JobStatus.TRAINING, attempt=attempt, attempt_count=1, **more)


def cluster(gpus: int, *jobs: Job) -> ClusterView:
    units = tuple(Gpu(index=index, device=str(index), type="H100", memory_mb=81920) for index in range(gpus))
    node = Node(node_id="n", backend="local", hostname="h", cpu_cores=8, ram_mb=1, storage_mb=1, gpus=units)
    return ClusterView().with_nodes([node]).with_jobs(jobs)


def waits(view: ClusterView) -> dict[str, float]:
    return estimated_waits(view, [job.job_id for job in view.queued()], now=NOW)


def test_end_is_the_earlier_of_limit_and_progress() -> None:
    assert expected_end(running("j", 0, max_runtime_s=600.0)) == NOW + 600
    halfway = JobProgress(step=5, eta_s=300.0, step_at=NOW + 10)
    assert expected_end(running("j", 0, max_runtime_s=600.0, progress=halfway)) == NOW + 310
    assert expected_end(running("j", 0, progress=halfway)) == NOW + 310
    assert expected_end(running("j", 0)) is None


def test_end_follows_from_the_pace_of_a_job_that_says_how_many_steps_there_are() -> None:
    paced = JobProgress(step=30, total_steps=100, first_step=10, first_at=NOW + 5, step_at=NOW + 45)
    assert expected_end(running("j", 0, progress=paced)) == NOW + 45 + 70 * 2
    assert (
        expected_end(running("j", 0, progress=JobProgress(step=30, first_step=10, first_at=5.0, step_at=45.0))) is None
    )


def test_progress_of_an_earlier_attempt_counts_from_the_start_of_this_one() -> None:
    earlier = JobProgress(step=5, eta_s=300.0, step_at=NOW - 5000)
    assert expected_end(running("j", 0, progress=earlier)) == NOW + 300


def test_job_that_is_being_stopped_ends_with_its_grace_period() -> None:
    stop = {"stop": StopCause.PREEMPT, "stop_at": NOW, "stop_grace_s": 30.0}
    assert expected_end(running("j", 0, stop=stop, max_runtime_s=600.0)) == NOW + 30


def test_service_has_no_end() -> None:
    assert expected_end(running("j", 0, lifetime=Lifetime.SERVICE, max_runtime_s=600.0)) is None


def test_waits_add_up_along_the_queue() -> None:
    first = job("first", 1, at=NOW - 20, max_runtime_s=100.0)
    second = job("second", 1, at=NOW - 10, max_runtime_s=100.0)
    view = cluster(1, running("holder", 0, max_runtime_s=600.0), first, second)
    assert waits(view) == {"first": 600.0, "second": 700.0}


def test_job_that_starts_at_once_waits_no_time() -> None:
    assert waits(cluster(1, job("j", 1))) == {"j": 0.0}


def test_nothing_is_said_where_an_end_is_not_known_or_never_comes() -> None:
    view = cluster(1, running("holder", 0), job("j", 1))
    assert waits(view) == {}
    assert waits(cluster(1, job("too-big", 2))) == {}


def test_back_off_is_part_of_the_wait() -> None:
    assert waits(cluster(1, job("j", 1, not_before=NOW + 40))) == {"j": 40.0}

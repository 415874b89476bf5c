"""Jobs for tests of the pure core."""

from __future__ import annotations

from typing import Any

from trainmaster.server.core import observations
from trainmaster.server.core.commands import submit
from trainmaster.server.core.job import Change, Job
from trainmaster.server.core.reports import AttemptObservation, Liveness, NodeObservation
from trainmaster.server.core.resources import Share
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.core.spec.submit import compile_job

NOW = 1_000_000.0


def new_job(*, node_count: int = 1, service: bool = False, max_retries: int = 0, **document: Any) -> Job:
    """A PENDING job."""
    argv = ["serve"] if service else ["train"]
    request = parse_submit(
        {
            "name": "a job",
            "workload": {"kind": "service" if service else "command", "argv": argv},
            "resource_config": {"gpu_count": 0, "node_count": node_count},
            "scheduling_config": {"max_retries": max_retries},
            **document,
        }
    )
    return submit(
        compile_job(request),
        account_id="a",
        job_id="job-1",
        created_by="k",
        now=NOW,
        default_backend="local",
    ).job


def settled(change: Change | None) -> Job:
    """The job after a change that must be one."""
    assert change is not None
    return change.job


def placed(job: Job, *, now: float = NOW) -> Job:
    """The job, placed on as many nodes as it wants."""
    if job.status == "PENDING":
        job = settled(observations.admit(job, now=now))
    shares = [Share(node_id=f"n{index}") for index in range(job.needs.node_count)]
    return settled(observations.place(job, now=now, shares=shares, token=f"token-{job.attempt_count + 1}"))


def observation(job: Job, *nodes: NodeObservation) -> AttemptObservation:
    """What is seen of the current attempt."""
    return AttemptObservation(attempt=job.live.number, nodes=nodes)


def seen(
    *types: str, ended: dict[str, Any] | None = None, liveness: Liveness = Liveness.ALIVE, **more: Any
) -> NodeObservation:
    """A node whose worker and ranks said these things; one that is ready is reached."""
    records = [{"type": kind, "t": NOW, **more} for kind in types]
    endpoint = "127.0.0.1:8000" if "ready" in types else None
    return NodeObservation(liveness=liveness, records=records, exit=ended, endpoint=endpoint)


def training(job: Job, *, now: float = NOW) -> Job:
    """The job, running on all its nodes."""
    job = placed(job, now=now)
    records = ("claimed", "started", "ready") if job.is_service else ("claimed", "started")
    return settled(observations.observe(job, observation(job, *(seen(*records) for _ in job.live.shares)), now=now))

"""Small clusters for tests of the scheduler: nodes, jobs that wait and jobs that run, without a spec."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainmaster.protocol.launch import Lifetime
from trainmaster.protocol.reasons import StopCause
from trainmaster.server.core.job import Attempt, Job
from trainmaster.server.core.resources import Gpu, Needs, Node, Share
from trainmaster.server.core.states import JobStatus
from trainmaster.server.scheduling.schedule import Plan, schedule
from trainmaster.server.scheduling.view import ClusterView

NOW = 1_000_000.0


def node(name: str = "a", gpus: int = 0, kind: str = "H100-80GB", **more: Any) -> Node:
    units = tuple(Gpu(index=index, device=str(index), type=kind, memory_mb=81920) for index in range(gpus))
    values = {"cpu_cores": 64, "ram_mb": 64_000, "storage_mb": 100_000, "slots": 16, "gpus": units, **more}
    return Node(node_id=name, backend="local", hostname="h", **values)


def waiting(
    job_id: str,
    gpus: int | None = 0,
    *,
    count: int = 1,
    at: float = NOW,
    priority: int = 5,
    needs: Mapping[str, Any] | None = None,
    runtime: float | None = None,
    service: bool = False,
    **more: Any,
) -> Job:
    """A queued job that wants so many GPUs on each of its nodes."""
    return Job(
        account_id="a",
        job_id=job_id,
        name=job_id,
        created_at=at,
        queued_at=at,
        updated_at=at,
        status_at=at,
        root_job_id=job_id,
        spec_version=1,
        spec={},
        workload_kind="command",
        lifetime=Lifetime.SERVICE if service else Lifetime.BATCH,
        backend="local",
        priority=priority,
        needs=Needs(node_count=count, gpus_per_node=gpus, **(needs or {})),
        max_runtime_s=runtime,
        status=JobStatus.QUEUED,
        **more,
    )


def started(job: Job, shares: Iterable[Share], *, now: float = NOW) -> Job:
    """The job with these shares."""
    attempt = Attempt(
        number=job.attempt_count + 1,
        token="t",
        backend="local",
        shares=tuple(shares),
        created_at=now,
        started_at=now,
    )
    return job.evolve(status=JobStatus.TRAINING, attempt=attempt, attempt_count=attempt.number, room_at=None)


def running(job_id: str, where: Mapping[str, Sequence[int]], *, now: float = NOW, **more: Any) -> Job:
    """A job that holds these GPUs of these nodes."""
    job = waiting(job_id, len(next(iter(where.values()))), count=len(where), at=now, **more)
    needs = job.needs
    shares = [
        Share(
            node_id=name,
            gpus=tuple(gpus),
            cpu_cores=needs.cpu_cores,
            ram_mb=needs.ram_mb,
            storage_mb=needs.storage_mb,
        )
        for name, gpus in where.items()
    ]
    return started(job, shares, now=now)


def stopped(job: Job, *, now: float = NOW, grace_s: float = 30.0) -> Job:
    """The job, told to stop."""
    attempt = job.live.evolve(stop=StopCause.PREEMPT, stop_at=now, stop_grace_s=grace_s)
    return job.evolve(attempt=attempt)


def ended(job: Job) -> Job:
    """The job, over."""
    return job.evolve(status=JobStatus.COMPLETED, attempt=None)


def view_of(nodes: Iterable[Node], *jobs: Job, queues: Iterable[Any] = ()) -> ClusterView:
    return ClusterView().with_nodes(nodes).with_queues(queues).with_jobs(jobs)


def names(plan: Plan) -> list[str]:
    return [placement.job.job_id for placement in plan.placements]


def starts(view: ClusterView, *, now: float = NOW, **more: Any) -> list[str]:
    return names(schedule(view, now=now, **more))


def victims(plan: Plan) -> dict[str, list[str]]:
    """By the job that they make room for."""
    found: dict[str, list[str]] = {}
    for each in plan.preemptions:
        found.setdefault(each.by.job_id, []).append(each.victim.job_id)
    return found


def carried_out(view: ClusterView, plan: Plan, *, now: float) -> ClusterView:
    """The view after a plan: what was placed runs, who was preempted is being stopped."""
    changed = [started(each.job, each.shares, now=now) for each in plan.placements]
    changed += [stopped(each.victim, now=now) for each in plan.preemptions]
    by = {each.by.job_id: each.by for each in plan.preemptions}
    changed += [job.evolve(room_at=now if job.room_at is None else job.room_at) for job in by.values()]
    return view.with_jobs(changed)


def over_allocated(view: ClusterView) -> list[str]:
    """Nodes of which more is held than they have."""
    wrong = []
    for name, machine in view.nodes.items():
        shares = [share for job in view.holding.values() for share in job.live.shares if share.node_id == name]
        gpus = [index for share in shares for index in share.gpus]
        if (
            len(gpus) != len(set(gpus))
            or not set(gpus) <= {gpu.index for gpu in machine.gpus}
            or sum(share.cpu_cores for share in shares) > machine.cpu_cores
            or sum(share.ram_mb for share in shares) > machine.ram_mb
            or sum(share.storage_mb for share in shares) > machine.storage_mb
            or len(shares) > machine.slots
        ):
            wrong.append(name)
    return wrong

"""Jobs and changes to store, and short ways to store and read them."""

from __future__ import annotations

from typing import Any

from trainmaster.server.core.job import Attempt, Change, CheckpointRecord, Job, JobEvent
from trainmaster.server.core.resources import Gpu, Node, Share
from trainmaster.server.core.states import Actor, JobStatus
from trainmaster.server.store import jobs, nodes
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

EVERYTHING = Scope.everything()
ACME = Scope("acme")
OTHER = Scope("other")


def new_job(job_id: str = "job-1", **fields: Any) -> Job:
    values: dict[str, Any] = {
        "account_id": "acme",
        "job_id": job_id,
        "root_job_id": job_id,
        "name": f"the job {job_id}",
        "spec_version": 1,
        "spec": {"name": "n", "workload": {"kind": "command", "argv": ["true"]}},
        "workload_kind": "command",
        "backend": "local",
        "status": JobStatus.QUEUED,
        "created_at": 1000.0,
        "updated_at": 1000.0,
        "status_at": 1000.0,
        "event_count": 1,
    }
    return Job(**{**values, **fields})


def event_of(job: Job, seq: int, **fields: Any) -> JobEvent:
    values: dict[str, Any] = {
        "job_id": job.job_id,
        "seq": seq,
        "at": 1000.0 + seq,
        "type": "status",
        "actor": Actor.API,
        "attempt": job.attempt_count,
        "to_status": job.status,
    }
    return JobEvent(**{**values, **fields})


def submission_of(job: Job) -> Change:
    return Change(job=job, events=tuple(event_of(job, seq) for seq in range(1, job.event_count + 1)))


def change_of(
    job: Job, *, ended: Attempt | None = None, checkpoints: tuple[CheckpointRecord, ...] = (), **fields: Any
) -> Change:
    """What a decision would make of a job: the next version, with one more event."""
    changed = job.evolve(version=job.version + 1, event_count=job.event_count + 1, **fields)
    return Change(job=changed, events=(event_of(changed, changed.event_count),), ended=ended, checkpoints=checkpoints)


def placement_of(job: Job, *shares: Share) -> Change:
    number = job.attempt_count + 1
    attempt = Attempt(number=number, token=f"token-{number}", backend="local", shares=shares, created_at=1001.0)
    return change_of(job, status=JobStatus.SCHEDULING, attempt=attempt, attempt_count=number)


def end_of(job: Job, **fields: Any) -> Change:
    attempt = job.live.evolve(ended_at=1002.0)
    return change_of(job, **{"status": JobStatus.COMPLETED, "attempt": None, "ended": attempt, **fields})


def checkpoint_of(job: Job, checkpoint_id: str, step: int) -> CheckpointRecord:
    return CheckpointRecord(
        checkpoint_id=checkpoint_id,
        job_id=job.job_id,
        attempt=1,
        step=step,
        created_at=1000.0 + step,
        metrics={"loss": 1 / (step + 1)},
        size_bytes=2**40,
        root="artifacts",
        path=f"{job.job_id}/{checkpoint_id}",
    )


def node_of(node_id: str, **fields: Any) -> Node:
    values: dict[str, Any] = {
        "backend": "local",
        "hostname": f"host of {node_id}",
        "cpu_cores": 8,
        "ram_mb": 8000,
        "storage_mb": 800,
        "gpus": tuple(Gpu(index=index, device=str(index), type="H100", memory_mb=80_000) for index in range(4)),
        "slots": 4,
        "last_seen_at": 1000.0,
    }
    return Node(node_id=node_id, **{**values, **fields})


def report(database: Database, *inventory: Node) -> None:
    database.write_now(lambda connection: nodes.put(connection, EVERYTHING, inventory))


def submit(database: Database, job: Job) -> Job:
    database.write_now(lambda connection: jobs.insert(connection, EVERYTHING, submission_of(job)))
    return job


def apply(database: Database, change: Change) -> Job:
    """Store a change that must not be stale."""
    assert database.write_now(lambda connection: jobs.apply(connection, EVERYTHING, change))
    return change.job


def stored(database: Database, job_id: str) -> Job:
    with database.read() as connection:
        return jobs.get(connection, EVERYTHING, job_id, deleted=True)

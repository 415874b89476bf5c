"""Commands on checkpoints: pin, expire, publish, delete, and pruning. The pure decisions are in `core.retention`."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from sqlalchemy import Connection

from trainmaster.coordinator.commands import Commands, Idempotency, Outcome
from trainmaster.core import retention
from trainmaster.core.errors import NotFoundError
from trainmaster.core.job import Change, Checkpoint, Job
from trainmaster.store import checkpoints, jobs
from trainmaster.store.scope import Scope


def pin(
    commands: Commands,
    scope: Scope,
    job_id: str,
    checkpoint_id: str,
    *,
    pinned: bool,
    idempotency: Idempotency | None = None,
    clock: Callable[[], float] = time.time,
) -> Future[Outcome]:
    """Keep a checkpoint whatever the limits say, or do so no more; the latter also of a deleted job."""

    def decide(connection: Connection, job: Job) -> Change | None:
        checkpoint, _ = _among(connection, job, checkpoint_id)
        change = retention.pin(job, checkpoint, pinned=pinned, now=clock())
        checkpoints.pin(connection, scope, job, checkpoint_id, pinned=pinned)
        return change

    return commands.change(scope, job_id, decide, deleted=True, idempotency=idempotency)


def expire_at(
    commands: Commands,
    scope: Scope,
    job_id: str,
    checkpoint_id: str,
    at: float | None,
    *,
    deleted: bool = False,
    clock: Callable[[], float] = time.time,
) -> Future[Outcome]:
    """Have a checkpoint go by itself at a time; None: never. With `deleted`, also one of a deleted job."""

    def decide(connection: Connection, job: Job) -> Change | None:
        checkpoint, _ = _among(connection, job, checkpoint_id)
        change = retention.expire_at(job, checkpoint, at, now=clock())
        checkpoints.expire_at(connection, scope, job, checkpoint_id, at)
        return change

    return commands.change(scope, job_id, decide, deleted=deleted)


def publish(
    commands: Commands,
    scope: Scope,
    job_id: str,
    checkpoint_id: str,
    *,
    public: bool,
    deleted: bool = False,
    clock: Callable[[], float] = time.time,
) -> Future[Outcome]:
    """Let others load a checkpoint, or no more. With `deleted`, also one of a deleted job."""

    def decide(connection: Connection, job: Job) -> Change | None:
        checkpoint, _ = _among(connection, job, checkpoint_id)
        change = retention.publish(job, checkpoint, public=public, now=clock())
        checkpoints.publish(connection, scope, job, checkpoint_id, public=public)
        return change

    return commands.change(scope, job_id, decide, deleted=deleted)


def delete(
    commands: Commands,
    scope: Scope,
    job_id: str,
    checkpoint_id: str,
    *,
    deleted: bool = False,
    idempotency: Idempotency | None = None,
    clock: Callable[[], float] = time.time,
) -> Future[Outcome]:
    """Remove a checkpoint: at once from all lists, soon from the disk. With `deleted`, also one of a deleted job."""

    def decide(connection: Connection, job: Job) -> Change | None:
        checkpoint, others = _among(connection, job, checkpoint_id)
        # Of the whole account: any job of it may go on from this one.
        users = checkpoints.users(connection, Scope(job.account_id), [checkpoint_id]).get(checkpoint_id, set())
        change = retention.delete_checkpoint(job, checkpoint, others=others, users=users, now=clock())
        checkpoints.hide(connection, scope, job, [checkpoint_id])
        return change

    return commands.change(scope, job_id, decide, deleted=deleted, idempotency=idempotency)


def prune(connection: Connection, job: Job) -> Job:
    """Take the checkpoints of a job beyond its limit out of sight, in a transaction; the job afterwards.

    Their files go with the next sweep (`coordinator.retention`).
    """
    limit = retention.checkpoint_limit(job)
    scope = Scope(job.account_id)
    # Counted first: a job may report thousands, and everybody's writes wait meanwhile.
    if limit is None or checkpoints.count(connection, scope, job.job_id) <= limit:
        return job
    present = checkpoints.of_job(connection, scope, job.job_id)
    surplus = retention.surplus_checkpoints(job, present, in_use=())
    if not surplus:
        return job
    in_use = checkpoints.users(connection, scope, [checkpoint.checkpoint_id for checkpoint in surplus])
    doomed = retention.surplus_checkpoints(job, present, in_use=in_use)
    others = retention.without(present, doomed)
    change = retention.prune(job, doomed, others=others, now=job.updated_at)
    if not doomed or change is None or not jobs.apply(connection, scope, change):
        return job
    checkpoints.hide(connection, scope, job, [checkpoint.checkpoint_id for checkpoint in doomed])
    return change.job


def _among(connection: Connection, job: Job, checkpoint_id: str) -> tuple[Checkpoint, list[Checkpoint]]:
    """A checkpoint of a job, and the job's others."""
    found = checkpoints.of_job(connection, Scope(job.account_id), job.job_id)
    others = [checkpoint for checkpoint in found if checkpoint.checkpoint_id != checkpoint_id]
    chosen = next((checkpoint for checkpoint in found if checkpoint.checkpoint_id == checkpoint_id), None)
    if chosen is None:
        raise NotFoundError(f"job {job.job_id} has no checkpoint {checkpoint_id}")
    return chosen, others

"""Commands on checkpoints: pin, expire, publish, delete, and pruning. The pure decisions are in `core.retention`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from sqlalchemy import Connection

from trainmaster.server.coordinator.commands import CommandOutcome, Commands, Idempotency
from trainmaster.server.core import retention
from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.core.job import Change, CheckpointRecord, Job
from trainmaster.server.store import checkpoints, jobs
from trainmaster.server.store.scope import Scope

_DECISIONS: Mapping[str, Callable[[Job, CheckpointRecord, Any, float], Change | None]] = {
    "pinned": lambda job, checkpoint, pinned, now: retention.pin(job, checkpoint, pinned=pinned, now=now),
    "public": lambda job, checkpoint, public, now: retention.publish(job, checkpoint, public=public, now=now),
    "expires_at": lambda job, checkpoint, at, now: retention.expire_at(job, checkpoint, at, now=now),
}


def edit(
    commands: Commands,
    scope: Scope,
    job_id: str,
    checkpoint_id: str,
    field: str,
    value: bool | float | None,
    *,
    now: float,
    idempotency: Idempotency | None = None,
) -> Future[CommandOutcome]:
    """Set `pinned`, `public` or `expires_at` of a checkpoint, also of a deleted job."""

    def decide(connection: Connection, job: Job) -> Change | None:
        change = _DECISIONS[field](job, _own(connection, job, checkpoint_id), value, now)
        checkpoints.change(connection, scope, job, checkpoint_id, **{field: value})
        return change

    return commands.change(scope, job_id, decide, deleted=True, idempotency=idempotency)


def delete(
    commands: Commands,
    scope: Scope,
    job_id: str,
    checkpoint_id: str,
    *,
    now: float,
    idempotency: Idempotency | None = None,
) -> Future[CommandOutcome]:
    """Delete a checkpoint, also of a deleted job: at once from all lists, soon from the disk."""

    def decide(connection: Connection, job: Job) -> Change | None:
        checkpoint = _own(connection, job, checkpoint_id)
        others = left_beside(connection, job, [checkpoint])
        # Any job of the account may resume from this one.
        users = checkpoints.users(connection, Scope(job.account_id), [checkpoint_id]).get(checkpoint_id, set())
        change = retention.delete_checkpoint(job, checkpoint, others=others, users=users, now=now)
        checkpoints.hide(connection, scope, job, [checkpoint_id])
        return change

    return commands.change(scope, job_id, decide, deleted=True, idempotency=idempotency)


def prune(connection: Connection, job: Job) -> Job:
    """Hide the checkpoints of a job beyond its limit, in a transaction, unless a job resumes from them; returns the job
    afterwards. Only those checkpoints are read, because all other writes wait meanwhile."""
    limit = retention.checkpoint_limit(job)
    scope = Scope(job.account_id)
    surplus = 0 if limit is None else checkpoints.count_limited(connection, scope, job) - limit
    if surplus <= 0:
        return job
    oldest = checkpoints.oldest_limited(connection, scope, job, surplus)
    kept = {job.latest_checkpoint_id, *checkpoints.users(connection, scope, [each.checkpoint_id for each in oldest])}
    doomed = [each for each in oldest if each.checkpoint_id not in kept]
    change = retention.prune(job, doomed, now=job.updated_at)
    if not doomed or change is None or not jobs.apply(connection, scope, change):
        return job
    checkpoints.hide(connection, scope, job, [checkpoint.checkpoint_id for checkpoint in doomed])
    return change.job


def left_beside(connection: Connection, job: Job, gone: Sequence[CheckpointRecord]) -> list[CheckpointRecord]:
    """What `latest` and `best` of a job may move to when some checkpoints go, the oldest first: the newest of the
    others and, where the best goes, all of them."""
    scope = Scope(job.account_id)
    if job.best_checkpoint_id in {each.checkpoint_id for each in gone}:
        return retention.without(checkpoints.of_job(connection, scope, job.job_id), gone)
    return retention.without(checkpoints.newest_of_job(connection, scope, job.job_id, most=len(gone) + 1), gone)[-1:]


def _own(connection: Connection, job: Job, checkpoint_id: str) -> CheckpointRecord:
    found = checkpoints.named(connection, Scope(job.account_id), job.job_id, [checkpoint_id])
    if not found:
        raise NotFoundError(f"job {job.job_id} has no checkpoint {checkpoint_id}")
    return found[0]

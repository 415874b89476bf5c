"""Checkpoints: those that were committed, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, delete, insert, select

from trainmaster.core.errors import NotFoundError
from trainmaster.core.job import Checkpoint, Job
from trainmaster.store import schema
from trainmaster.store.records import CHECKPOINT_FIELDS, checkpoint_from_row, checkpoint_to_row
from trainmaster.store.scope import Scope

_checkpoints = schema.checkpoints

_SELECT = select(*(_checkpoints.c[name] for name in CHECKPOINT_FIELDS))
_INSERT = insert(_checkpoints)


def register(connection: Connection, scope: Scope, job: Job, checkpoints: Sequence[Checkpoint]) -> None:
    """Add checkpoints of a job; one whose id is there already stays as it is."""
    scope.require(job.account_id)
    if not checkpoints:
        return
    by_id = {checkpoint.checkpoint_id: checkpoint for checkpoint in checkpoints}
    present = connection.execute(
        select(_checkpoints.c.checkpoint_id).where(
            _checkpoints.c.checkpoint_id.in_(by_id), _checkpoints.c.account_id == job.account_id
        )
    )
    for checkpoint_id in present.scalars():
        del by_id[checkpoint_id]
    if by_id:
        connection.execute(_INSERT, [checkpoint_to_row(job, checkpoint) for checkpoint in by_id.values()])


def of_job(connection: Connection, scope: Scope, job_id: str) -> list[Checkpoint]:
    """The checkpoints of a job, the oldest first."""
    query = _SELECT.where(_checkpoints.c.job_id == job_id).order_by(_checkpoints.c.created_at, _checkpoints.c.step)
    return [checkpoint_from_row(row) for row in connection.execute(scope.limit(query, _checkpoints.c.account_id))]


def get(connection: Connection, scope: Scope, checkpoint_id: str) -> Checkpoint:
    """One checkpoint of the scope's account: code inside jobs names them, so ids are unique only there.

    Raises:
        NotFoundError: the account has none of this id.
    """
    query = _SELECT.where(_checkpoints.c.checkpoint_id == checkpoint_id, _checkpoints.c.account_id == scope.account)
    row = connection.execute(query).one_or_none()
    if row is None:
        raise NotFoundError(f"there is no checkpoint {checkpoint_id}")
    return checkpoint_from_row(row)


def forget(connection: Connection, scope: Scope, job: Job) -> None:
    """Drop all checkpoints of a job, whose files are gone."""
    scope.require(job.account_id)
    connection.execute(
        delete(_checkpoints).where(_checkpoints.c.job_id == job.job_id, _checkpoints.c.account_id == job.account_id)
    )

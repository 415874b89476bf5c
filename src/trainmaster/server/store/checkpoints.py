"""Checkpoints; functions return committed ones unless they say otherwise. Deleting hides a checkpoint first and forgets
it once its files are gone, so that a crash in between loses neither."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import sqlalchemy as sa
from sqlalchemy import ColumnElement, Connection, Select, and_, bindparam, delete, func, insert, or_, select, update

from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.core.job import CheckpointRecord, Job
from trainmaster.server.core.retention import COMMITTED, DELETING
from trainmaster.server.core.states import UNFINISHED
from trainmaster.server.store import schema
from trainmaster.server.store.page_tokens import MAX_TOTAL_COUNT, bad_token, position_of, token_after
from trainmaster.server.store.records import Records, ScopedQuery, portions
from trainmaster.server.store.scope import Scope

_checkpoints, _jobs, _attempts = schema.checkpoints, schema.jobs, schema.attempts

RECORDS = Records(CheckpointRecord, _checkpoints)
_IS_COMMITTED = _checkpoints.c.status == COMMITTED
_OLDEST_FIRST = (_checkpoints.c.created_at, _checkpoints.c.step)
_NEWEST_FIRST = (_checkpoints.c.created_at.desc(), _checkpoints.c.step.desc())
_COMMITTED_OF_JOB = RECORDS.select.where(_IS_COMMITTED, _checkpoints.c.job_id == bindparam("key"))
_OF_JOB = ScopedQuery(_COMMITTED_OF_JOB.order_by(*_OLDEST_FIRST), _checkpoints.c.account_id)
_NEWEST_OF_JOB = ScopedQuery(
    _COMMITTED_OF_JOB.order_by(*_NEWEST_FIRST).limit(bindparam("most")), _checkpoints.c.account_id
)

MOST_SHOWN = 1000
"""Checkpoints of a job that are shown with it: code inside jobs reports them, perhaps tens of thousands."""


def register(connection: Connection, scope: Scope, job: Job, checkpoints: Sequence[CheckpointRecord]) -> None:
    """Add checkpoints of a job; one whose id is there already stays as it is."""
    scope.require(job.account_id)
    if not checkpoints:
        return
    by_id = {checkpoint.checkpoint_id: checkpoint for checkpoint in checkpoints}
    c = _checkpoints.c
    for some in portions(by_id):
        present = select(c.checkpoint_id).where(c.checkpoint_id.in_(some), c.account_id == job.account_id)
        for checkpoint_id in connection.execute(present).scalars():
            del by_id[checkpoint_id]
    if by_id:
        rows = [RECORDS.to_row(checkpoint, account_id=job.account_id) for checkpoint in by_id.values()]
        connection.execute(insert(_checkpoints), rows)


def of_job(connection: Connection, scope: Scope, job_id: str) -> list[CheckpointRecord]:
    """The checkpoints of a job, the oldest first."""
    return [RECORDS.from_row(row) for row in _OF_JOB.rows(connection, scope, key=job_id)]


def newest_of_job(
    connection: Connection, scope: Scope, job_id: str, *, most: int = MOST_SHOWN
) -> list[CheckpointRecord]:
    """The newest checkpoints of a job, the oldest of them first."""
    rows = _NEWEST_OF_JOB.rows(connection, scope, key=job_id, most=most)
    return [RECORDS.from_row(row) for row in reversed(rows)]


def count_limited(connection: Connection, scope: Scope, job: Job) -> int:
    query = select(func.count()).where(*_limited(job))
    return int(connection.execute(scope.limit(query, _checkpoints.c.account_id)).scalar_one())


def oldest_limited(connection: Connection, scope: Scope, job: Job, most: int) -> list[CheckpointRecord]:
    return RECORDS.find(connection, scope, *_limited(job), order_by=_OLDEST_FIRST, limit=most)


def get(connection: Connection, scope: Scope, checkpoint_id: str) -> CheckpointRecord:
    """One checkpoint of the scope's account: code inside jobs names checkpoints, so ids are unique only there."""
    this, missing = _checkpoints.c.checkpoint_id == checkpoint_id, f"there is no checkpoint {checkpoint_id}"
    return RECORDS.get(connection, Scope(scope.account), _IS_COMMITTED, this, missing=missing)


def by_name(connection: Connection, scope: Scope, job_id: str, kind: str, name: str) -> CheckpointRecord:
    """The latest checkpoint of a kind that users of a trainer service saved under a name, in one job."""
    c = _checkpoints.c
    these = (*_committed_of(job_id), c.kind == kind, c.name == name)
    found = RECORDS.first(connection, scope, *these, order_by=[c.created_at.desc(), c.checkpoint_id.desc()])
    if found is None:
        raise NotFoundError(f"job {job_id} has no {kind} checkpoint {name!r}")
    return found


def overdue(
    connection: Connection, scope: Scope, now: float, *, job_id: str | None = None, limit: int = 1000
) -> list[CheckpointRecord]:
    """Checkpoints that have expired and are not pinned; of one job, or of all."""
    of_job = () if job_id is None else (_checkpoints.c.job_id == job_id,)
    expired = (_IS_COMMITTED, _checkpoints.c.expires_at < now, ~_checkpoints.c.pinned)
    return RECORDS.find(connection, scope, *expired, *of_job, order_by=[_checkpoints.c.expires_at], limit=limit)


def change(connection: Connection, scope: Scope, job: Job, checkpoint_id: str, **values: float | bool | None) -> None:
    """Set `pinned`, `public` or `expires_at` of a checkpoint of a job."""
    scope.require(job.account_id)
    this = _checkpoints.c.checkpoint_id == checkpoint_id
    connection.execute(update(_checkpoints).where(*_of(job), this).values(values))


def hide(connection: Connection, scope: Scope, job: Job, checkpoint_ids: Collection[str]) -> None:
    """Hide checkpoints of a job, whose files are to be deleted."""
    scope.require(job.account_id)
    for some in portions(checkpoint_ids):
        named = _checkpoints.c.checkpoint_id.in_(some)
        connection.execute(update(_checkpoints).where(*_of(job), named).values(status=DELETING))


def hidden(connection: Connection, scope: Scope, limit: int = 1000) -> list[CheckpointRecord]:
    return RECORDS.find(connection, scope, _checkpoints.c.status == DELETING, limit=limit)


def overlapping(connection: Connection, scope: Scope, checkpoint: CheckpointRecord) -> list[CheckpointRecord]:
    """The job's other checkpoints at the place of one, above it or below it."""
    c = _checkpoints.c
    above = [os.fspath(parent) for parent in PurePosixPath(checkpoint.path).parents]
    place = or_(c.path.in_([checkpoint.path, *above]), c.path.startswith(f"{checkpoint.path}/", autoescape=True))
    other = (c.checkpoint_id != checkpoint.checkpoint_id, c.root == checkpoint.root)
    return RECORDS.find(connection, scope, *_committed_of(checkpoint.job_id), *other, place)


def elsewhere(connection: Connection, scope: Scope, checkpoint: CheckpointRecord) -> list[CheckpointRecord]:
    """What other jobs registered at the very place of a checkpoint: classes of one name share their directory."""
    c = _checkpoints.c
    there = (c.root == checkpoint.root, c.path == checkpoint.path, c.job_id != checkpoint.job_id)
    return RECORDS.find(connection, scope, _IS_COMMITTED, *there)


def drop(connection: Connection, scope: Scope, checkpoint: CheckpointRecord) -> None:
    """Delete the row of a hidden checkpoint, whose files are gone."""
    c = _checkpoints.c
    this = (c.checkpoint_id == checkpoint.checkpoint_id, c.job_id == checkpoint.job_id, c.status == DELETING)
    connection.execute(scope.limit(delete(_checkpoints).where(*this), c.account_id))


def users(connection: Connection, scope: Scope, checkpoint_ids: Collection[str]) -> dict[str, set[str]]:
    """Which unfinished jobs resume from which of some checkpoints, now or with their next attempt."""
    found: dict[str, set[str]] = {}
    for wanted in (_jobs.c.resume_checkpoint_id, _attempts.c.resume_checkpoint_id):
        query: Select[Any] = (
            select(wanted, _jobs.c.job_id)
            .select_from(_jobs.outerjoin(_attempts, schema.is_current_attempt))
            .where(_jobs.c.status.in_(sorted(UNFINISHED)))
        )
        for some in portions(checkpoint_ids):
            rows = connection.execute(scope.limit(query.where(wanted.in_(some)), _jobs.c.account_id))
            for checkpoint_id, job_id in rows:
                found.setdefault(checkpoint_id, set()).add(job_id)
    return found


def forget(connection: Connection, scope: Scope, job: Job) -> None:
    """Delete the rows of all checkpoints of a job, whose files are gone."""
    scope.require(job.account_id)
    connection.execute(delete(_checkpoints).where(*_of(job)))


def _limited(job: Job) -> tuple[Any, ...]:
    """What counts towards `save_total_limit`: the latest, and all others but the best, pinned and resumed ones."""
    checkpoint_id = _checkpoints.c.checkpoint_id
    apart = [name for name in (job.best_checkpoint_id, job.resume_checkpoint_id) if name is not None]
    is_latest = checkpoint_id == (job.latest_checkpoint_id or "")
    return *_committed_of(job.job_id), or_(is_latest, and_(~_checkpoints.c.pinned, checkpoint_id.not_in(apart)))


def _of(job: Job) -> tuple[ColumnElement[bool], ...]:
    return _checkpoints.c.job_id == job.job_id, _checkpoints.c.account_id == job.account_id


# Lists of a job's checkpoints, page by page: a job may have tens of thousands.

_ORDER = "created_at"
_MAX_STEP = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPage:
    """A page of the checkpoints of a job, the oldest first."""

    checkpoints: tuple[CheckpointRecord, ...]
    next_page_token: str | None
    total_count: int
    """Over all pages; at most `MAX_TOTAL_COUNT`, which means: more than one less than that."""


def page(
    connection: Connection, scope: Scope, job_id: str, *, page_size: int, page_token: str | None = None
) -> CheckpointPage:
    order = (*_OLDEST_FIRST, _checkpoints.c.checkpoint_id)
    after = () if page_token is None else (sa.tuple_(*order) > sa.tuple_(*_position(page_token)),)
    found = RECORDS.find(connection, scope, *_committed_of(job_id), *after, order_by=order, limit=page_size + 1)
    shown, more = found[:page_size], len(found) > page_size
    counted = more or page_token is not None
    return CheckpointPage(
        checkpoints=tuple(shown),
        next_page_token=page_token_after(shown[-1]) if more else None,
        total_count=_count(connection, scope, job_id) if counted else len(found),
    )


def named(connection: Connection, scope: Scope, job_id: str, checkpoint_ids: Collection[str]) -> list[CheckpointRecord]:
    found: list[CheckpointRecord] = []
    for some in portions(checkpoint_ids):
        found += RECORDS.find(connection, scope, *_committed_of(job_id), _checkpoints.c.checkpoint_id.in_(some))
    return found


def called(connection: Connection, scope: Scope, job_id: str, name: str) -> list[CheckpointRecord]:
    """What users of a trainer service saved under a name or an id."""
    c = _checkpoints.c
    named_so = or_(c.checkpoint_id == name, c.name == name)
    return RECORDS.find(connection, scope, *_committed_of(job_id), c.kind != "", named_so)


def newest_of_kind(
    connection: Connection, scope: Scope, job_id: str, kind: str, *, most: int
) -> list[CheckpointRecord]:
    """What users of a trainer service saved last, of one kind."""
    of_kind = (*_committed_of(job_id), _checkpoints.c.kind == kind)
    return RECORDS.find(connection, scope, *of_kind, order_by=_NEWEST_FIRST, limit=most)


def total_size(connection: Connection, scope: Scope, job_id: str, *, root: str) -> int | None:
    """The size of a job's checkpoints below a root, as the job reported it; None when there are none."""
    c = _checkpoints.c
    query = select(func.sum(c.size_bytes)).where(*_committed_of(job_id), c.root == root)
    total = connection.execute(scope.limit(query, c.account_id)).scalar_one()
    return None if total is None else int(total)


def paths(
    connection: Connection, scope: Scope, job_id: str, *, root: str, start: str, limit: int
) -> list[tuple[str, str]]:
    """Id and path of a job's checkpoints below a root, by id, from the id `start` on."""
    c = _checkpoints.c
    query = select(c.checkpoint_id, c.path).where(*_committed_of(job_id), c.root == root, c.checkpoint_id >= start)
    query = scope.limit(query.order_by(c.checkpoint_id).limit(limit), c.account_id)
    return [(row.checkpoint_id, row.path) for row in connection.execute(query)]


def _committed_of(job_id: str) -> tuple[ColumnElement[bool], ...]:
    return _checkpoints.c.job_id == job_id, _IS_COMMITTED


def _count(connection: Connection, scope: Scope, job_id: str) -> int:
    query = select(_checkpoints.c.checkpoint_id).where(*_committed_of(job_id)).limit(MAX_TOTAL_COUNT)
    counted = scope.limit(query, _checkpoints.c.account_id).subquery()
    return int(connection.execute(select(func.count()).select_from(counted)).scalar_one())


def page_token_after(checkpoint: CheckpointRecord) -> str:
    return token_after(_ORDER, checkpoint.created_at, f"{checkpoint.step}:{checkpoint.checkpoint_id}")


def _position(token: str) -> tuple[float, int, str]:
    created_at, place = position_of(token, _ORDER, float)
    step, _, checkpoint_id = place.partition(":")
    try:
        number = int(step)
    except ValueError:
        raise bad_token() from None
    if not 0 <= number <= _MAX_STEP:
        raise bad_token()
    return float(created_at), number, checkpoint_id

"""Jobs: inserted, changed by compare-and-set, and loaded; and when services were last used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, bindparam

from trainmaster.server.core.errors import HandleTakenError, JobNotFoundError
from trainmaster.server.core.job import Change, Job
from trainmaster.server.core.states import TERMINAL, UNFINISHED
from trainmaster.server.store import attempts, checkpoints, events, job_inputs, schema, usage
from trainmaster.server.store.records import PreparedStatement, Records, ScopedQuery, dumps, label_marks, listed
from trainmaster.server.store.scope import Scope

_IDENTITY = frozenset({"account_id", "job_id", "handle", "created_by", "created_at", "parent_job_id", "root_job_id"})
"""Never changes; an update leaves it out, and with it the indexes over it."""


def insert(connection: Connection, scope: Scope, change: Change) -> None:
    job = change.job
    require_free_handle(connection, scope, job)
    _INSERT.execute(connection, _job_to_row(job))
    _insert_labels(connection, job)
    events.append(connection, scope, job, change.events)


def require_free_handle(connection: Connection, scope: Scope, job: Job) -> None:
    """Raise HandleTakenError when another job of the account, not deleted, has the job's handle."""
    scope.require(job.account_id)
    if job.handle is not None and _with_handle(connection, job.account_id, job.handle, deleted=False):
        raise HandleTakenError(f"another job has the handle {job.handle}")


def apply(connection: Connection, scope: Scope, change: Change) -> bool:
    """Store the result of a decision, unless the job has changed since: then False, and nothing is written. An attempt
    takes its resources when it is first stored, and gives them back with the change that ends it. The end of a job
    deletes the secrets that it was given until then; a deletion deletes all secrets. The transaction must not be
    committed after a DoubleBookedError."""
    job = change.job
    scope.require(job.account_id)
    key = {"key": job.job_id, "account": job.account_id, "expected_version": job.version - 1}
    stored_labels = _STORED_LABELS.first(connection, key)
    row = _job_to_row(job)
    if not _UPDATE.execute(connection, {**row, **key}):
        return False
    if stored_labels != (row["labels"], job.deleted_at):
        connection.execute(_DELETE_LABELS, key)
        _insert_labels(connection, job)
    if change.ended is not None:
        if not attempts.put(connection, scope, job, change.ended):
            attempts.release(connection, scope, job, change.ended)
        usage.record(connection, scope, job, change.ended)
    if job.attempt is not None and attempts.put(connection, scope, job, job.attempt):
        attempts.take(connection, scope, job, job.attempt)
    events.append(connection, scope, job, change.events)
    checkpoints.register(connection, scope, job, change.checkpoints)
    if change.replaced:
        checkpoints.hide(connection, scope, job, change.replaced)
    if job.status in TERMINAL:
        job_inputs.forget_secrets(connection, scope, job, all_of_them=job.deleted_at is not None)
    return True


def get(connection: Connection, scope: Scope, job_id: str, deleted: bool = False) -> Job:
    """A job by its id or, in the scope of an account, by its handle. `deleted` also finds deleted jobs; by a handle
    only where no other job has it now, and then the last one that did."""
    for job in map(_job_from_row, _BY_ID.rows(connection, {"key": job_id})):
        if scope.admits(job.account_id) and (deleted or job.deleted_at is None):
            return job
    if scope.account_id is not None and (found := _with_handle(connection, scope.account_id, job_id, deleted=deleted)):
        return found
    raise JobNotFoundError(f"there is no job {job_id}")


def by_handle(connection: Connection, scope: Scope, handle: str) -> Job:
    """The job of the scope's account that has a handle or, where none has it, the last deleted one that had it."""
    if (found := _with_handle(connection, scope.account, handle, deleted=True)) is None:
        raise JobNotFoundError(f"there is no job {handle}")
    return found


def load(connection: Connection, scope: Scope, job_ids: Sequence[str]) -> list[Job]:
    """The named jobs that exist, deleted or not, in no particular order."""
    found = map(_job_from_row, _BY_IDS.rows(connection, {"keys": dumps(job_ids)}))
    return [job for job in found if scope.admits(job.account_id)]


def versions(connection: Connection, scope: Scope, job_ids: Sequence[str]) -> dict[str, int]:
    return dict(_VERSIONS.rows(connection, scope, keys=dumps(job_ids)))


def unfinished(connection: Connection, scope: Scope) -> list[Job]:
    return [_job_from_row(row) for row in connection.execute(scope.limit(_UNFINISHED, _jobs.c.account_id))]


def count_unfinished(connection: Connection, scope: Scope) -> int:
    statement = sa.select(sa.func.count()).where(_jobs.c.status.in_(sorted(UNFINISHED)))
    return int(connection.execute(scope.limit(statement, _jobs.c.account_id)).scalar_one())


def exist(connection: Connection, scope: Scope) -> bool:
    return connection.execute(scope.limit(sa.select(_jobs.c.job_id), _jobs.c.account_id).limit(1)).first() is not None


def to_purge(connection: Connection, scope: Scope) -> list[str]:
    """Deleted jobs whose files are to be removed."""
    return list(connection.execute(scope.limit(_TO_PURGE, _jobs.c.account_id)).scalars())


def purged(connection: Connection, scope: Scope, job_id: str) -> None:
    """Record that the files of a deleted job are gone, and delete the rows of its checkpoints."""
    job = get(connection, scope, job_id, deleted=True)
    checkpoints.forget(connection, scope, job)
    connection.execute(_PURGED, {"key": job.job_id, "account": job.account_id})


def tombstones(
    connection: Connection, scope: Scope, *, name: str | None = None, after: tuple[float, str] | None = None, limit: int
) -> list[Job]:
    """Deleted jobs that nobody has asked to purge, the last deleted first. `name` is a handle or the beginning of an
    id; `after` is when the job before the page was deleted, and its id."""
    query = scope.limit(_TOMBSTONES, _jobs.c.account_id)
    if name is not None:
        query = query.where(sa.or_(_jobs.c.handle == name, _jobs.c.job_id.startswith(name, autoescape=True)))
    if after is not None:
        query = query.where(sa.tuple_(_jobs.c.deleted_at, _jobs.c.job_id) < sa.tuple_(*after))
    return [_job_from_row(row) for row in connection.execute(query.limit(limit))]


def _insert_labels(connection: Connection, job: Job) -> None:
    """Insert the labels of a job unless it was deleted: no list shows it."""
    if job.labels and job.deleted_at is None:
        marks = label_marks(job.labels)
        owner = {"account_id": job.account_id, "job_id": job.job_id, "created_at": job.created_at, "marks": marks}
        _INSERT_LABELS.execute_many(connection, [{**owner, "key": k, "value": v} for k, v in job.labels.items()])


def _job_to_row(job: Job) -> dict[str, Any]:
    number = None if job.attempt is None else job.attempt.number
    return _RECORDS.to_row(job, order_key=job.order_key, attempt_number=number)


def _job_from_row(row: Sequence[Any]) -> Job:
    """The job of its row, followed by the row of its current attempt (all NULL where there is none)."""
    of_job, of_attempt = row[: len(_RECORDS.fields)], row[len(_RECORDS.fields) :]
    return _RECORDS.from_row(of_job, attempt=None if of_attempt[0] is None else attempts.RECORDS.from_row(of_attempt))


def _with_handle(connection: Connection, account_id: str, handle: str, *, deleted: bool) -> Job | None:
    for query in (_BY_HANDLE, _BY_HANDLE_ONCE) if deleted else (_BY_HANDLE,):
        row = connection.execute(query, {"account": account_id, "handle_": handle}).first()
        if row is not None:
            return _job_from_row(row)
    return None


_jobs, _attempts, _labels = schema.jobs, schema.attempts, schema.job_labels

# Module constants, because building a statement takes longer than executing it.
_RECORDS = Records(Job, _jobs, without=["attempt"], lazy="spec")
_SELECT: sa.Select[Any] = sa.select(*_RECORDS.columns, *attempts.RECORDS.columns).select_from(
    _jobs.outerjoin(_attempts, schema.is_current_attempt)
)
_BY_ID = PreparedStatement(_SELECT.where(_jobs.c.job_id == bindparam("key")))
_IS_LISTED = _jobs.c.job_id.bool_op("IN")(listed(bindparam("keys")))
_BY_IDS = PreparedStatement(_SELECT.where(_IS_LISTED))
_VERSIONS = ScopedQuery(sa.select(_jobs.c.job_id, _jobs.c.version).where(_IS_LISTED), _jobs.c.account_id)
_WITH_HANDLE = _SELECT.where(_jobs.c.account_id == bindparam("account"), _jobs.c.handle == bindparam("handle_"))
_BY_HANDLE = _WITH_HANDLE.where(_jobs.c.deleted_at.is_(None))
_BY_HANDLE_ONCE = _WITH_HANDLE.where(_jobs.c.deleted_at.is_not(None)).order_by(_jobs.c.deleted_at.desc()).limit(1)
_UNFINISHED = _SELECT.where(_jobs.c.status.in_(sorted(UNFINISHED)))
_TOMBSTONES = _SELECT.where(_jobs.c.deleted_at.is_not(None), _jobs.c.purge == sa.false()).order_by(
    _jobs.c.deleted_at.desc(), _jobs.c.job_id.desc()
)
_TO_PURGE = sa.select(_jobs.c.job_id).where(_jobs.c.purge == sa.true(), _jobs.c.deleted_at.is_not(None))
_IS_THE_JOB = (_jobs.c.job_id == bindparam("key"), _jobs.c.account_id == bindparam("account"))
_PURGED = sa.update(_jobs).where(*_IS_THE_JOB).values(purge=sa.false())
_STORED_LABELS = PreparedStatement(sa.select(_jobs.c.labels, _jobs.c.deleted_at).where(*_IS_THE_JOB))
_INSERT = PreparedStatement(sa.insert(_jobs))
_UPDATE = PreparedStatement(
    sa.update(_jobs).where(*_IS_THE_JOB, _jobs.c.version == bindparam("expected_version")),
    columns=[column.name for column in _jobs.c if column.name not in _IDENTITY],
)
_INSERT_LABELS = PreparedStatement(sa.insert(_labels))
_DELETE_LABELS = sa.delete(_labels).where(
    _labels.c.job_id == bindparam("key"), _labels.c.account_id == bindparam("account")
)


# When services were last used. A table of its own: using a service does not change its job.

_activity = schema.activity


def record_use(connection: Connection, scope: Scope, job_id: str, at: float) -> None:
    """Record that a job was used at a time; a time earlier than the recorded one changes nothing."""
    owner = scope.limit(sa.select(_jobs.c.account_id).where(_jobs.c.job_id == job_id), _jobs.c.account_id)
    if (account_id := connection.execute(owner).scalar()) is None:
        raise JobNotFoundError(f"there is no job {job_id}")
    known = last_use(connection, scope, job_id)
    if known is None:
        connection.execute(sa.insert(_activity), {"account_id": account_id, "job_id": job_id, "at": at})
    elif known < at:
        used = sa.update(_activity).where(_activity.c.job_id == job_id, _activity.c.account_id == account_id)
        connection.execute(used.values(at=at))


def last_use(connection: Connection, scope: Scope, job_id: str) -> float | None:
    query = sa.select(_activity.c.at).where(_activity.c.job_id == job_id)
    return connection.execute(scope.limit(query, _activity.c.account_id)).scalar()


def last_uses(connection: Connection, scope: Scope) -> dict[str, float]:
    rows = connection.execute(scope.limit(sa.select(_activity.c.job_id, _activity.c.at), _activity.c.account_id))
    return {row.job_id: row.at for row in rows}

"""Attempts: every try at running a job, the current one and those that ended."""

from __future__ import annotations

from sqlalchemy import Connection, bindparam, insert, select, update

from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.core.job import Attempt, Job
from trainmaster.server.store import schema
from trainmaster.server.store.records import ATTEMPT_FIELDS, attempt_from_row, attempt_to_row
from trainmaster.server.store.scope import Scope
from trainmaster.server.store.statements import Prepared, prepared_by_scope

_attempts = schema.attempts

_MAX_DIGITS = 9
"""No attempt has a longer number, and no database takes every integer."""

_SELECT = select(*(_attempts.c[name] for name in ATTEMPT_FIELDS))
_OF_JOB = prepared_by_scope(
    _SELECT.where(_attempts.c.job_id == bindparam("key")).order_by(_attempts.c.number), _attempts.c.account_id
)
_INSERT = Prepared(insert(_attempts))
_UPDATE = Prepared(
    update(_attempts).where(
        _attempts.c.job_id == bindparam("key"),
        _attempts.c.number == bindparam("attempt"),
        _attempts.c.account_id == bindparam("account"),
    ),
    columns=[column.name for column in _attempts.c if not column.primary_key],
)


def put(connection: Connection, scope: Scope, job: Job, attempt: Attempt) -> bool:
    """Store an attempt as it is now; True when it was not there before."""
    scope.require(job.account_id)
    row = attempt_to_row(job, attempt)
    key = {"key": job.job_id, "attempt": attempt.number, "account": job.account_id}
    if _UPDATE.execute(connection, {**row, **key}).rowcount:
        return False
    _INSERT.execute(connection, row)
    return True


def of_job(connection: Connection, scope: Scope, job_id: str) -> list[Attempt]:
    """All attempts of a job, the first one first."""
    rows = _OF_JOB[scope.account_id is None].rows(connection, {"key": job_id, "account": scope.account_id})
    return [attempt_from_row(row) for row in rows]


def get(connection: Connection, scope: Scope, attempt_id: str) -> Attempt:
    """One attempt by its id, `<job_id>.<number>`.

    Raises:
        NotFoundError: there is none in scope.
    """
    job_id, _, number = attempt_id.rpartition(".")
    if number.isascii() and number.isdecimal() and len(number) <= _MAX_DIGITS:
        query = _SELECT.where(_attempts.c.job_id == job_id, _attempts.c.number == int(number))
        row = connection.execute(scope.limit(query, _attempts.c.account_id)).first()
        if row is not None:
            return attempt_from_row(row)
    raise NotFoundError("there is no such attempt")


def job_of_token(connection: Connection, scope: Scope, token: str) -> str | None:
    """The job whose attempt holds a token; None when none does, or when that attempt has ended."""
    query = select(_attempts.c.job_id).where(_attempts.c.token == token, _attempts.c.ended_at.is_(None))
    return connection.execute(scope.limit(query, _attempts.c.account_id)).scalar()

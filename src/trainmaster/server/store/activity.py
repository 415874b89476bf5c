"""Activity: when a service was last used. Apart from the jobs, so that using one changes no job."""

from __future__ import annotations

from sqlalchemy import Connection, insert, select, update

from trainmaster.server.core.errors import JobNotFoundError
from trainmaster.server.store import schema
from trainmaster.server.store.scope import Scope

_activity, _jobs = schema.activity, schema.jobs


def touch(connection: Connection, scope: Scope, job_id: str, at: float) -> None:
    """Record that a job was used at a time; an earlier one than is known changes nothing.

    Raises:
        JobNotFoundError: there is no such job in scope.
    """
    owner = scope.limit(select(_jobs.c.account_id).where(_jobs.c.job_id == job_id), _jobs.c.account_id)
    account_id = connection.execute(owner).scalar()
    if account_id is None:
        raise JobNotFoundError(f"there is no job {job_id}")
    known = get(connection, scope, job_id)
    if known is None:
        connection.execute(insert(_activity), {"account_id": account_id, "job_id": job_id, "at": at})
    elif known < at:
        used = update(_activity).where(_activity.c.job_id == job_id, _activity.c.account_id == account_id)
        connection.execute(used.values(at=at))


def get(connection: Connection, scope: Scope, job_id: str) -> float | None:
    """When a job was last used; None when it never was."""
    query = select(_activity.c.at).where(_activity.c.job_id == job_id)
    return connection.execute(scope.limit(query, _activity.c.account_id)).scalar()


def all(connection: Connection, scope: Scope) -> dict[str, float]:  # noqa: A001 - read as `activity.all`
    """When each job that ever was used was last used."""
    rows = connection.execute(scope.limit(select(_activity.c.job_id, _activity.c.at), _activity.c.account_id))
    return {row.job_id: row.at for row in rows}

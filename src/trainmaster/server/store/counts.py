"""How many there are: for metrics, which are read often and must be cheap."""

from __future__ import annotations

from sqlalchemy import Connection, func, select

from trainmaster.server.core.states import JobStatus
from trainmaster.server.store import schema
from trainmaster.server.store.scope import Scope

_jobs = schema.jobs

_JOBS = select(_jobs.c.status, _jobs.c.queue, func.count()).group_by(_jobs.c.status, _jobs.c.queue)
_OLDEST = (
    select(_jobs.c.queue, func.min(_jobs.c.queued_at))
    .where(_jobs.c.status == JobStatus.QUEUED.value)
    .group_by(_jobs.c.queue)
)


def jobs(connection: Connection, scope: Scope) -> dict[tuple[str, str], int]:
    """Jobs by status and queue, also those that were deleted; read off an index."""
    rows = connection.execute(scope.limit(_JOBS, _jobs.c.account_id))
    return {(status, queue): count for status, queue, count in rows}


def oldest(connection: Connection, scope: Scope) -> dict[str, float]:
    """Since when the job that waits longest has been waiting, by queue."""
    rows = connection.execute(scope.limit(_OLDEST, _jobs.c.account_id))
    return {queue: since for queue, since in rows if since is not None}

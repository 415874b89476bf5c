"""Events: those of jobs, numbered without gaps within a job, with one feed over all jobs; and those of the cluster. The
feed's cursor is the row's id. Ids rise in the order of commits, as only the holder of the write lock is given any:
whoever has read up to one never misses an event that is committed later."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import Connection, bindparam, func, insert, select

from trainmaster.server.core.job import Job, JobEvent
from trainmaster.server.core.resources import ClusterEvent
from trainmaster.server.store import schema
from trainmaster.server.store.records import PreparedStatement, Records, ScopedQuery
from trainmaster.server.store.scope import Scope

_events = schema.events

_RECORDS = Records(JobEvent, _events)
_INSERT = PreparedStatement(insert(_events).inline(), columns=["account_id", *_RECORDS.fields])
_LAST_ID = select(func.max(_events.c.id))
_AFTER = ScopedQuery(
    select(_events.c.id, _events.c.job_id, _events.c.seq)
    .where(_events.c.id > bindparam("after"))
    .order_by(_events.c.id),
    _events.c.account_id,
)


def append(connection: Connection, scope: Scope, job: Job, events: Sequence[JobEvent]) -> None:
    """Add events to a job; a number that is taken fails the transaction."""
    scope.require(job.account_id)
    if events:
        _INSERT.execute_many(connection, [_RECORDS.to_row(event, account_id=job.account_id) for event in events])


def page(
    connection: Connection,
    scope: Scope,
    job_id: str,
    *,
    after_seq: int = 0,
    limit: int = 100,
    newest_first: bool = False,
) -> list[JobEvent]:
    """Events of a job with higher numbers than `after_seq`: the first ones, or the last ones in reverse."""
    return _RECORDS.find(
        connection,
        scope,
        _events.c.job_id == job_id,
        _events.c.seq > after_seq,
        order_by=[_events.c.seq.desc() if newest_first else _events.c.seq],
        limit=limit,
    )


def feed(connection: Connection, scope: Scope, after_id: int, limit: int) -> list[tuple[int, JobEvent]]:
    """Events of all jobs after a cursor, each with its cursor."""
    query = select(_events.c.id, *_RECORDS.columns).where(_events.c.id > after_id).order_by(_events.c.id).limit(limit)
    rows = connection.execute(scope.limit(query, _events.c.account_id))
    return [(row[0], _RECORDS.from_row(row[1:])) for row in rows]


def last_id(connection: Connection, scope: Scope) -> int:  # noqa: ARG001 - a cursor shows nothing
    """The cursor at the end of the feed of all accounts; 0 when there are no events."""
    return connection.execute(_LAST_ID).scalar() or 0


def changed_jobs(connection: Connection, scope: Scope, after_id: int) -> tuple[int, dict[str, int]]:
    """The cursor at the end of the feed, and the number of the last event of each job that has one after `after_id`."""
    # Not grouped by the database: SQLite would read the index of all events there are, to have them by job.
    rows = _AFTER.rows(connection, scope, after=after_id)
    return (rows[-1][0] if rows else after_id), {job_id: seq for _, job_id, seq in rows}


# Events of the cluster: what happened to nodes and queues. They belong to no account; every account may see them.

_cluster_events = schema.cluster_events

_CLUSTER_RECORDS = Records(ClusterEvent, _cluster_events)
_LAST_CLUSTER_ID = PreparedStatement(select(func.max(_cluster_events.c.id)))


def append_to_cluster(connection: Connection, scope: Scope, events: Iterable[ClusterEvent]) -> None:
    """Add events. Every change of a node or a queue adds one: the leader learns of the change by it."""
    scope.require_everything()
    if rows := [_CLUSTER_RECORDS.to_row(event) for event in events]:
        connection.execute(insert(_cluster_events), rows)


def last_cluster_id(connection: Connection, scope: Scope) -> int:  # noqa: ARG001 - a cursor shows nothing
    return _LAST_CLUSTER_ID.rows(connection, {})[0][0] or 0


def of_subject(connection: Connection, scope: Scope, subject: str, limit: int = 100) -> list[ClusterEvent]:
    """The last events of a node or a queue, the newest first."""
    return _CLUSTER_RECORDS.find(
        connection, scope, _cluster_events.c.subject == subject, order_by=[_cluster_events.c.id.desc()], limit=limit
    )

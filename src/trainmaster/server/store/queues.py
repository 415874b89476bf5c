"""Queues: where jobs wait. They belong to the cluster; `default` is always there."""

from __future__ import annotations

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from trainmaster.server.core.errors import ConflictError, NotFoundError
from trainmaster.server.core.resources import ClusterEvent, Queue
from trainmaster.server.core.states import TERMINAL, JobStatus
from trainmaster.server.store import events, schema
from trainmaster.server.store.scope import Scope
from trainmaster.server.store.statements import Prepared

DEFAULT = "default"

_queues, _jobs = schema.queues, schema.jobs

_SELECT = select(*(_queues.c[name] for name in Queue.__dataclass_fields__))
_NAMED = Prepared(select(_queues.c.name).where(_queues.c.name == bindparam("wanted")))


def all(connection: Connection, scope: Scope) -> list[Queue]:  # noqa: A001, ARG001 - `queues.all`; they are everybody's
    """Every queue, by name."""
    return [Queue(**row._mapping) for row in connection.execute(_SELECT.order_by(_queues.c.name))]


def get(connection: Connection, scope: Scope, name: str) -> Queue:  # noqa: ARG001 - queues are everybody's
    """One queue.

    Raises:
        NotFoundError: there is none of that name.
    """
    row = connection.execute(_SELECT.where(_queues.c.name == name)).first()
    if row is None:
        raise NotFoundError(f"there is no queue {name}")
    return Queue(**row._mapping)


def exists(connection: Connection, scope: Scope, name: str) -> bool:  # noqa: ARG001 - queues are everybody's
    """Whether there is such a queue."""
    return bool(_NAMED.rows(connection, {"wanted": name}))


def touch(connection: Connection, scope: Scope) -> None:
    """Write the default queue as it is, to see whether the database takes anything."""
    scope.require_everything()
    connection.execute(update(_queues).where(_queues.c.name == DEFAULT).values(name=_queues.c.name))


def put(connection: Connection, scope: Scope, queue: Queue, now: float) -> None:
    """Make a queue, or change its weight and quota; nothing is written where nothing changes."""
    scope.require_everything()
    values = {"weight": queue.weight, "quota_gpus": queue.quota_gpus}
    if exists(connection, scope, queue.name):
        before = get(connection, scope, queue.name)
        if (before.weight, before.quota_gpus) == (queue.weight, queue.quota_gpus):
            return
        connection.execute(update(_queues).where(_queues.c.name == queue.name).values(values))
    else:
        connection.execute(insert(_queues), {"name": queue.name, "created_at": now, **values})
    quota = "no quota" if queue.quota_gpus is None else f"a quota of {queue.quota_gpus} GPUs"
    message = f"queue {queue.name} has weight {queue.weight:g} and {quota}"
    event = ClusterEvent(at=now, type="queue_changed", subject=f"queue/{queue.name}", message=message, data=values)
    events.append_to_cluster(connection, scope, [event])


def remove(connection: Connection, scope: Scope, name: str, now: float) -> None:
    """Take a queue away.

    Raises:
        NotFoundError: there is none of that name.
        ConflictError: it is the default queue, or jobs that have not ended are in it.
    """
    scope.require_everything()
    get(connection, scope, name)
    if name == DEFAULT:
        raise ConflictError("the default queue is always there; give it a quota of 0 to hold its GPU jobs back")
    live = sorted(frozenset(JobStatus) - TERMINAL)
    query = select(_jobs.c.job_id).where(_jobs.c.queue == name, _jobs.c.status.in_(live)).limit(1)
    if connection.execute(query).first() is not None:
        raise ConflictError(f"jobs that have not ended are in queue {name}; move them with `trainmaster edit --queue`")
    connection.execute(delete(_queues).where(_queues.c.name == name))
    event = ClusterEvent(at=now, type="queue_removed", subject=f"queue/{name}", message=f"queue {name} was removed")
    events.append_to_cluster(connection, scope, [event])

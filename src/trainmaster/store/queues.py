"""Queues: the names under which jobs may wait. They belong to the cluster; `default` is always there."""

from __future__ import annotations

from sqlalchemy import Connection, bindparam, insert, select

from trainmaster.store import schema
from trainmaster.store.prepared import Prepared
from trainmaster.store.scope import Scope

_queues = schema.queues

_NAMED = Prepared(select(_queues.c.name).where(_queues.c.name == bindparam("wanted")))


def names(connection: Connection, scope: Scope) -> list[str]:  # noqa: ARG001 - queues are everybody's
    """The names of all queues."""
    return list(connection.execute(select(_queues.c.name).order_by(_queues.c.name)).scalars())


def exists(connection: Connection, scope: Scope, name: str) -> bool:  # noqa: ARG001 - queues are everybody's
    """Whether there is such a queue."""
    return _NAMED.execute(connection, {"wanted": name}).first() is not None


def add(connection: Connection, scope: Scope, name: str, now: float) -> None:
    """Make a queue unless it is there."""
    scope.require_everything()
    if not exists(connection, scope, name):
        connection.execute(insert(_queues), {"name": name, "created_at": now})

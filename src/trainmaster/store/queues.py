"""Queues: the names under which jobs may wait. They belong to the cluster; `default` is always there."""

from __future__ import annotations

from sqlalchemy import Connection, insert, select

from trainmaster.store import schema
from trainmaster.store.scope import Scope

_queues = schema.queues


def names(connection: Connection, scope: Scope) -> list[str]:  # noqa: ARG001 - queues are everybody's
    """The names of all queues."""
    return list(connection.execute(select(_queues.c.name).order_by(_queues.c.name)).scalars())


def exists(connection: Connection, scope: Scope, name: str) -> bool:
    """Whether there is such a queue."""
    return name in names(connection, scope)


def add(connection: Connection, scope: Scope, name: str, now: float) -> None:
    """Make a queue unless it is there."""
    scope.require_everything()
    if not exists(connection, scope, name):
        connection.execute(insert(_queues), {"name": name, "created_at": now})

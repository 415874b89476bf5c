"""Events of the cluster: what happened to nodes and queues. They belong to no account, and all may see them."""

from __future__ import annotations

import json
from collections.abc import Iterable

from sqlalchemy import Connection, func, insert, select

from trainmaster.server.core.resources import ClusterEvent
from trainmaster.server.store import schema
from trainmaster.server.store.records import dumps
from trainmaster.server.store.scope import Scope

_events = schema.cluster_events

_COLUMNS = tuple(_events.c[name] for name in ClusterEvent.__dataclass_fields__)
_LAST_ID = select(func.max(_events.c.id))


def append(connection: Connection, scope: Scope, events: Iterable[ClusterEvent]) -> None:
    """Add events. Whoever changes a node or a queue adds one: by it the leader learns of the change."""
    scope.require_everything()
    rows = [
        {"at": e.at, "type": e.type, "subject": e.subject, "message": e.message, "data": dumps(e.data)} for e in events
    ]
    if rows:
        connection.execute(insert(_events), rows)


def last_id(connection: Connection, scope: Scope) -> int:  # noqa: ARG001 - a cursor shows nothing
    """A number that rises with every event; 0 when there is none."""
    return connection.execute(_LAST_ID).scalar() or 0


def of(connection: Connection, scope: Scope, subject: str, limit: int = 100) -> list[ClusterEvent]:  # noqa: ARG001
    """The last events of a node or a queue, the newest first."""
    query = select(*_COLUMNS).where(_events.c.subject == subject).order_by(_events.c.id.desc()).limit(limit)
    return [ClusterEvent(**{**row._mapping, "data": json.loads(row.data)}) for row in connection.execute(query)]

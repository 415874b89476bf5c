"""Clusters: the engines beyond this machine that jobs run on, as operators have declared them. They belong to the
server, and every account may use them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, delete, insert, update

from trainmaster.server.core.errors import ConflictError
from trainmaster.server.core.resources import ClusterEvent
from trainmaster.server.core.states import TERMINAL
from trainmaster.server.store import events, nodes, schema
from trainmaster.server.store.records import Records
from trainmaster.server.store.scope import Scope

_clusters = schema.clusters


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A backend that an operator has declared."""

    name: str
    """The backend that jobs name."""
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Without secrets."""
    sealed: str = field(default="", repr=False)
    """Options that are secret, encrypted as one document; empty: none."""
    instance: str
    """Identifies this Trainmaster on the engine; never changes, so that jobs are found again."""
    created_at: float
    changed_at: float


_RECORDS = Records(Cluster, _clusters)


def all(connection: Connection, scope: Scope) -> list[Cluster]:  # noqa: A001, ARG001 - `clusters.all`; they are everybody's
    return [_RECORDS.from_row(row) for row in connection.execute(_RECORDS.select.order_by(_clusters.c.name))]


def get(connection: Connection, scope: Scope, name: str) -> Cluster:
    return _RECORDS.get(connection, scope, _clusters.c.name == name, missing=f"there is no cluster {name}")


def put(connection: Connection, scope: Scope, cluster: Cluster) -> None:
    """Add a cluster, or replace what is known of it; its instance stays."""
    scope.require_everything()
    row = _RECORDS.to_row(cluster)
    known = next((each for each in all(connection, scope) if each.name == cluster.name), None)
    if known is None:
        connection.execute(insert(_clusters), row)
    else:
        kept = ("instance", "created_at")
        values = {name: value for name, value in row.items() if name not in kept}
        connection.execute(update(_clusters).where(_clusters.c.name == cluster.name).values(values))
    message = f"cluster {cluster.name} was {'added' if known is None else 'changed'}"
    events.append_to_cluster(connection, scope, [_event(cluster.name, cluster.changed_at, message)])


def remove(connection: Connection, scope: Scope, name: str, now: float) -> None:
    """Remove a cluster on which no job waits or runs, with its nodes."""
    scope.require_everything()
    get(connection, scope, name)
    jobs = schema.jobs
    unfinished = jobs.c.status.not_in([str(status) for status in TERMINAL])
    first = connection.execute(jobs.select().where(jobs.c.backend == name, unfinished).limit(1)).mappings().first()
    if first is not None:
        raise ConflictError(f"job {first['job_id']} still waits or runs on {name}; cancel such jobs first, or wait")
    connection.execute(delete(_clusters).where(_clusters.c.name == name))
    nodes.remove_of_backend(connection, scope, name)
    events.append_to_cluster(connection, scope, [_event(name, now, f"cluster {name} was removed")])


def _event(name: str, now: float, message: str) -> ClusterEvent:
    return ClusterEvent(at=now, type="backend_changed", subject=f"backend/{name}", message=message)

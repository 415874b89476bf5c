"""Nodes: the machines that backends have reported. They belong to the cluster, and every account may see them."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, delete, insert, select, update

from trainmaster.core.errors import NotFoundError
from trainmaster.core.resources import Node, NodeState
from trainmaster.store import schema
from trainmaster.store.records import NODE_FIELDS, node_from_row, node_to_row
from trainmaster.store.scope import Scope

_nodes = schema.nodes

OFFLINE_AFTER_S = 60.0
"""A node that nobody reported for so long takes no work: a renamed machine must not be offered twice."""
_OPERATORS = frozenset({NodeState.DRAINING, NodeState.DRAINED})
"""Set by a person, and taken back by one: no report of a backend does that."""


def put(connection: Connection, scope: Scope, inventory: Sequence[Node]) -> None:
    """Store nodes as a backend reports them now; one that is being drained, or was, stays so.

    A report is whole for the hosts that it names: other nodes of the same backend there are gone. Nodes of other
    hosts that were not reported for a while are OFFLINE.
    """
    scope.require_everything()
    states = {row.node_id: row.state for row in connection.execute(select(_nodes.c.node_id, _nodes.c.state))}
    for node in inventory:
        row = node_to_row(node)
        if node.node_id not in states:
            connection.execute(insert(_nodes), row)
            continue
        if states[node.node_id] in _OPERATORS:
            del row["state"]
        connection.execute(update(_nodes).where(_nodes.c.node_id == node.node_id), row)
    newest = max((node.last_seen_at for node in inventory), default=0.0)
    connection.execute(
        update(_nodes)
        .where(_nodes.c.last_seen_at < newest - OFFLINE_AFTER_S, _nodes.c.state == NodeState.READY.value)
        .values(state=NodeState.OFFLINE.value)
    )
    for backend, hostname in {(node.backend, node.hostname) for node in inventory}:
        here = [node.node_id for node in inventory if (node.backend, node.hostname) == (backend, hostname)]
        connection.execute(
            delete(_nodes).where(
                _nodes.c.backend == backend, _nodes.c.hostname == hostname, _nodes.c.node_id.not_in(here)
            )
        )


def all(connection: Connection, scope: Scope) -> list[Node]:  # noqa: A001, ARG001 - `nodes.all`; nodes are everybody's
    """Every node there is."""
    query = select(*(_nodes.c[name] for name in NODE_FIELDS)).order_by(_nodes.c.node_id)
    return [node_from_row(row) for row in connection.execute(query)]


def set_state(connection: Connection, scope: Scope, node_id: str, state: NodeState) -> None:
    """Say whether a node takes new work.

    Raises:
        NotFoundError: there is no such node.
    """
    scope.require_everything()
    if connection.execute(update(_nodes).where(_nodes.c.node_id == node_id).values(state=state)).rowcount == 0:
        raise NotFoundError(f"there is no node {node_id}")

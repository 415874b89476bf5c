"""Nodes: the machines that backends have reported. They belong to the cluster, and every account may see them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Connection, delete, insert, update

from trainmaster.server.core.errors import ConflictError
from trainmaster.server.core.resources import ClusterEvent, Node, NodeState
from trainmaster.server.store import events, schema
from trainmaster.server.store.records import PreparedStatement, Records, dumps
from trainmaster.server.store.scope import Scope

_nodes = schema.nodes

_RECORDS = Records(Node, _nodes)
_ALL = PreparedStatement(_RECORDS.select.order_by(_nodes.c.node_id))

OFFLINE_AFTER_S = 60.0
"""A node that was not reported for so long gets no work: a renamed machine must not be offered twice."""
_OPERATORS = frozenset({NodeState.DRAINING, NodeState.DRAINED})
"""Set and reset by operators only: no report of a backend changes them."""
_GIVEN = ("given_labels", "given_capabilities", "drain_reason", "drain_force", "drain_grace_s")
"""What operators set, and no report changes; nodes of pools are drained on their engine, which reports why."""


def put(connection: Connection, scope: Scope, inventory: Sequence[Node]) -> None:
    """Store nodes as a backend reports them; what operators set stays. A report is complete for the hosts that it
    names; nodes of other hosts that were not reported for a while are OFFLINE. Notable changes become events."""
    scope.require_everything()
    known = {node.node_id: node for node in all(connection, scope)}
    now = max((node.last_seen_at for node in inventory), default=0.0)
    for node in inventory:
        row = _RECORDS.to_row(node)
        before = known.get(node.node_id)
        if before is None:
            connection.execute(insert(_nodes), row)
            continue
        for name in () if node.is_in_pool else _GIVEN:
            del row[name]
        if before.state in _OPERATORS and not node.is_in_pool:
            del row["state"]
        connection.execute(update(_nodes).where(_nodes.c.node_id == node.node_id), row)
        events.append_to_cluster(connection, scope, _events_of_report(before, node, now))
    named = {node.node_id for node in inventory}
    for node in known.values():
        if node.node_id not in named and node.state is NodeState.READY and node.last_seen_at < now - OFFLINE_AFTER_S:
            _change(connection, node.node_id, state=NodeState.OFFLINE.value)
            message = f"node {node.node_id} was not reported for {now - node.last_seen_at:.0f} s"
            events.append_to_cluster(connection, scope, [_event(node.node_id, now, "node_offline", message)])
    for backend, hostname in {(node.backend, node.hostname) for node in inventory}:
        here = [node.node_id for node in inventory if (node.backend, node.hostname) == (backend, hostname)]
        there = (_nodes.c.backend == backend, _nodes.c.hostname == hostname)
        connection.execute(delete(_nodes).where(*there, _nodes.c.node_id.not_in(here)))


def all(connection: Connection, scope: Scope) -> list[Node]:  # noqa: A001, ARG001 - `nodes.all`; nodes are everybody's
    return [_RECORDS.from_row(row) for row in _ALL.rows(connection, {})]


def get(connection: Connection, scope: Scope, node_id: str) -> Node:
    return _RECORDS.get(connection, scope, _nodes.c.node_id == node_id, missing=f"there is no node {node_id}")


def drain(
    connection: Connection,
    scope: Scope,
    node_id: str,
    now: float,
    *,
    reason: str = "",
    force: bool = False,
    grace_s: float | None = None,
) -> None:
    """Give a node no more work; with `force`, preempt what runs there. The node is DRAINED when nothing is left."""
    scope.require_everything()
    node = get(connection, scope, node_id)
    if node.is_in_pool:
        raise ConflictError(f"the engine of {node.backend} places jobs on {node_id}; drain the node there")
    reason = reason or node.drain_reason  # a repeated drain may have none
    state = node.state if node.state is NodeState.DRAINED else NodeState.DRAINING
    _change(connection, node_id, state=state.value, drain_reason=reason, drain_force=force, drain_grace_s=grace_s)
    message = f"node {node_id} is being drained" + (f": {reason}" if reason else "")
    data = {"reason": reason, "force": force, "grace_seconds": grace_s}
    events.append_to_cluster(connection, scope, [_event(node_id, now, "node_draining", message, data)])


def drained(connection: Connection, scope: Scope, node_id: str, now: float) -> None:
    """Record that nothing runs any more on a node that is being drained."""
    scope.require_everything()
    if get(connection, scope, node_id).state is NodeState.DRAINING:
        _change(connection, node_id, state=NodeState.DRAINED.value)
        message = f"nothing runs on node {node_id} any more"
        events.append_to_cluster(connection, scope, [_event(node_id, now, "node_drained", message)])


def enable(connection: Connection, scope: Scope, node_id: str, now: float) -> None:
    scope.require_everything()
    node = get(connection, scope, node_id)
    if node.state not in _OPERATORS:
        return
    _change(connection, node_id, state=NodeState.READY.value, drain_reason="", drain_force=False, drain_grace_s=None)
    message = f"node {node_id} accepts jobs again"
    events.append_to_cluster(connection, scope, [_event(node_id, now, "node_enabled", message)])


def give(
    connection: Connection,
    scope: Scope,
    node_id: str,
    now: float,
    *,
    labels: Sequence[str] | None = None,
    capabilities: Sequence[str] | None = None,
) -> None:
    """Set the labels or the capabilities that a node has beside those of its backend."""
    scope.require_everything()
    node = get(connection, scope, node_id)
    if node.is_in_pool and (labels or capabilities):
        raise ConflictError(f"the engine of {node.backend} places jobs on {node_id}; set labels and features there")
    wanted = {
        "labels": node.given_labels if labels is None else tuple(dict.fromkeys(labels)),
        "capabilities": node.given_capabilities if capabilities is None else tuple(dict.fromkeys(capabilities)),
    }
    if wanted != {"labels": node.given_labels, "capabilities": node.given_capabilities}:
        _change(connection, node_id, **{f"given_{name}": dumps(value) for name, value in wanted.items()})
        message = f"labels or capabilities of node {node_id} were changed"
        events.append_to_cluster(connection, scope, [_event(node_id, now, "node_changed", message, wanted)])


def remove_of_backend(connection: Connection, scope: Scope, backend: str) -> None:
    """Forget the nodes of a backend that the server has no more."""
    scope.require_everything()
    connection.execute(delete(_nodes).where(_nodes.c.backend == backend))


def _change(connection: Connection, node_id: str, **values: Any) -> None:
    connection.execute(update(_nodes).where(_nodes.c.node_id == node_id).values(values))


def _events_of_report(before: Node, node: Node, now: float) -> Iterator[ClusterEvent]:
    was = {gpu.index: gpu for gpu in before.gpus}
    for gpu in node.gpus:
        old = was.get(gpu.index)
        if old is None or (old.healthy, old.problem) == (gpu.healthy, gpu.problem):
            continue
        kind = "gpu_healthy" if gpu.healthy else "gpu_unhealthy"
        what = "is back in the pool" if gpu.healthy else f"left the pool: {gpu.problem}"
        data = {"gpu": gpu.index, "device": gpu.device, "problem": gpu.problem}
        yield _event(node.node_id, now, kind, f"GPU {gpu.index} ({gpu.type}) of node {node.node_id} {what}", data)
    if before.state is NodeState.OFFLINE and node.state is NodeState.READY:
        yield _event(node.node_id, now, "node_enabled", f"node {node.node_id} is back")
    elif node.is_in_pool and before.state is not node.state:
        yield _event(node.node_id, now, *_told_by_engine(node), {"reason": node.drain_reason})


def _told_by_engine(node: Node) -> tuple[str, str]:
    """The type and the message of the event that a node of a pool has entered its state."""
    why = f": {node.drain_reason}" if node.drain_reason else ""
    return {
        NodeState.READY: ("node_enabled", f"node {node.node_id} accepts jobs again"),
        NodeState.DRAINING: ("node_draining", f"node {node.node_id} is being drained on its engine{why}"),
        NodeState.DRAINED: ("node_drained", f"node {node.node_id} is drained on its engine{why}"),
        NodeState.OFFLINE: ("node_offline", f"node {node.node_id} is not available on its engine{why}"),
    }[node.state]


def _event(node_id: str, now: float, kind: str, message: str, data: dict[str, Any] | None = None) -> ClusterEvent:
    return ClusterEvent(at=now, type=kind, subject=f"node/{node_id}", message=message, data=data or {})

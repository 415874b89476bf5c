"""Nodes: what there is, what is free, and who holds the rest."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any

from pydantic import Field, Strict, StringConstraints

from trainmaster.server.core.fields import Flag, Model, Names
from trainmaster.server.core.resources import ClusterEvent, Node, NodeState, whole
from trainmaster.server.core.spec.resources import NodeLabels
from trainmaster.server.http.envelope import Wire
from trainmaster.server.http.wire.commands import PROPER
from trainmaster.server.http.wire.reported import instant
from trainmaster.server.store.allocations import Allocation
from trainmaster.server.store.scope import Scope

MAX_GRACE_S = 86400.0


class GpuResource(Wire):
    """One accelerator of a node."""

    index: int
    type: str
    memory_mb: int
    healthy: bool
    problem: str | None = Field(description="Why it is out of the pool; null while it is healthy.")
    free: bool
    job_id: str | None = Field(description="Who holds it; null when it is free or held by another account.")


class Amount(Wire):
    """How much there is of something, and how much of it is free."""

    total: int
    free: int


class NodeResource(Wire):
    """A machine."""

    id: str
    hostname: str
    backend: str
    state: NodeState
    drain_reason: str | None = Field(description="Why it is drained, as the operator put it.")
    drain_force: bool = Field(description="It is being drained, and what runs there is preempted.")
    labels: list[str]
    capabilities: list[str]
    given_labels: list[str] = Field(description="Those of the labels that operators gave it.")
    given_capabilities: list[str] = Field(description="Those of the capabilities that operators gave it.")
    gpus: list[GpuResource]
    cpu_cores: Amount
    ram_mb: Amount
    storage_mb: Amount
    slots: Amount = Field(description="How many job nodes it runs at a time.")
    jobs: list[str] = Field(description="The jobs of your account that run here.")
    last_heartbeat: datetime


class NodeList(Wire):
    """All nodes."""

    nodes: list[NodeResource]


class ClusterEventResource(Wire):
    """Something that happened to a node."""

    ts: datetime
    type: str
    message: str
    data: dict[str, Any]


class ClusterEventList(Wire):
    """The last events of a node."""

    events: list[ClusterEventResource] = Field(description="The newest first.")


class DrainBody(Model):
    """How to drain a node."""

    reason: Annotated[str, StringConstraints(max_length=1024), PROPER] = Field(
        default="", description="Shown to everybody who asks why a job waits."
    )
    force: Flag = Field(default=False, description="Preempt what runs there, instead of waiting for it.")
    grace_seconds: Annotated[float, Strict(), Field(ge=0, le=MAX_GRACE_S)] | None = Field(
        default=None, description="With force: how long those get to save; null: as for any preemption."
    )


class EnableBody(Model):
    """How to enable a node: there is nothing to say."""


class NodeBody(Model):
    """What to change about a node; what is left out stays."""

    labels: NodeLabels | None = Field(default=None, description="Replaces all labels that operators gave it.")
    capabilities: Names | None = Field(default=None, description="Replaces all capabilities that operators gave it.")


def cluster_event(event: ClusterEvent) -> ClusterEventResource:
    """An event of the cluster."""
    return ClusterEventResource(ts=instant(event.at), type=event.type, message=event.message, data=dict(event.data))


def node_resource(node: Node, allocations: Iterable[Allocation], scope: Scope) -> NodeResource:
    """A node and what is held of it, as an account sees it: who of the others holds what stays their business."""
    free = whole(node)
    holders: dict[int, str | None] = {}
    jobs: dict[str, None] = {}
    for held in allocations:
        free = free.without(held.share)
        mine = held.job_id if scope.admits(held.account_id) else None
        holders.update(dict.fromkeys(held.share.gpus, mine))
        if mine is not None:
            jobs[mine] = None
    return NodeResource(
        id=node.node_id,
        hostname=node.hostname,
        backend=node.backend,
        state=node.state,
        drain_reason=node.drain_reason or None,
        drain_force=node.drain_force,
        labels=sorted(node.marks),
        capabilities=sorted(node.tags),
        given_labels=list(node.given_labels),
        given_capabilities=list(node.given_capabilities),
        gpus=[
            GpuResource(
                index=gpu.index,
                type=gpu.type,
                memory_mb=gpu.memory_mb,
                healthy=gpu.healthy,
                problem=None if gpu.healthy else gpu.problem or "unhealthy",
                free=gpu.index in free.gpus,
                job_id=holders.get(gpu.index),
            )
            for gpu in node.gpus
        ],
        cpu_cores=Amount(total=node.cpu_cores, free=free.cpu_cores),
        ram_mb=Amount(total=node.ram_mb, free=free.ram_mb),
        storage_mb=Amount(total=node.storage_mb, free=free.storage_mb),
        slots=Amount(total=node.slots, free=free.slots),
        jobs=list(jobs),
        last_heartbeat=instant(node.last_seen_at),
    )

"""Nodes: what there is, what is free, and who holds the rest."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from pydantic import Field

from trainmaster.api.envelope import Wire
from trainmaster.api.wire.reported import instant
from trainmaster.core.resources import Node, whole
from trainmaster.store.allocations import Allocation
from trainmaster.store.scope import Scope


class GpuResource(Wire):
    """One accelerator of a node."""

    index: int
    type: str
    memory_mb: int
    healthy: bool
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
    state: str
    labels: list[str]
    capabilities: list[str]
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


def node_resource(node: Node, allocations: Iterable[Allocation], scope: Scope) -> NodeResource:
    """A node as an account sees it: who of the others holds what stays their business."""
    free = whole(node)
    holders: dict[int, str | None] = {}
    jobs: dict[str, None] = {}
    for held in allocations:
        if held.share.node_id != node.node_id:
            continue
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
        labels=sorted(node.marks),
        capabilities=sorted(node.tags),
        gpus=[
            GpuResource(
                index=gpu.index,
                type=gpu.type,
                memory_mb=gpu.memory_mb,
                healthy=gpu.healthy,
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

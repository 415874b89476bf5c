"""The cluster as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime

from pydantic import Field

from trainmaster.server.core.resources import Free, Node, NodeState
from trainmaster.server.core.states import JobStatus
from trainmaster.server.http.envelope import Wire
from trainmaster.server.http.wire.nodes import Amount
from trainmaster.server.http.wire.reported import instant
from trainmaster.server.store.leases import Lease


class GpuTypeResource(Wire):
    """All GPUs of one type."""

    type: str
    total: int
    free: int = Field(description="On nodes that take work.")
    unhealthy: int


class LeaderResource(Wire):
    """The server that leads."""

    id: str
    url: str
    epoch: int = Field(description="Rises each time that the lead changes hands.")
    since: datetime | None


class ClusterResource(Wire):
    """What there is, and what of it is used."""

    version: str = Field(description="Of the server that answers.")
    leader: LeaderResource | None = Field(description="Null: nobody leads now, and nothing is started.")
    backends: list[str]
    nodes: dict[NodeState, int] = Field(description="How many are in each state.")
    gpus: list[GpuTypeResource]
    cpu_cores: Amount
    ram_mb: Amount
    gpu_utilisation: float | None = Field(description="The share of the GPUs that jobs hold; null: there are none.")
    cpu_utilisation: float | None = Field(description="The share of the cores that jobs asked for and hold.")
    jobs: dict[JobStatus, int] = Field(description="Those that have not ended, of all accounts.")
    queue_depth: int = Field(description="Jobs that wait for resources.")


def cluster_resource(
    nodes: Iterable[Node],
    free: Mapping[str, Free],
    jobs: Mapping[JobStatus, int],
    lease: Lease | None,
    *,
    version: str,
    now: float,
) -> ClusterResource:
    """The cluster from its parts; what is on nodes that are offline does not count."""
    every = list(nodes)
    present = [node for node in every if node.state is not NodeState.OFFLINE]
    total: Counter[str] = Counter(gpu.type for node in present for gpu in node.gpus)
    unhealthy: Counter[str] = Counter(gpu.type for node in present for gpu in node.gpus if not gpu.healthy)
    held = sum(gpu.healthy and gpu.index not in free[node.node_id].gpus for node in present for gpu in node.gpus)
    idle: Counter[str] = Counter(
        gpu.type
        for node in present
        for gpu in node.gpus
        if node.state is NodeState.READY and gpu.index in free[node.node_id].gpus
    )
    cores = sum(node.cpu_cores for node in present)
    cores_held = sum(node.cpu_cores - free[node.node_id].cpu_cores for node in present)
    ready = [node for node in present if node.state is NodeState.READY]
    return ClusterResource(
        version=version,
        leader=_leader(lease) if lease is not None and lease.expires_at > now else None,
        backends=sorted({node.backend for node in every}),
        nodes=dict(Counter(node.state for node in every)),
        gpus=[
            GpuTypeResource(type=name, total=count, free=idle[name], unhealthy=unhealthy[name])
            for name, count in sorted(total.items())
        ],
        cpu_cores=Amount(total=cores, free=sum(free[node.node_id].cpu_cores for node in ready)),
        ram_mb=Amount(
            total=sum(node.ram_mb for node in present), free=sum(free[node.node_id].ram_mb for node in ready)
        ),
        gpu_utilisation=round(held / total.total(), 4) if total else None,
        cpu_utilisation=round(cores_held / cores, 4) if cores else None,
        jobs=dict(jobs),
        queue_depth=jobs.get(JobStatus.QUEUED, 0),
    )


def _leader(lease: Lease) -> LeaderResource:
    return LeaderResource(id=lease.holder, url=lease.url, epoch=lease.epoch, since=instant(lease.since))

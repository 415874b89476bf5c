"""Nodes, what jobs need of them, and what is taken."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

_UNITS = (
    ("Ki", 2.0**10), ("Mi", 2.0**20), ("Gi", 2.0**30), ("Ti", 2.0**40), ("Pi", 2.0**50), ("Ei", 2.0**60),
    ("m", 1e-3), ("k", 1e3), ("K", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12), ("P", 1e15), ("E", 1e18),
)  # fmt: skip


def quantity(text: str) -> float:
    """The number of a quantity of cores or bytes, such as `2`, `500m` or `4Gi`.

    >>> quantity("500m"), quantity("2"), quantity("1.5Gi")
    (0.5, 2.0, 1610612736.0)
    """
    for unit, factor in _UNITS:
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    return float(text)


REGION = "region="
"""A node's label `region=NAME` says where it is."""

_node_owners: dict[str, str] = {}


def share_nodes(backend: str, *, owner: str) -> None:
    """Register that the jobs of a backend run on the nodes of another one."""
    _node_owners[backend] = owner


def host_backend(backend: str) -> str:
    """The backend on whose nodes a backend's jobs run, and under whose name alone nodes are reported and booked."""
    return _node_owners.get(backend, backend)


class NodeState(StrEnum):
    """Whether a node takes new work."""

    READY = "READY"
    DRAINING = "DRAINING"
    DRAINED = "DRAINED"
    OFFLINE = "OFFLINE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator of a node: a whole GPU or a MIG slice."""

    index: int
    device: str
    """What CUDA_VISIBLE_DEVICES is given for it."""
    type: str
    memory_mb: int
    healthy: bool = True
    problem: str = ""
    used_mb: int | None = None
    """Memory that is in use by whomever, as last reported; None where nobody can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    node_id: str
    backend: str
    hostname: str
    address: str = "127.0.0.1"
    cpu_cores: int
    ram_mb: int
    storage_mb: int
    gpus: tuple[Gpu, ...] = ()
    labels: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    slots: int = 8
    """How many job nodes it runs at a time, whatever little they ask for."""
    state: NodeState = NodeState.READY
    last_seen_at: float = 0.0
    given_labels: tuple[str, ...] = ()
    """What an operator added to the labels that the backend reports."""
    given_capabilities: tuple[str, ...] = ()
    drain_reason: str = ""
    drain_force: bool = False
    """While it is drained: what runs there is preempted, not waited for."""
    drain_grace_s: float | None = None
    """How long those get that are preempted so; None means: as for any preemption."""
    pool: str = ""
    """The pool of a cluster that it belongs to: jobs are placed in the pool, and the engine chooses the node. A pool
    itself names itself. Empty: jobs are placed on the node."""
    held_gpus: int = 0
    """What is in use on a node of a pool, by jobs of whomever, according to the engine; likewise those below."""
    held_cpu_cores: int = 0
    held_ram_mb: int = 0
    time_limit_s: float | None = None
    """How long its engine lets a job run at most; None: no limit is known."""

    @property
    def is_pool(self) -> bool:
        """Whether it stands for all nodes of a cluster."""
        return bool(self.pool) and self.pool == self.node_id

    @property
    def is_in_pool(self) -> bool:
        return bool(self.pool) and self.pool != self.node_id

    @property
    def tags(self) -> frozenset[str]:
        """Every capability, reported or given; `region=` labels can be required, too."""
        regions = (label for label in self.labels + self.given_labels if label.startswith(REGION))
        return frozenset((*self.capabilities, *self.given_capabilities, *regions))

    @property
    def marks(self) -> frozenset[str]:
        return frozenset(self.labels + self.given_labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobQueue:
    """Where jobs wait, and what the jobs of it may hold together."""

    name: str
    weight: float = 1.0
    """Its share of the cluster, in proportion to those of the other queues that have work."""
    quota_gpus: int | None = None
    """The most GPUs that its jobs may hold at a time; None means no limit."""
    created_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterEvent:
    """Something that happened to the cluster and to no job: a node was drained, a GPU failed, a queue was changed."""

    at: float
    type: str
    """Such as `node_draining`, `node_drained`, `node_enabled`, `node_changed`, `node_offline`, `gpu_unhealthy`,
    `gpu_healthy`, `queue_changed`, `queue_removed`."""
    subject: str
    """`node/<id>` or `queue/<name>`."""
    message: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a job asks of each of its nodes; hard unless said otherwise."""

    node_count: int = 1
    gpus_per_node: int | None = None
    """None: one where the job describes a GPU or the backend has GPUs, else none."""
    gpu_type: str | None = None
    gpu_memory_min_mb: int = 0
    cpu_cores: int = 0
    ram_mb: int = 0
    storage_mb: int = 0
    capabilities: tuple[str, ...] = ()
    affinity: tuple[str, ...] = ()
    """Soft: labels of nodes to prefer."""
    anti_affinity: tuple[str, ...] = ()
    """Soft: labels of nodes to avoid."""

    @property
    def describes_gpu(self) -> bool:
        """Whether a GPU's type or memory is required, which only a GPU can satisfy."""
        return self.gpu_type is not None or self.gpu_memory_min_mb > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one node of a gang holds on one machine."""

    node_id: str
    gpus: tuple[int, ...] = ()
    cpu_cores: int = 0
    ram_mb: int = 0
    storage_mb: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    gpus: frozenset[int] = field(default_factory=frozenset)
    cpu_cores: int = 0
    ram_mb: int = 0
    storage_mb: int = 0
    slots: int = 0

    def without(self, share: Share) -> Free:
        return self.less(share.gpus, share.cpu_cores, share.ram_mb, share.storage_mb, 1)

    def less(self, gpus: Iterable[int], cpu_cores: int, ram_mb: int, storage_mb: int, slots: int) -> Free:
        return Free(
            gpus=self.gpus.difference(gpus),
            cpu_cores=max(0, self.cpu_cores - cpu_cores),
            ram_mb=max(0, self.ram_mb - ram_mb),
            storage_mb=max(0, self.storage_mb - storage_mb),
            slots=max(0, self.slots - slots),
        )


def whole(node: Node) -> Free:
    """An empty node."""
    return Free(
        gpus=frozenset(gpu.index for gpu in node.gpus if gpu.healthy),
        cpu_cores=node.cpu_cores,
        ram_mb=node.ram_mb,
        storage_mb=node.storage_mb,
        slots=node.slots,
    )


def same_gpu_type(wanted: str, present: str) -> bool:
    """Whether a node's GPU is of the wanted type: case and punctuation do not count, `H100` finds `H100-80GB`.

    >>> same_gpu_type("a100 80gb", "A100-80GB"), same_gpu_type("H100", "NVIDIA H100 80GB HBM3")
    (True, True)
    >>> same_gpu_type("A100-80GB", "A100-40GB"), same_gpu_type("L4", "L40S")
    (False, False)
    """
    have, want = (set(re.findall(r"[a-z0-9.]+", name.lower())) for name in (present, wanted))
    return bool(want) and want <= have


def needs_to_json(needs: Needs) -> dict[str, Any]:
    """Without what is at its default."""
    fields = Needs.__dataclass_fields__.items()
    return {name: value for name, known in fields if (value := getattr(needs, name)) != known.default}


def needs_from_json(document: Mapping[str, Any]) -> Needs:
    return Needs(**_known_fields(Needs, document))


def share_to_json(share: Share) -> dict[str, Any]:
    return {name: getattr(share, name) for name in Share.__dataclass_fields__}


def share_from_json(document: Mapping[str, Any]) -> Share:
    return Share(**_known_fields(Share, document))


def _known_fields(kind: type[Needs | Share], document: Mapping[str, Any]) -> dict[str, Any]:
    """A document's fields of a dataclass, lists as tuples; unknown ones are ignored."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in document.items()
        if name in kind.__dataclass_fields__
    }

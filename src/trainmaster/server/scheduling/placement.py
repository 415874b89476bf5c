"""Which nodes and GPUs a gang can use, and the nodes grouped by kind, so that nodes that are alike are checked once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from trainmaster.server.core.job import Job
from trainmaster.server.core.resources import Free, Gpu, Needs, Node, NodeState, Share, same_gpu_type


def is_slice(gpu_type: str) -> bool:
    """Whether it is a MIG slice, such as `mig-1g.5gb`, and not a whole GPU."""
    return same_gpu_type("mig", gpu_type)


def good_enough(needs: Needs, gpu_type: str, memory_mb: int) -> bool:
    """Whether a GPU is what a job asks for. A MIG slice is only for those that ask for one by name."""
    if memory_mb < needs.gpu_memory_min_mb:
        return False
    if needs.gpu_type is None:
        return not is_slice(gpu_type)
    return same_gpu_type(needs.gpu_type, gpu_type) and (is_slice(needs.gpu_type) or not is_slice(gpu_type))


def preference(needs: Needs, marks: frozenset[str]) -> int:
    """How little a job likes a node with these labels; lower is better."""
    return len(marks.intersection(needs.anti_affinity)) - len(marks.intersection(needs.affinity))


def share_of(needs: Needs, node_id: str, gpus: Sequence[int]) -> Share:
    return Share(
        node_id=node_id,
        gpus=tuple(sorted(gpus)),
        cpu_cores=needs.cpu_cores,
        ram_mb=needs.ram_mb,
        storage_mb=needs.storage_mb,
    )


class Amounts(NamedTuple):
    """What the share of a queue is measured in."""

    gpus: int = 0
    cpu_cores: int = 0
    slots: int = 0

    def plus(self, other: Amounts, times: int = 1) -> Amounts:
        return Amounts(
            self.gpus + times * other.gpus, self.cpu_cores + times * other.cpu_cores, self.slots + times * other.slots
        )

    def share_of(self, total: Amounts) -> float:
        """The dominant share: the largest fraction of any one resource."""
        return max(have / all_ if all_ else 0.0 for have, all_ in zip(self, total, strict=True))


class Unit(NamedTuple):
    memory_mb: int
    number: int
    type: str


@dataclass(frozen=True, slots=True)
class NodeKind:
    """What nodes have in common that a job may require. Soft labels are not part of it."""

    backend: str
    cpu_cores: int
    ram_mb: int
    storage_mb: int
    slots: int
    units: tuple[Unit, ...]
    """The healthy GPUs, smallest first."""
    tags: frozenset[str]
    parts: tuple[tuple[NodeKind, int], ...] = ()
    """Of a pool: the kinds of its nodes, and how many nodes are of each."""
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        size = (self.backend, self.cpu_cores, self.ram_mb, self.storage_mb, self.slots)
        object.__setattr__(self, "_hash", hash((size, self.units, self.tags, self.parts)))

    def __hash__(self) -> int:
        return self._hash

    def matching(self, needs: Needs) -> tuple[int, ...]:
        """Indexes of the GPUs that are good enough, smallest first."""
        return tuple(unit.number for unit in self.units if good_enough(needs, unit.type, unit.memory_mb))

    def members(self, needs: Needs, gpus: int) -> int:
        """How many nodes of a gang it could hold, if nothing else ran there."""
        if self.parts:
            return sum(kind.members(needs, gpus) * count for kind, count in self.parts)
        if not self.tags.issuperset(needs.capabilities):
            return 0
        matching = len(self.matching(needs)) if gpus else 0
        return members(needs, gpus, matching, self.cpu_cores, self.ram_mb, self.storage_mb, self.slots)

    def hosts(self, needs: Needs, gpus: int) -> int:
        """How many nodes of a pool could hold a node of a gang, if nothing else ran there; a node counts as one."""
        if self.parts:
            return sum(count for kind, count in self.parts if kind.members(needs, gpus))
        return min(1, self.members(needs, gpus))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    kinds: Mapping[NodeKind, tuple[str, ...]] = field(default_factory=dict)
    """The nodes of each kind that accept jobs."""
    kind_of: Mapping[str, NodeKind] = field(default_factory=dict)
    totals: Mapping[str, Amounts] = field(default_factory=dict)
    with_whole_gpus: frozenset[str] = frozenset()
    """Backends that have a GPU which is not a MIG slice."""

    def gpus_wanted(self, needs: Needs, backend: str) -> int:
        """GPUs per node: the requested count; else one where the job describes a GPU or the backend has whole GPUs."""
        if needs.gpus_per_node is not None:
            return needs.gpus_per_node
        return int(needs.describes_gpu or backend in self.with_whole_gpus)


def pools_of(nodes: Iterable[Node]) -> list[Node]:
    """The pools of clusters, each as one node with all that its ready nodes have."""
    by_pool: defaultdict[str, list[Node]] = defaultdict(list)
    for node in nodes:
        if node.is_in_pool:
            by_pool[node.pool].append(node)
    return [_pool(name, every) for name, every in by_pool.items()]


def _pool(name: str, every: Sequence[Node]) -> Node:
    ready = [node for node in every if node.state is NodeState.READY]
    gpus = (gpu for node in ready for gpu in node.gpus if gpu.healthy)
    return Node(
        node_id=name,
        backend=every[0].backend,
        hostname=name,
        cpu_cores=sum(node.cpu_cores for node in ready),
        ram_mb=sum(node.ram_mb for node in ready),
        storage_mb=sum(node.storage_mb for node in ready),
        gpus=tuple(replace(gpu, index=index, used_mb=None) for index, gpu in enumerate(gpus)),
        labels=tuple(sorted({label for node in ready for label in node.marks})),
        capabilities=tuple(sorted({tag for node in ready for tag in node.tags})),
        slots=sum(node.slots for node in ready),
        state=NodeState.READY if ready else NodeState.OFFLINE,
        last_seen_at=max(node.last_seen_at for node in every),
        pool=name,
    )


def inventory_from_nodes(nodes: Iterable[Node]) -> Inventory:
    """Nodes of a pool count as parts of it, and the pool as one node."""
    kinds: defaultdict[NodeKind, list[str]] = defaultdict(list)
    kind_of: dict[str, NodeKind] = {}
    totals: defaultdict[str, Amounts] = defaultdict(Amounts)
    with_whole = set()
    known: dict[NodeKind, NodeKind] = {}
    parts: defaultdict[str, Counter[NodeKind]] = defaultdict(Counter)
    for node in sorted(nodes, key=lambda node: node.is_pool):  # after the nodes of the pool
        units = tuple(sorted(Unit(gpu.memory_mb, gpu.index, gpu.type) for gpu in node.gpus if gpu.healthy))
        found = NodeKind(
            *(node.backend, node.cpu_cores, node.ram_mb, node.storage_mb, node.slots, units, node.tags),
            parts=tuple(parts[node.node_id].items()) if node.is_pool else (),
        )
        kind = known.setdefault(found, found)
        if node.is_in_pool:
            if node.state is NodeState.READY:
                parts[node.pool][kind] += 1
            continue
        totals[node.backend] = totals[node.backend].plus(Amounts(len(kind.units), node.cpu_cores, node.slots))
        if node.backend not in with_whole and not all(is_slice(gpu.type) for gpu in node.gpus):
            with_whole.add(node.backend)
        if node.state is NodeState.READY:
            kinds[kind].append(node.node_id)
            kind_of[node.node_id] = kind
    return Inventory(
        kinds={kind: tuple(sorted(ids)) for kind, ids in kinds.items()},
        kind_of=kind_of,
        totals=dict(totals),
        with_whole_gpus=frozenset(with_whole),
    )


def members(needs: Needs, gpus: int, matching: int, cpu_cores: int, ram_mb: int, storage_mb: int, slots: int) -> int:
    """How many nodes of a gang fit into these amounts."""
    most = slots
    if gpus:
        most = min(most, matching // gpus)
    if needs.cpu_cores:
        most = min(most, cpu_cores // needs.cpu_cores)
    if needs.ram_mb:
        most = min(most, ram_mb // needs.ram_mb)
    if needs.storage_mb:
        most = min(most, storage_mb // needs.storage_mb)
    return max(0, most)


FreeAmounts = tuple[int, int, int, int, int]
"""GPUs that are good enough, cores, memory, disk, slots."""
NOTHING: FreeAmounts = (0, 0, 0, 0, 0)


def free_amounts(free: Free, good: frozenset[int]) -> FreeAmounts:
    return len(good & free.gpus), free.cpu_cores, free.ram_mb, free.storage_mb, free.slots


def given_amounts(share: Share, good: frozenset[int]) -> FreeAmounts:
    return len(good.intersection(share.gpus)), share.cpu_cores, share.ram_mb, share.storage_mb, 1


def plus(first: FreeAmounts, second: FreeAmounts) -> FreeAmounts:
    a, b, c, d, e = first
    f, g, h, i, j = second
    return a + f, b + g, c + h, d + i, e + j


TOLERATED_MB = 1024
"""What a driver, a display or a monitoring tool may hold on a GPU that is free."""


def judge(nodes: Iterable[Node], jobs: Iterable[Job]) -> list[Node]:
    """The nodes as reported, without GPUs whose memory others than these jobs use: the next job would miss it."""
    held = {(share.node_id, gpu) for job in jobs for share in job.live.shares for gpu in share.gpus}
    return [
        replace(node, gpus=tuple(gpu if (node.node_id, gpu.index) in held else _judge_gpu(gpu) for gpu in node.gpus))
        for node in nodes
    ]


def occupied(nodes: Iterable[Node]) -> bool:
    """Whether a GPU is unschedulable only until its memory is free, so that it should be checked again soon."""
    return any(not gpu.healthy and _in_use(gpu) for node in nodes for gpu in node.gpus)


def _judge_gpu(gpu: Gpu) -> Gpu:
    if not gpu.healthy or not _in_use(gpu):
        return gpu
    return replace(gpu, healthy=False, problem=f"{gpu.used_mb} MB of its memory are in use, and no job holds it")


def _in_use(gpu: Gpu) -> bool:
    return gpu.used_mb is not None and gpu.used_mb > TOLERATED_MB

"""Whether and where a gang fits, and the nodes grouped by kind, so that nodes that are alike are checked once.

A gang gets all of its nodes or none. `fit` has the rules themselves, for a few nodes; `scheduling.pool` finds the same
places among ten thousand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trainmaster.server.core.resources import Free, Needs, Node, NodeState, Share, same_gpu_type


def fit(needs: Needs, nodes: Sequence[Node], free: Mapping[str, Free]) -> list[Share] | None:
    """A share for each node of the gang, or None when it does not fit into what is free."""
    left = dict(free)
    shares: list[Share] = []
    for _ in range(needs.node_count):
        chosen = _best(needs, nodes, left, shares)
        if chosen is None:
            return None
        node, share = chosen
        left[node.node_id] = left[node.node_id].without(share)
        shares.append(share)
    return shares


def usable(needs: Needs, node: Node) -> bool:
    """Whether the node takes work and has every tag that the job requires."""
    return node.state is NodeState.READY and node.tags.issuperset(needs.capabilities)


def gpus_wanted(needs: Needs, nodes: Sequence[Node]) -> int:
    """GPUs per node: the requested count; else one where the job describes a GPU or the backend has whole GPUs."""
    if needs.gpus_per_node is not None:
        return needs.gpus_per_node
    return int(needs.describes_gpu or any(not is_slice(gpu.type) for node in nodes for gpu in node.gpus))


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


def matching_gpus(needs: Needs, node: Node, free: Free) -> list[int]:
    """The free GPUs of a node that are good enough, smallest first."""
    good = [gpu for gpu in node.gpus if gpu.index in free.gpus and good_enough(needs, gpu.type, gpu.memory_mb)]
    good.sort(key=lambda gpu: (gpu.memory_mb, gpu.index))
    return [gpu.index for gpu in good]


def preference(needs: Needs, marks: frozenset[str]) -> int:
    """How little a job likes a node with these labels; lower is better."""
    return len(marks.intersection(needs.anti_affinity)) - len(marks.intersection(needs.affinity))


def share_on(needs: Needs, node: Node, free: Free, gpus: int) -> Share | None:
    """What one node of the gang would take here; None when it does not fit."""
    if (
        free.slots < 1
        or free.cpu_cores < needs.cpu_cores
        or free.ram_mb < needs.ram_mb
        or free.storage_mb < needs.storage_mb
    ):
        return None
    matching = matching_gpus(needs, node, free) if gpus else []
    if len(matching) < gpus:
        return None
    return share_of(needs, node.node_id, matching[:gpus])


def share_of(needs: Needs, node_id: str, gpus: Sequence[int]) -> Share:
    """What one node of the gang takes, with these GPUs."""
    return Share(
        node_id=node_id,
        gpus=tuple(sorted(gpus)),
        cpu_cores=needs.cpu_cores,
        ram_mb=needs.ram_mb,
        storage_mb=needs.storage_mb,
    )


def _best(
    needs: Needs, nodes: Sequence[Node], left: Mapping[str, Free], taken: Sequence[Share]
) -> tuple[Node, Share] | None:
    gpus = gpus_wanted(needs, nodes)
    already = {share.node_id for share in taken}
    best: tuple[tuple[int, bool, int, int, str], Node, Share] | None = None
    for node in nodes:
        free = left[node.node_id]
        if not usable(needs, node):
            continue
        share = share_on(needs, node, free, gpus)
        if share is None:
            continue
        # Soft labels first, then a machine that the gang does not use yet, then the tightest fit.
        score = (
            preference(needs, node.marks),
            node.node_id in already,
            len(free.gpus),
            free.cpu_cores,
            node.node_id,
        )
        if best is None or score < best[0]:
            best = (score, node, share)
    return (best[1], best[2]) if best else None


class Amounts(NamedTuple):
    """What the share of a queue is measured in."""

    gpus: int = 0
    cpu_cores: int = 0
    slots: int = 0

    def plus(self, other: Amounts, times: int = 1) -> Amounts:
        return Amounts(
            self.gpus + times * other.gpus,
            self.cpu_cores + times * other.cpu_cores,
            self.slots + times * other.slots,
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
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        size = (self.backend, self.cpu_cores, self.ram_mb, self.storage_mb, self.slots)
        object.__setattr__(self, "_hash", hash((size, self.units, self.tags)))

    def __hash__(self) -> int:
        return self._hash

    def matching(self, needs: Needs) -> tuple[int, ...]:
        """Indexes of the GPUs that are good enough, smallest first."""
        return tuple(unit.number for unit in self.units if good_enough(needs, unit.type, unit.memory_mb))

    def members(self, needs: Needs, gpus: int) -> int:
        """How many nodes of a gang an empty machine of this kind holds."""
        if not self.tags.issuperset(needs.capabilities):
            return 0
        matching = len(self.matching(needs)) if gpus else 0
        return members(needs, gpus, matching, self.cpu_cores, self.ram_mb, self.storage_mb, self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The nodes by kind."""

    kinds: Mapping[NodeKind, tuple[str, ...]] = field(default_factory=dict)
    """The nodes of each kind that take work."""
    kind_of: Mapping[str, NodeKind] = field(default_factory=dict)
    totals: Mapping[str, Amounts] = field(default_factory=dict)
    """What each backend has."""
    with_gpus: frozenset[str] = frozenset()
    """Backends that have any GPU."""
    with_whole_gpus: frozenset[str] = frozenset()
    """Backends that have a GPU which is not a MIG slice."""

    def gpus_wanted(self, needs: Needs, backend: str) -> int:
        """GPUs per node: the requested count; else one where the job describes a GPU or the backend has whole GPUs."""
        if needs.gpus_per_node is not None:
            return needs.gpus_per_node
        return int(needs.describes_gpu or backend in self.with_whole_gpus)


def inventory_from_nodes(nodes: Iterable[Node]) -> Inventory:
    kinds: dict[NodeKind, list[str]] = {}
    kind_of: dict[str, NodeKind] = {}
    totals: dict[str, Amounts] = {}
    with_gpus, with_whole = set(), set()
    known: dict[NodeKind, NodeKind] = {}
    for node in nodes:
        found = _kind(node)
        kind = known.setdefault(found, found)
        has = Amounts(len(kind.units), node.cpu_cores, node.slots)
        totals[node.backend] = totals.get(node.backend, Amounts()).plus(has)
        if node.gpus:
            with_gpus.add(node.backend)
            if node.backend not in with_whole and not all(is_slice(gpu.type) for gpu in node.gpus):
                with_whole.add(node.backend)
        if node.state is NodeState.READY:
            kinds.setdefault(kind, []).append(node.node_id)
            kind_of[node.node_id] = kind
    return Inventory(
        kinds={kind: tuple(sorted(ids)) for kind, ids in kinds.items()},
        kind_of=kind_of,
        totals=totals,
        with_gpus=frozenset(with_gpus),
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


def _kind(node: Node) -> NodeKind:
    return NodeKind(
        node.backend,
        node.cpu_cores,
        node.ram_mb,
        node.storage_mb,
        node.slots,
        tuple(sorted(Unit(gpu.memory_mb, gpu.index, gpu.type) for gpu in node.gpus if gpu.healthy)),
        node.tags,
    )

"""The cluster as it becomes during one pass, and the best place for a gang in it, whole or not at all. Nodes are
shelved by kind and free GPUs, and sorted by free cores: the tightest place is found without looking at every node."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from trainmaster.server.core.resources import Free, Needs, Share
from trainmaster.server.scheduling.placement import NodeKind, preference, share_of
from trainmaster.server.scheduling.view import ClusterView, HeldShare


class CapacityHolder(Protocol):
    """A job for which capacity is kept free."""

    def room(self, node_id: str, free: Free) -> Free:
        """What others may take of what is free on a node."""

    def kept(self, kind: NodeKind) -> tuple[int, int] | None:
        """GPUs and cores that are kept on every node of a kind at least; None when all of it is."""

    def limits(self, node_id: str, free: Free) -> Iterator[tuple[Free, float]]:
        """What others may have of a node: each with the time after which what is given back adds to it."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Demand:
    """What jobs with the same needs ask for, and the kinds of nodes that could hold it."""

    backend: str
    needs: Needs
    gpus: int
    """Per node of the gang."""
    kinds: Sequence[tuple[NodeKind, tuple[int, ...]]]
    """Those that could hold a node of the gang, with the GPUs that are good enough, smallest first."""
    possible: bool
    """Whether the cluster could hold the gang, if nothing else ran."""
    preferences: Mapping[str, int]
    """How little each node is liked, where it is neither liked nor disliked it is left out."""

    @property
    def count(self) -> int:
        return self.needs.node_count

    @property
    def total_gpus(self) -> int:
        return self.gpus * self.needs.node_count

    @property
    def size(self) -> tuple[int, ...]:
        """The total that it asks for, to compare two: GPUs count first."""
        needs = self.needs
        amounts = (self.gpus, needs.cpu_cores, needs.ram_mb, needs.storage_mb, 1)
        return tuple(each * needs.node_count for each in amounts)


_Used = Mapping[str, tuple[Free, list[Share]]]
"""Machines that a gang uses already: what was free there before, and what it takes."""


class Pool:
    """What is free and who holds what, as a pass goes on."""

    def __init__(self, view: ClusterView) -> None:
        self._nodes = view.nodes
        self._inventory = view.inventory
        self._occupancy = view.occupancy
        self._left = dict(view.occupancy.left)
        self._stays: dict[str, list[HeldShare]] = {}
        self._marked: dict[str, list[str]] | None = None
        self._shelves: dict[NodeKind, list[list[tuple[int, str]]]] = {}
        for kind, node_ids in view.inventory.kinds.items():
            rows: list[list[tuple[int, str]]] = [[] for _ in range(len(kind.units) + 1)]
            for node_id in node_ids:
                free = self._left[node_id]
                if free.slots:
                    rows[len(free.gpus)].append((free.cpu_cores, node_id))
            for row in rows:
                row.sort()
            self._shelves[kind] = rows

    def demand(self, backend: str, needs: Needs) -> Demand:
        gpus = self._inventory.gpus_wanted(needs, backend)
        kinds, most = [], 0
        for kind, node_ids in self._inventory.kinds.items():
            if kind.backend == backend and (each := kind.members(needs, gpus)):
                kinds.append((kind, kind.matching(needs) if gpus else ()))
                most += each * len(node_ids)
        possible = most >= needs.node_count
        return Demand(
            backend=backend,
            needs=needs,
            gpus=gpus,
            kinds=kinds,
            possible=possible,
            preferences=self._preferences(needs) if possible else {},
        )

    def hosts(self, demand: Demand) -> int:
        """How many nodes could hold a node of the gang, if nothing else ran there; those of pools count one by one."""
        return sum(kind.hosts(demand.needs, demand.gpus) * len(self.nodes_of(kind)) for kind, _ in demand.kinds)

    def left(self, node_id: str) -> Free:
        return self._left[node_id]

    def stays(self, node_id: str) -> Sequence[HeldShare]:
        """What is held of a node, sorted by its end."""
        return self._stays.get(node_id) or self._occupancy.stays.get(node_id, ())

    def nodes_of(self, kind: NodeKind) -> tuple[str, ...]:
        return self._inventory.kinds[kind]

    def kind_of(self, node_id: str) -> NodeKind | None:
        """None when the node takes no work."""
        return self._inventory.kind_of.get(node_id)

    def roomy(self, demand: Demand) -> Iterator[str]:
        """The nodes with as many free GPUs as one node of the gang needs."""
        for kind, _ in demand.kinds:
            for row in self._shelves[kind][demand.gpus :]:
                yield from (node_id for _, node_id in row)

    def find(self, demand: Demand, keepers: Sequence[CapacityHolder] = ()) -> list[Share] | None:
        """The best place for a gang beside what is kept for others; None when there is none now."""
        if not demand.possible or not self._may_fit(demand):
            return None
        used: dict[str, tuple[Free, list[Share]]] = {}
        shares: list[Share] = []
        for _ in range(demand.count):
            if (share := self._pick(demand, keepers, used)) is None:
                break
            shares.append(share)
            if demand.count > 1:
                free = self._left[share.node_id]
                used.setdefault(share.node_id, (free, []))[1].append(share)
                self._put(share.node_id, free.without(share))
        for node_id, (free, _) in used.items():
            self._put(node_id, free)
        return shares if len(shares) == demand.count else None

    def fits_beside(self, demand: Demand, shares: Iterable[Share]) -> bool:
        """Whether there would still be a place for a gang if these shares were given away."""
        before: list[tuple[str, Free]] = []
        for share in shares:
            free = self._left[share.node_id]
            before.append((share.node_id, free))
            self._put(share.node_id, free.without(share))
        found = self.find(demand)
        for node_id, free in reversed(before):
            self._put(node_id, free)
        return found is not None

    def place(self, job_id: str, shares: Iterable[Share], *, end: float, lasting: bool) -> None:
        for rank, share in enumerate(shares):
            self._put(share.node_id, self._left[share.node_id].without(share))
            stay = HeldShare(end, lasting, job_id, rank, share)
            self._stays[share.node_id] = sorted([*self.stays(share.node_id), stay])

    def stop(self, job_id: str, node_ids: Iterable[str], *, end: float) -> None:
        """Record that a job will be gone from these nodes at `end`."""
        for node_id in node_ids:
            self._stays[node_id] = sorted(
                stay._replace(end=end, lasting=False) if stay.job_id == job_id else stay for stay in self.stays(node_id)
            )

    def _put(self, node_id: str, free: Free) -> None:
        """Record what is free of a node, and move the node to its row."""
        old = self._left[node_id]
        self._left[node_id] = free
        if (kind := self._inventory.kind_of.get(node_id)) is None:
            return
        rows = self._shelves[kind]
        if old.slots:
            row = rows[len(old.gpus)]
            del row[bisect_left(row, (old.cpu_cores, node_id))]
        if free.slots:
            insort(rows[len(free.gpus)], (free.cpu_cores, node_id))

    def _may_fit(self, demand: Demand) -> bool:
        """Whether enough GPUs are free in total: a quick no."""
        most = 0
        for kind, _ in demand.kinds:
            rows = self._shelves[kind]
            if demand.gpus:
                most += sum(len(rows[level]) * (level // demand.gpus) for level in range(demand.gpus, len(rows)))
            else:
                most += sum(len(row) for row in rows) * kind.slots
            if most >= demand.count:
                return True
        return False

    def _pick(self, demand: Demand, keepers: Sequence[CapacityHolder], used: _Used) -> Share | None:
        """For one node of a gang: soft labels first, then a machine that it does not use yet, then the tightest."""
        if not demand.preferences:
            return self._tightest(demand, keepers, used, used) or (
                self._tightest(demand, keepers, used, ()) if used else None
            )
        for degree in sorted({0, *demand.preferences.values()}):
            if degree:
                share = self._tightest_of(demand, keepers, used, degree)
            else:
                apart = demand.preferences.keys()
                share = self._tightest(demand, keepers, used, apart | used.keys())
                if share is None and used:
                    share = self._tightest(demand, keepers, used, apart)
            if share is not None:
                return share
        return None

    def _tightest(
        self, demand: Demand, keepers: Sequence[CapacityHolder], used: _Used, apart: Collection[str]
    ) -> Share | None:
        """On the node with the fewest free GPUs, then the fewest free cores, that has room; not on those in `apart`."""
        needs = demand.needs
        open_kinds = []
        for kind, matching in demand.kinds:
            if (kept := _kept(keepers, kind)) is not None:
                level = demand.gpus + (kept[0] if demand.gpus else 0)
                cores = needs.cpu_cores + (kept[1] if needs.cpu_cores else 0)
                open_kinds.append((self._shelves[kind], matching, level, cores))
        for level in range(demand.gpus, max((len(rows) for rows, _, _, _ in open_kinds), default=0)):
            best: tuple[tuple[int, str], Share] | None = None
            for rows, matching, lowest, cores in open_kinds:
                if not lowest <= level < len(rows):
                    continue
                row = rows[level]
                for at in range(bisect_left(row, (cores, "")), len(row)):
                    place = row[at]
                    if best is not None and place >= best[0]:
                        break
                    if place[1] in apart:
                        continue
                    if (share := self._share(demand, matching, place[1], keepers, used)) is not None:
                        best = (place, share)
                        break
            if best is not None:
                return best[1]
        return None

    def _tightest_of(self, demand: Demand, keepers: Sequence[CapacityHolder], used: _Used, degree: int) -> Share | None:
        """The same among the nodes of one degree of preference."""
        matching = dict(demand.kinds)
        best: tuple[tuple[bool, int, int, str], Share] | None = None
        for node_id, found in demand.preferences.items():
            kind = self._inventory.kind_of.get(node_id)
            if found != degree or kind not in matching:
                continue
            if (share := self._share(demand, matching[kind], node_id, keepers, used)) is not None:
                free = self._left[node_id]
                score = (node_id in used, len(free.gpus), free.cpu_cores, node_id)
                if best is None or score < best[0]:
                    best = (score, share)
        return best[1] if best else None

    def _share(
        self, demand: Demand, matching: tuple[int, ...], node_id: str, keepers: Sequence[CapacityHolder], used: _Used
    ) -> Share | None:
        """What one node of a gang would take of what is free; None when it does not fit."""
        free = self._left[node_id]
        needs = demand.needs
        if free.ram_mb < needs.ram_mb or free.storage_mb < needs.storage_mb or len(free.gpus) < demand.gpus:
            return None
        if keepers:
            # Room is of what was free before; the gang's own nodes come off it.
            free, own = used.get(node_id, (free, []))
            for keeper in keepers:
                free = keeper.room(node_id, free)
            for share in own:
                free = free.without(share)
        if free.slots < 1 or free.cpu_cores < needs.cpu_cores:
            return None
        if free.ram_mb < needs.ram_mb or free.storage_mb < needs.storage_mb:
            return None
        gpus = [index for index in matching if index in free.gpus][: demand.gpus] if demand.gpus else []
        return share_of(needs, node_id, gpus) if len(gpus) == demand.gpus else None

    def _preferences(self, needs: Needs) -> dict[str, int]:
        if not needs.affinity and not needs.anti_affinity:
            return {}
        if self._marked is None:
            self._marked = {}
            for node in self._nodes.values():
                for mark in node.marks:
                    self._marked.setdefault(mark, []).append(node.node_id)
        named = {node_id for mark in needs.affinity + needs.anti_affinity for node_id in self._marked.get(mark, ())}
        found = {node_id: preference(needs, self._nodes[node_id].marks) for node_id in named}
        return {node_id: degree for node_id, degree in found.items() if degree}


def _kept(keepers: Sequence[CapacityHolder], kind: NodeKind) -> tuple[int, int] | None:
    gpus = cores = 0
    for keeper in keepers:
        if (kept := keeper.kept(kind)) is None:
            return None
        gpus, cores = max(gpus, kept[0]), max(cores, kept[1])
    return gpus, cores

"""Reservations: capacity that is kept for the first jobs in line that do not fit yet.

A job that could run, but not in what is free now, is a *head* unless one before it waits for the same kind of
node. From the known ends of what runs follows when it fits at the latest, and where; that is its reservation:

- It has one: whoever is behind it may start where it does not reserve anything, or ends before it starts, or
  fits beside it. So the head starts no later than reserved, whatever is started behind it; where everything
  takes as long as its limit says, it starts exactly when it would if nothing else were started.
- It has none, because what it waits for has no limit: whoever is behind it takes nothing of what is free and
  it could use, on any node where it could come to run.

A limit counts from the start of the ranks, or from the placement until then. The time that an attempt takes to
start, and to go once it is over its limit, is not foreseen.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from heapq import nsmallest
from typing import NamedTuple

from trainmaster.server.core.job import Job
from trainmaster.server.core.resources import Free, Share
from trainmaster.server.scheduling.placement import NodeKind, members, share_of
from trainmaster.server.scheduling.pool import Demand, Pool
from trainmaster.server.scheduling.view import HeldShare, Key

Claims = Callable[[str], Iterable[Share]]
"""What others reserve on a node, who come before."""

_NOTHING = Free()


class PendingRelease(NamedTuple):
    """Where room is being made, and by when. A job for which that is enough needs no other nodes."""

    nodes: Collection[str]
    by: float


class Reservation:
    """A job that is first in line, and what is kept for it; a `CapacityHolder`."""

    def __init__(
        self,
        job: Job,
        key: Key,
        demand: Demand,
        *,
        pool: Pool,
        claims: Claims,
        now: float,
        backfill: bool = True,
        near: PendingRelease | None = None,
    ) -> None:
        self.job = job
        self.key = key
        self.demand = demand
        self.start = math.inf
        """When it starts at the latest; infinite when nobody knows."""
        self.reserved: dict[str, list[Share]] = {}
        """Where it will be, when that is known."""
        self._pool = pool
        self._claims = claims
        self._now = now
        self._backfill = backfill
        self._beside: dict[str, Free] = {}
        self._openings: dict[str, list[float]] = {}
        self._kept: dict[NodeKind, tuple[int, int] | None] = {}
        self._matching = dict(demand.kinds)
        if near is not None:
            self.touch({*near.nodes, *(pool.roomy(demand) if demand.count > 1 else ())})
        if near is None or self.start > near.by:
            for kind in self._matching:
                self._survey(kind)
            self._reserve()

    @property
    def open_until(self) -> float:
        """A job that ends by then cannot delay the head; without backfill, or a known start, there is no such time."""
        return self.start if self._backfill and math.isfinite(self.start) else -math.inf

    @property
    def possible(self) -> bool:
        """Whether the head could ever run beside jobs that never end."""
        return sum(map(len, self._openings.values())) >= self.demand.count

    def room(self, node_id: str, free: Free) -> Free:
        if not self._backfill:
            return _NOTHING if node_id in self._openings else free
        if math.isfinite(self.start):
            beside = self._beside.get(node_id)
            return free if beside is None else _least(free, beside)
        demand, needs, most = self.demand, self.demand.needs, len(self._openings.get(node_id, ()))
        if not most:
            return free
        gpus: list[int] = []
        if demand.gpus and free.gpus:
            matching = self._matching[self._kind(node_id)]
            gpus = [index for index in matching if index in free.gpus][: most * demand.gpus]
        return free.less(gpus, most * needs.cpu_cores, most * needs.ram_mb, most * needs.storage_mb, most)

    def kept(self, kind: NodeKind) -> tuple[int, int] | None:
        if math.isfinite(self.start) and self._backfill:
            return 0, 0
        return self._kept.get(kind, (0, 0))

    def limits(self, node_id: str, free: Free) -> Iterator[tuple[Free, float]]:
        beside = self._beside.get(node_id)
        if beside is not None and self._backfill:
            yield free, -math.inf
            yield beside, self.start
        elif node_id in self._openings and not (self._backfill and math.isfinite(self.start)):
            yield self.room(node_id, free), -math.inf

    def touch(self, node_ids: Iterable[str]) -> None:
        """Look again at nodes where somebody was placed or is being stopped."""
        again = False
        for node_id in node_ids:
            kind = self._pool.kind_of(node_id)
            if kind is None or kind not in self._matching:
                continue
            found = self._node_openings(kind, node_id)
            again = again or node_id in self.reserved or bool(found and found[0] < self.start)
            if len(found) < len(self._openings.get(node_id, ())):
                self._kept[kind] = (0, 0)
            if found:
                self._openings[node_id] = found
            else:
                self._openings.pop(node_id, None)
        if again:
            self._reserve()

    def _kind(self, node_id: str) -> NodeKind:
        kind = self._pool.kind_of(node_id)
        assert kind is not None  # Only nodes that accept jobs are considered.
        return kind

    def _survey(self, kind: NodeKind) -> None:
        fewest = self.demand.count
        for node_id in self._pool.nodes_of(kind):
            if found := self._node_openings(kind, node_id):
                self._openings[node_id] = found
            fewest = min(fewest, len(found))
        gpus = fewest * self.demand.gpus if len(self._matching[kind]) == len(kind.units) else 0
        kept = (gpus, fewest * self.demand.needs.cpu_cores)
        self._kept[kind] = None if fewest and not self._backfill else kept

    def _node_openings(self, kind: NodeKind, node_id: str) -> list[float]:
        stays, claims = self._pool.stays(node_id), self._claims(node_id)
        return openings(self.demand, kind, self._matching[kind], stays=stays, claims=claims, now=self._now)

    def _reserve(self) -> None:
        """Find the earliest start that is certain, and the places."""
        self.start, self.reserved, self._beside = math.inf, {}, {}
        known = ((at, node_id) for node_id, times in self._openings.items() for at in times if at < math.inf)
        first = nsmallest(self.demand.count, known)
        if len(first) < self.demand.count:
            return
        self.start = first[-1][0]
        for node_id, most in Counter(node_id for _, node_id in first).items():
            beside, shares = self._free_then(node_id), []
            matching = self._matching[self._kind(node_id)]
            for _ in range(most):
                gpus = [index for index in matching if index in beside.gpus][: self.demand.gpus]
                share = share_of(self.demand.needs, node_id, gpus)
                beside = beside.without(share)
                shares.append(share)
            self.reserved[node_id], self._beside[node_id] = shares, beside

    def _free_then(self, node_id: str) -> Free:
        kind = self._kind(node_id)
        free = Free(
            gpus=frozenset(unit.number for unit in kind.units),
            cpu_cores=kind.cpu_cores,
            ram_mb=kind.ram_mb,
            storage_mb=kind.storage_mb,
            slots=kind.slots,
        )
        for stay in self._pool.stays(node_id):
            if stay.end > self.start:
                free = free.without(stay.share)
        for share in self._claims(node_id):
            free = free.without(share)
        return free


def openings(
    demand: Demand,
    kind: NodeKind,
    matching: Sequence[int],
    *,
    stays: Sequence[HeldShare],
    claims: Iterable[Share],
    now: float,
) -> list[float]:
    """When a node has room for the first node of a gang, for the second and so on, as those that stay end."""
    needs, gpus = demand.needs, demand.gpus
    good = frozenset(matching)
    have, cores, ram, storage, slots = len(good), kind.cpu_cores, kind.ram_mb, kind.storage_mb, kind.slots
    for share in claims:
        have -= len(good.intersection(share.gpus))
        cores, ram, storage, slots = cores - share.cpu_cores, ram - share.ram_mb, storage - share.storage_mb, slots - 1
    most = min(demand.count, members(needs, gpus, have, cores, ram, storage, slots))
    times: list[float] = []
    for stay in reversed(stays):
        if not most:
            break
        share = stay.share
        if gpus:
            have -= len(good.intersection(share.gpus))
        cores, ram, storage, slots = cores - share.cpu_cores, ram - share.ram_mb, storage - share.storage_mb, slots - 1
        before, most = most, min(most, members(needs, gpus, have, cores, ram, storage, slots))
        if not stay.lasting and most < before:
            times += [max(stay.end, now)] * (before - most)
    times += [now] * most
    times.reverse()
    return times


class Reservations:
    def __init__(self, pool: Pool, *, now: float, backfill: bool) -> None:
        self._pool = pool
        self._now = now
        self._backfill = backfill
        self._covered: dict[NodeKind, Key] = {}
        self._all: dict[str, Reservation] = {}

    def __iter__(self) -> Iterator[Reservation]:
        return iter(list(self._all.values()))

    def get(self, job_id: str) -> Reservation | None:
        return self._all.get(job_id)

    def before(self, key: Key, end: float) -> list[Reservation]:
        """The heads that a job with this place in line, which ends at `end`, must not delay."""
        return [head for head in self._all.values() if head.key < key and not end <= head.open_until]

    def elect(self, job: Job, key: Key, demand: Demand) -> Reservation | None:
        """Make a job a head, unless one before it waits for the same kind of node."""
        if job.job_id in self._all or any(self._covered.get(kind, key) < key for kind, _ in demand.kinds):
            return None
        if (head := self.add(job, key, demand)) is not None:
            for kind, _ in demand.kinds:
                self._covered[kind] = min(key, self._covered.get(kind, key))
        return head

    def add(self, job: Job, key: Key, demand: Demand, *, near: PendingRelease | None = None) -> Reservation | None:
        """Make a job a head whoever else is one; None when it could never run beside jobs that never end."""
        head = Reservation(
            job,
            key,
            demand,
            pool=self._pool,
            claims=lambda node_id: self._claims(node_id, key),
            now=self._now,
            backfill=self._backfill,
            near=near if self._backfill else None,
        )
        if not head.possible:
            return None
        self._all[job.job_id] = head
        for other in self._all.values():
            if other.key > key:
                other.touch(head.reserved)
        return head

    def remove(self, head: Reservation) -> None:
        del self._all[head.job.job_id]
        if any(self._covered.get(kind) == head.key for kind, _ in head.demand.kinds):
            self._covered = {kind: key for kind, key in self._covered.items() if key != head.key}

    def touch(self, node_ids: Iterable[str]) -> None:
        nodes = set(node_ids)
        for head in self._all.values():
            head.touch(nodes)

    def _claims(self, node_id: str, key: Key) -> Iterator[Share]:
        for head in self._all.values():
            if head.key < key:
                yield from head.reserved.get(node_id, ())


def _least(free: Free, other: Free) -> Free:
    return Free(
        gpus=free.gpus & other.gpus,
        cpu_cores=min(free.cpu_cores, other.cpu_cores),
        ram_mb=min(free.ram_mb, other.ram_mb),
        storage_mb=min(free.storage_mb, other.storage_mb),
        slots=min(free.slots, other.slots),
    )

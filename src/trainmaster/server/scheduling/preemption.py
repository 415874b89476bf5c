"""Which jobs to stop for one that waits: the cheapest set that makes room for it.

Only preemptible jobs of a lower priority, as it was given and not as it aged. Cheapest means, in this order: the
highest priority among them is as low as can be; they lose the least work; they are the fewest, with the fewest
GPUs. For a job on one node the set is the cheapest there is, unless more than `EXACT` jobs could be stopped on a
node. For a gang, nodes are added one by one, the cheapest next, and whoever is not needed in the end is spared.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from trainmaster.protocol.reasons import StopCause
from trainmaster.server.core.commands import grace_s
from trainmaster.server.core.job import Job
from trainmaster.server.core.resources import Node, NodeState
from trainmaster.server.scheduling.placement import NOTHING, FreeAmounts, free_amounts, given_amounts, plus
from trainmaster.server.scheduling.pool import CapacityHolder, Demand, Pool
from trainmaster.server.scheduling.reservations import PendingRelease
from trainmaster.server.scheduling.victims import (
    EXACT,
    Cost,
    Site,
    Victim,
    cheapest,
    cost_of,
    have_room,
    least_cost,
    spared,
    with_gpus,
)
from trainmaster.server.scheduling.view import ClusterView, Occupancy, held_by, known_end

PREEMPTORS = 16
"""Jobs that room is made for in one pass."""
LOOKS = 5_000
"""Nodes that are looked at closely for victims in one pass; the next pass goes on."""
GLANCES = 8
"""So many nodes are weighed in the time that one is looked at closely."""


class VictimSearch:
    def __init__(self, pool: Pool, occupancy: Occupancy, now: float) -> None:
        self._pool = pool
        self._now = now
        self._stopping = dict(occupancy.stopping)
        self._running = dict(occupancy.preemptible)
        self._priorities: Counter[tuple[str, int]] | None = None
        self._lowest: dict[str, int | None] = {}
        self._victims: dict[str, Victim] = {}
        self._by_node: dict[str, list[Victim]] = {}
        self._by_queue: defaultdict[str, dict[str, Job]] | None = None
        self._weighed: dict[tuple[Demand, int], dict[str, Cost | None]] = {}
        self._sorted = False
        self._preemptors = 0
        self._looks = 0.0

    @property
    def spent(self) -> bool:
        """Whether this pass has preempted as many jobs as it may."""
        return self._preemptors >= PREEMPTORS or self._looks >= LOOKS

    def lowest(self, backend: str) -> int | None:
        if self._priorities is None:
            self._priorities = Counter((job.host_backend, job.priority) for job in self._running.values())
        if backend not in self._lowest:
            left = (priority for (name, priority), count in self._priorities.items() if name == backend and count)
            self._lowest[backend] = min(left, default=None)
        return self._lowest[backend]

    def released_gpus(self, queue: str) -> int:
        """GPUs that jobs of a queue will give back because they are being stopped."""
        return sum(held_by(job).gpus for job in self._stopping.values() if job.queue == queue)

    def given_back(self) -> Counter[str]:
        """GPUs that will be given back, by node."""
        gpus: Counter[str] = Counter()
        for job in self._stopping.values():
            for share in job.live.shares:
                gpus[share.node_id] += len(share.gpus)
        return gpus

    def near(self) -> PendingRelease:
        """Where jobs are being stopped, and when the last of them is gone."""
        nodes = self.given_back()
        ends = (stay.end for node_id in nodes for stay in self._pool.stays(node_id) if stay.job_id in self._stopping)
        return PendingRelease(nodes, max(ends, default=-math.inf))

    def stop(self, victims: Iterable[Job]) -> None:
        self._preemptors += 1
        for job in victims:
            del self._running[job.job_id]
            self._stopping[job.job_id] = job
            self._lowest.clear()
            if self._priorities is not None:
                self._priorities[job.host_backend, job.priority] -= 1
            if self._by_queue is not None:
                del self._by_queue[job.queue][job.job_id]
            nodes = {share.node_id for share in job.live.shares}
            for node_id in nodes if self._by_node else ():
                self._by_node[node_id].remove(self._victims[job.job_id])
                for weighed in self._weighed.values():
                    weighed.pop(node_id, None)
            self._pool.stop(job.job_id, nodes, end=self._now + grace_s(job, StopCause.PREEMPT))

    def find(
        self, job: Job, demand: Demand, keepers: Sequence[CapacityHolder], *, quota_gpus: int = 0
    ) -> list[Job] | None:
        """The jobs to stop for one that does not fit: none when what is being given back is enough, None when it would
        not help. With `quota_gpus`, so many GPUs must come from the job's own queue, and only its jobs are stopped."""
        if not self._sorted:
            self._sort_out()
        own = quota_gpus > 0
        found = self._within_queue(job, demand, keepers, quota_gpus) if own else self._places(job, demand, keepers)
        return None if found is None else sorted((each.job for each in found), key=lambda each: each.job_id)

    def _sort_out(self) -> None:
        """A job that ends by itself before it could be stopped counts as stopped."""
        self._sorted = True
        for job in list(self._running.values()):
            if job.max_runtime_s is not None and known_end(job) <= self._now + grace_s(job, StopCause.PREEMPT):
                self._stopping[job.job_id] = self._running.pop(job.job_id)
        self._priorities = None
        self._lowest.clear()

    def _within_queue(
        self, job: Job, demand: Demand, keepers: Sequence[CapacityHolder], quota_gpus: int
    ) -> Collection[Victim] | None:
        """Victims in the job's own queue, which free its quota as well."""
        own = [self._victim(other) for other in self._of_queue(job.queue) if _may(job, other, own_queue=True)]
        if sum(each.gpus for each in own) < quota_gpus:
            return None
        fits = self._pool.find(demand, keepers) is not None
        nodes = {share.node_id for each in own for share in each.job.live.shares}
        nodes.update(self.given_back(), self._pool.roomy(demand) if demand.count > 1 else ())
        sites = [] if fits else self._sites(nodes, job, demand, keepers, own_queue=True)

        def enough(gone: Collection[Victim]) -> bool:
            return sum(each.gpus for each in gone) >= quota_gpus and (fits or have_room(sites, demand.count, gone))

        for highest in sorted({each.job.priority for each in own}):
            allowed = {each for each in own if each.job.priority <= highest}
            if enough(allowed):
                break
        else:
            return None
        if len(allowed) <= EXACT:
            return cheapest(allowed, enough)
        room = () if fits else self._places(job, demand, keepers, own_queue=True)
        return None if room is None else spared(with_gpus(room, allowed, quota_gpus), enough)

    def _places(
        self, job: Job, demand: Demand, keepers: Sequence[CapacityHolder], *, own_queue: bool = False
    ) -> Collection[Victim] | None:
        """Room for a gang where it costs the least; a node is looked at closely only when no other can be cheaper."""
        near = {*self.given_back(), *(self._pool.roomy(demand) if demand.count > 1 else ())}
        sites = {site.node_id: site for site in self._sites(near, job, demand, keepers, own_queue=own_queue)}
        have = {node_id: site.members(()) for node_id, site in sites.items()}
        chosen: list[Victim] = []
        offers: list[tuple[Cost, bool, str, int, list[Victim]]] = []
        if sum(have.values()) < demand.count:
            offers = [(cost, True, node_id, 0, []) for cost, node_id in self._bounds(job, demand)]
            heapify(offers)
        while sum(have.values()) < demand.count:
            if not offers:
                return None
            _, guessed, node_id, known, found = heappop(offers)
            again = {node_id}
            if not guessed and known == len(chosen):
                chosen += found
                again = {share.node_id for each in found for share in each.job.live.shares}
            for node_id in again:
                site = sites.get(node_id) or self._site(node_id, job, demand, keepers, own_queue=own_queue)
                if site is not None:
                    sites[node_id] = site
                    have[node_id] = site.members(chosen)
                    more = site.cheapest(chosen, have[node_id] + 1) if have[node_id] < demand.count else None
                    if more:
                        heappush(offers, (cost_of(more), False, node_id, len(chosen), more))
        return spared(chosen, lambda gone: have_room(sites.values(), demand.count, gone))

    def _bounds(self, job: Job, demand: Demand) -> list[tuple[Cost, str]]:
        """What room on each node costs at least. That does not fall during a pass, but where jobs are stopped."""
        weighed = self._weighed.setdefault((demand, job.priority), {})
        given_back, kinds = self.given_back(), dict(demand.kinds)
        for node_id, here in self._victims_by_node().items():
            if node_id not in weighed and self._pool.kind_of(node_id) in kinds:
                short = demand.gpus - len(self._pool.left(node_id).gpus) - given_back[node_id]
                weighed[node_id] = least_cost(here, job.priority, short)
                self._looks += 1 / GLANCES
        return [(cost, node_id) for node_id, cost in weighed.items() if cost is not None]

    def _victim(self, job: Job) -> Victim:
        if (known := self._victims.get(job.job_id)) is None:
            shares = job.live.shares
            gpus = len(shares[0].gpus) if len(shares) == 1 else held_by(job).gpus
            began = job.live.created_at if job.live.started_at is None else job.live.started_at
            # One that saves loses the time that saving takes; any other all that it did in this attempt.
            lost_s = grace_s(job, StopCause.PREEMPT) if job.can_save else max(0.0, self._now - began)
            known = self._victims[job.job_id] = Victim(job, max(1, gpus) * lost_s, gpus)
        return known

    def _of_queue(self, queue: str) -> list[Job]:
        if self._by_queue is None:
            self._by_queue = defaultdict(dict)
            for job in self._running.values():
                self._by_queue[job.queue][job.job_id] = job
        return list(self._by_queue[queue].values())

    def _victims_by_node(self) -> dict[str, list[Victim]]:
        """The preemptible jobs of each node, cheapest first."""
        if not self._by_node:
            for victim in sorted(map(self._victim, self._running.values()), key=lambda each: each.loss):
                shares = victim.job.live.shares
                nodes = {share.node_id for share in shares} if len(shares) > 1 else (shares[0].node_id,)
                for node_id in nodes:
                    self._by_node.setdefault(node_id, []).append(victim)
        return self._by_node

    def _sites(
        self, nodes: Iterable[str], job: Job, demand: Demand, keepers: Sequence[CapacityHolder], *, own_queue: bool
    ) -> list[Site]:
        sites = (self._site(node_id, job, demand, keepers, own_queue=own_queue) for node_id in sorted(nodes))
        return [site for site in sites if site is not None]

    def _site(
        self, node_id: str, job: Job, demand: Demand, keepers: Sequence[CapacityHolder], *, own_queue: bool
    ) -> Site | None:
        kind = self._pool.kind_of(node_id)
        matching = next((matching for each, matching in demand.kinds if each is kind), None)
        if matching is None:
            return None
        self._looks += 1
        good = frozenset(matching)
        stays = self._pool.stays(node_id)
        here = {
            stay.job_id: self._victim(other)
            for stay in stays
            if (other := self._running.get(stay.job_id)) is not None and _may(job, other, own_queue=own_queue)
        }
        site = Site(node_id, demand, list(here.values()))
        free = self._pool.left(node_id)
        limits = [limit for keeper in keepers for limit in keeper.limits(node_id, free)]
        for room, after in limits or [(free, -math.inf)]:
            base = free_amounts(room, good)
            gives: dict[Victim, FreeAmounts] = {}
            for stay in stays:
                if stay.end <= after:
                    continue
                if stay.job_id in self._stopping:
                    base = plus(base, given_amounts(stay.share, good))
                elif stay.job_id in here:
                    each = here[stay.job_id]
                    gives[each] = plus(gives.get(each, NOTHING), given_amounts(stay.share, good))
            site.limits.append((base, gives))
        return site


def _may(job: Job, other: Job, *, own_queue: bool) -> bool:
    return (
        other.priority < job.priority
        and other.host_backend == job.host_backend
        and (not own_queue or other.queue == job.queue)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """A job that is preempted because a node of it is drained by force."""

    job: Job
    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainPlan:
    """What the nodes that are being drained call for."""

    evictions: Sequence[Eviction] = ()
    empty: Sequence[str] = ()


def drain(view: ClusterView) -> DrainPlan:
    """Evict what holds a node that is drained by force, and name the nodes that are done. `preemptible` does not matter
    here: it is about priority, and an operator who forces a drain means it. What runs on a node of a pool, its engine
    knows."""
    nodes = (node for node in view.nodes.values() if not node.is_in_pool)
    draining = {node.node_id: node for node in nodes if node.state is NodeState.DRAINING}
    if not draining:
        return DrainPlan()
    holders: defaultdict[str, list[Job]] = defaultdict(list)
    for job in view.holding.values():
        for node_id in {share.node_id for share in job.live.shares} & draining.keys():
            holders[node_id].append(job)
    evicted: dict[str, Eviction] = {}
    for node_id, jobs in holders.items():
        for job in jobs if draining[node_id].drain_force else ():
            if job.live.stop is None:
                evicted.setdefault(job.job_id, Eviction(job=job, node=draining[node_id]))
    empty = tuple(node_id for node_id in draining if node_id not in holders)
    return DrainPlan(evictions=tuple(evicted.values()), empty=empty)

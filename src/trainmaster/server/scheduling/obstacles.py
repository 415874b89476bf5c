"""What keeps a waiting job from starting, found by asking the scheduler about a view without it; and when it starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from heapq import nsmallest
from operator import itemgetter
from types import MappingProxyType

from trainmaster.server.core.job import Job
from trainmaster.server.core.reports import EngineOutage
from trainmaster.server.core.resources import Node, Share
from trainmaster.server.core.states import JobStatus
from trainmaster.server.scheduling.placement import free_amounts, given_amounts, members, plus
from trainmaster.server.scheduling.pool import Pool
from trainmaster.server.scheduling.schedule import Plan, schedule
from trainmaster.server.scheduling.view import ClusterView, key_of
from trainmaster.server.scheduling.virtual_time import starts_ahead

MOST_PASSES = 400
"""Limit of the forecast: further ahead, it would be wrong anyway."""


def expected_end(job: Job) -> float | None:
    """When a job will release its resources, by its grace period, its progress or its limit; None when unknown."""
    attempt = job.live
    if attempt.stop is not None and attempt.stop_at is not None:
        return attempt.stop_at + attempt.stop_grace_s
    if job.is_service:
        return None
    began = attempt.started_at or attempt.created_at
    known = [] if job.max_runtime_s is None else [began + job.max_runtime_s]
    remaining_s = job.progress.remaining_s
    if remaining_s is not None and job.progress.step_at is not None:
        # What an earlier attempt said counts from the start of this one.
        known.append(max(job.progress.step_at, began) + remaining_s)
    return min(known, default=None)


def estimated_waits(
    view: ClusterView, wanted: Collection[str], *, now: float, patience: Callable[[], bool] = lambda: True
) -> dict[str, float]:
    """How long jobs will still wait if nothing new comes, in seconds, as far as that is known or found out in time."""
    starts = starts_ahead(view, now=now, ends_at=expected_end, wanted=wanted, max_passes=MOST_PASSES, patience=patience)
    return {job_id: max(0.0, start - now) for job_id, start in starts.items() if job_id in wanted}


PRUNED = 12
"""Of so many jobs in front, those that are not in the way are left out; with more, it would take too long."""
NEAREST = 16
"""Nodes among which it is looked for whom to wait for, or twice as many as a gang has."""

Patience = Callable[[], bool]
"""Whether there is time to ask the scheduler once more."""


class Situation:
    """The cluster at a moment; asked about several jobs."""

    def __init__(
        self, view: ClusterView, now: float, outages: Mapping[str, EngineOutage] = MappingProxyType({})
    ) -> None:
        self.view = view
        self.now = now
        self.outages = outages
        """Clusters whose engine does not answer, as far as this server knows."""

    @cached_property
    def pool(self) -> Pool:
        return Pool(self.view)

    @cached_property
    def plan(self) -> Plan:
        """What the scheduler decides now, without a limit on how many jobs it starts."""
        return schedule(self.view, now=self.now, limit=len(self.view.jobs) + 1)


class Obstacles:
    def __init__(self, situation: Situation, job: Job, patience: Patience) -> None:
        view = situation.view
        self._view = view
        self._job = job
        self._now = situation.now
        self._patience = patience
        here = (node for node in view.nodes.values() if node.backend == job.host_backend)
        self.nodes = [node for node in here if not node.is_pool]
        self.pool = situation.pool
        self.demand = self.pool.demand(job.host_backend, job.needs)
        self.gpus_held = sum(held.gpus for (queue, _), held in view.occupancy.usage.items() if queue == job.queue)
        """What the jobs of its queue hold."""
        queue = view.queues.get(job.queue)
        self.quota = queue.quota_gpus if queue is not None and self.demand.gpus else None
        self.fits = self.pool.find(self.demand) is not None
        """Into what is free, if nobody came first."""

        self.over_quota = self._over_quota(())

    def holders(self) -> list[Job]:
        """Jobs without which it would fit: those that end first, and none that is not needed for it."""
        if self.fits and not self.over_quota:
            return []
        near = self._nearest()
        candidates = sorted(
            self._in_the_way(self._view.holding.values(), {node.node_id for node in near}), key=self._leaves
        )
        # The jobs that hold something on these nodes, alone with them: quick to ask.
        small = ClusterView().with_nodes(near).with_jobs(candidates)
        count = _first(len(candidates), lambda some: self._fit(small, candidates[:some]) is not None)
        if (shares := self._fit(small, candidates[:count])) is None:
            return []
        needed = self._in_the_way(candidates[:count], {share.node_id for share in shares})
        for other in reversed(needed.copy()):
            without = [each for each in needed if each is not other]
            if self._fit(small, without) is not None:
                needed = without
        return needed

    def ahead(self, holders: Sequence[Job]) -> list[Job]:
        """Queued jobs that come first: without them the job would start once the holders are gone."""
        if self._patience() and self.starts_without(holders):
            return []
        mine = key_of(self._job)
        every = [other for other in self._view.queued() if other.job_id != self._job.job_id]
        others = [other for other in every if key_of(other) < mine]
        if self._patience() and not self.starts_without([*holders, *others]):
            others = every
        count = _first(len(others), lambda some: self.starts_without([*holders, *others[:some]]), self._patience)
        needed = others[:count]
        if count <= PRUNED:
            for other in others[:count]:
                without = [each for each in needed if each is not other]
                if without and self._patience() and self.starts_without([*holders, *without]):
                    needed = without
        return needed

    def starts_without(self, gone: Iterable[Job]) -> bool:
        return self._starts(_without(self._view, gone))

    def starts_without_quota(self) -> bool:
        queues = dict(self._view.queues)
        queues[self._job.queue] = replace(queues[self._job.queue], quota_gpus=None)
        return self._starts(self._view.with_queues(queues.values()))

    def runtime_s(self, plan: Plan, ahead: Sequence[Job]) -> int | None:
        """With which `max_runtime_seconds`, in whole minutes, it would start now; None when that does not help."""
        starts = [plan.heads[other.job_id][1] for other in ahead if other.job_id in plan.heads]
        until = min(starts, default=math.inf) - self._now
        minutes = math.floor(until / 60) if math.isfinite(until) else 0
        if minutes < 1 or not self._patience():
            return None
        shorter = self._job.evolve(max_runtime_s=minutes * 60.0)
        return minutes * 60 if self._starts(self._view.with_jobs([shorter])) else None

    def _starts(self, view: ClusterView) -> bool:
        plan = schedule(view, now=self._now, limit=len(view.jobs) + 1)
        return any(placement.job.job_id == self._job.job_id for placement in plan.placements)

    def _fit(self, view: ClusterView, gone: Sequence[Job]) -> Sequence[Share] | None:
        """Where it would go on these nodes if some jobs held nothing, and nobody came first."""
        if self._over_quota(gone):
            return None
        pool = Pool(_without(view, gone))
        return pool.find(pool.demand(self._job.host_backend, replace(self._job.needs, gpus_per_node=self.demand.gpus)))

    def _in_the_way(self, jobs: Iterable[Job], node_ids: Collection[str]) -> list[Job]:
        """Those that hold something of these nodes, or of the quota that keeps this job out."""
        return [
            other
            for other in jobs
            if any(share.node_id in node_ids for share in other.live.shares)
            or (self.over_quota and other.queue == self._job.queue)
        ]

    def _over_quota(self, gone: Iterable[Job]) -> bool:
        if self.quota is None:
            return False
        given_back = sum(gpus_of(other) for other in gone if other.queue == self._job.queue)
        return self.gpus_held - given_back + self.demand.total_gpus > self.quota

    def _nearest(self) -> list[Node]:
        """The nodes, sorted by when they have room."""
        rooms = (
            (self._room_at(frozenset(matching), node_id), node_id)
            for kind, matching in self.demand.kinds
            for node_id in self.pool.nodes_of(kind)
        )
        return [self._view.nodes[node_id] for _, node_id in nsmallest(max(NEAREST, 2 * self.demand.count), rooms)]

    def _room_at(self, good: frozenset[int], node_id: str) -> tuple[float, int]:
        """When a node has room for one node of the gang, and how many jobs have to end until then."""
        demand, have = self.demand, free_amounts(self.pool.left(node_id), good)
        at, gone = self._now, 0
        ends = ((_end(self._view.holding[stay.job_id]), stay.share) for stay in self.pool.stays(node_id))
        for end, share in sorted(ends, key=itemgetter(0)):
            if members(demand.needs, demand.gpus, *have):
                break
            have = plus(have, given_amounts(share, good))
            at, gone = end, gone + 1
        return at, gone

    def _leaves(self, other: Job) -> tuple[float, int, str, str]:
        """By the end, where one is known; else by the node that has the fewest jobs."""
        node_id = other.live.shares[0].node_id if other.live.shares else ""
        return _end(other), len(self.pool.stays(node_id)), node_id, other.job_id


def _end(job: Job) -> float:
    end = expected_end(job)
    return math.inf if end is None else end


def gpus_of(job: Job) -> int:
    """The GPUs that a job holds, or the number that it asks for."""
    if job.attempt is not None:
        return sum(len(share.gpus) for share in job.attempt.shares)
    return (job.needs.gpus_per_node or 0) * job.needs.node_count


def _first(most: int, enough: Callable[[int], bool], patience: Patience = lambda: True) -> int:
    """The smallest number that is enough; `most` where none is, or where there is no time to look for a smaller one."""
    low, high = 0, most
    while low < high and patience():
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return high


def _without(view: ClusterView, gone: Iterable[Job]) -> ClusterView:
    return view.with_jobs(job.evolve(status=JobStatus.CANCELLED, attempt=None) for job in gone)

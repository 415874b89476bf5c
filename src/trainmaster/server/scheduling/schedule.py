"""`schedule(view) -> plan`: the jobs to start now and where, and the jobs to stop for others.

Who is first: those that others were stopped for; then the queue with the lowest dominant share of its backend
(GPUs, cores, slots) for its weight; within a queue, by `Job.order_key`. The shares do not decide where a smaller
job would take the place of a larger one that comes before it in the order of all jobs.

A queue holds no more GPUs than its quota: from the first job on that would exceed it, its GPU jobs wait. A job in
back-off, or that nobody wants to run, is passed over. One that no node could ever hold, or that asks for more than
the whole quota, waits and holds nobody up.

What is kept for the first that does not fit, and what may start behind it: `scheduling.reservations`. Without
`backfill`, nothing behind a head starts on any node that it could use.

Who may be stopped for whom: `scheduling.preemption`. What is given back then is for the one that it was made
for; nobody is stopped as long as what is being given back is enough, and nobody for a job of the same priority,
so that two jobs never take turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from trainmaster.server.core.job import Job
from trainmaster.server.core.resources import Needs, Share
from trainmaster.server.core.states import Desired
from trainmaster.server.scheduling.placement import Amounts
from trainmaster.server.scheduling.pool import Pool
from trainmaster.server.scheduling.preemption import VictimSearch
from trainmaster.server.scheduling.queue_order import DemandState, GroupState, Lines, LineState, QueueState
from trainmaster.server.scheduling.reservations import Reservation, Reservations
from trainmaster.server.scheduling.view import ClusterView, Key, key_of

_ANY_PRIORITY = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    job: Job
    shares: Sequence[Share]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    victim: Job
    """Holds an attempt that is not being stopped yet."""
    by: Job
    """Is queued, has a higher priority, and does not fit without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """What is known of jobs whose needs could not be met."""

    behind: Sequence[frozenset[str]]
    """Sets of heads: behind all of one set there is no place. Behind the empty set is everybody."""
    hopeless: int
    """Up to this priority nobody can be preempted for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    placements: Sequence[Placement] = ()
    preemptions: Sequence[Preemption] = ()
    heads: Mapping[str, tuple[Key, float]] = field(default_factory=dict)
    """The jobs that something is kept for, by id: their place in line, and when they start at the latest."""
    blocked: Mapping[tuple[str, Needs], Blocked] = field(default_factory=dict)
    now: float = 0.0

    def blocks(self, job: Job) -> bool:
        """Whether trying this job is useless before something is freed; False when in doubt."""
        known = self.blocked.get((job.host_backend, job.needs))
        if known is None or job.priority > known.hopeless or job.room_at is not None:
            return False
        key, end = key_of(job), self.now + _runtime_s(job)
        before = {job_id for job_id, (at, start) in self.heads.items() if at < key and not end <= start < math.inf}
        return any(heads <= before for heads in known.behind)


def schedule(view: ClusterView, *, now: float, limit: int = 256, backfill: bool = True) -> Plan:
    """Decide what to start and what to stop; at most `limit` jobs are started."""
    return _Pass(view, now=now, limit=limit, backfill=backfill).run()


class _Pass:
    def __init__(self, view: ClusterView, *, now: float, limit: int, backfill: bool) -> None:
        self._view = view
        self._now = now
        self._limit = limit
        self._pool = Pool(view)
        self._lines = Lines(view, self._pool, now)
        self._heads = Reservations(self._pool, now=now, backfill=backfill)
        self._preempting = VictimSearch(self._pool, view.occupancy, now)
        self._placements: list[Placement] = []
        self._preemptions: list[Preemption] = []
        self._unsure: list[tuple[Key, int]] = []
        """Demands of which it is to be seen whether they fit, by who waits first for them."""
        self._unelected: list[tuple[Key, int]] = []
        """Demands that do not fit and may need a head, by who waits first for them."""
        self._held_up: list[tuple[GroupState, LineState]] = []
        """Groups of which everybody was tried, and some would fit if nothing were kept for others."""
        self._gave_way = False
        """A head was none after all."""
        self._relied_on: dict[str, set[int]] = {}
        """Demands that fit, by the nodes where they do."""

    def run(self) -> Plan:
        self._unsure = _by_first(self._lines.asked)
        for (*_, job), asked in self._lines.room:
            if len(self._placements) >= self._limit:
                break
            if not job.in_backoff(self._now) and job.desired is Desired.RUN and asked.demand.possible:
                self._try(job, key_of(job), asked, self._lines.lines[job.queue, job.host_backend])
        self._go_through_the_queues()
        while self._gave_way and len(self._placements) < self._limit:
            # Whoever waited behind a head that turned out to be over its quota gets another chance.
            self._gave_way = False
            for group, line in self._held_up:
                group.rewind()
                line.push(group)
            self._held_up = []
            for asked in self._lines.asked:
                asked.failed = [frozenset()] if asked.blocked else []
            self._go_through_the_queues()
        return Plan(
            placements=self._placements,
            preemptions=self._preemptions,
            heads={head.job.job_id: (head.key, head.start) for head in self._heads},
            blocked={
                (asked.demand.backend, asked.demand.needs): self._told(asked)
                for asked in self._lines.asked
                if asked.failed or not asked.demand.possible
            },
            now=self._now,
        )

    def _go_through_the_queues(self) -> None:
        waiting = [
            (place, index, line)
            for index, line in enumerate(self._lines.lines.values())
            if (place := line.place()) is not None
        ]
        heapify(waiting)
        while waiting and len(self._placements) < self._limit:
            _, index, line = heappop(waiting)
            group = line.pop()
            if self._look_at(group, line):
                line.push(group)
            if (place := line.place()) is not None:
                heappush(waiting, (place, index, line))

    def _look_at(self, group: GroupState, line: LineState) -> bool:
        """Start the next job of a group if possible; returns whether the group has more jobs worth trying."""
        entry, asked = group.next(), group.asked
        if entry is None or (asked.demand.gpus and line.queue.is_closed(entry[:3])):
            return False
        job, key = entry[3], entry[:3]
        if self._try(job, key, asked, line, group):
            return True
        if asked.blocked or (asked.demand.gpus and line.queue.closed is not None and line.queue.closed <= key):
            return False
        # Behind those heads that have a reservation, a shorter job of the group may still find a place.
        until = max((head.open_until for head in self._in_the_way(job, key)), default=-math.inf)
        group.skip(until=until)
        if group.next() is not None:
            return True
        self._held_up.append((group, line))
        return False

    def _try(self, job: Job, key: Key, asked: DemandState, line: LineState, group: GroupState | None = None) -> bool:
        """Start a job, or make room for it; False when it has to wait."""
        demand, queue = asked.demand, line.queue
        shares = None if asked.blocked else self._pool.find(demand)
        if shares is None and not asked.blocked:
            self._block(asked)
        over = queue.over(demand.total_gpus)
        if (asked.blocked or over) and not self._may_preempt(job, asked, frozenset()):
            return self._wait(job, key, asked, queue)
        self._settle_those_before(key)
        heads = self._in_the_way(job, key)
        if shares is not None and not over and self._quota_for_all(job, asked, queue, heads):
            names = _names(heads)
            if not any(failed <= names for failed in asked.failed):
                shares = self._pool.find(demand, heads) if heads else shares
                if shares is not None and self._would_crowd_out(shares, asked, key):
                    return self._try(job, key, asked, line, group)
                if shares is not None:
                    if group is not None:
                        group.advance()
                    self._place(job, shares, asked, line)
                    return True
                asked.failed.append(names)
        return self._preempt(job, key, asked, heads, over, group) or self._wait(job, key, asked, queue)

    def _wait(self, job: Job, key: Key, asked: DemandState, queue: QueueState) -> bool:
        if queue.over(asked.demand.total_gpus) and key[0] == math.inf:
            queue.close(key)
            self._check_quotas(queue)
        elif key[0] < math.inf:
            self._heads.add(job, key, asked.demand, near=self._preempting.near())
        return False

    def _in_the_way(self, job: Job, key: Key) -> list[Reservation]:
        return self._heads.before(key, self._now + _runtime_s(job))

    def _quota_for_all(self, job: Job, asked: DemandState, queue: QueueState, heads: Sequence[Reservation]) -> bool:
        """Whether the quota has room for a job and for each head of the same queue."""
        gpus = asked.demand.total_gpus
        kept = (head.demand.total_gpus for head in heads if head.job.queue == job.queue)
        return not gpus or not any(queue.over(gpus + each) for each in kept if each)

    def _place(self, job: Job, shares: list[Share], asked: DemandState, line: LineState) -> None:
        self._placements.append(Placement(job=job, shares=shares))
        if (head := self._heads.get(job.job_id)) is not None:
            self._remove(head)
        self._pool.place(job.job_id, shares, end=self._now + _runtime_s(job), lasting=job.is_service)
        nodes = {share.node_id for share in shares}
        self._heads.touch(nodes)
        gpus = asked.demand.total_gpus
        line.used = line.used.plus(Amounts(gpus, job.needs.cpu_cores * len(shares), len(shares)))
        line.queue.held_gpus += gpus
        if gpus:
            self._check_quotas(line.queue)
        for node_id in nodes:
            for number in self._relied_on.pop(node_id, ()):
                if (entry := self._lines.asked[number].first()) is not None:
                    heappush(self._unsure, (entry[:3], number))

    def _check_quotas(self, queue: QueueState) -> None:
        """A job whose quota is used up is not a head."""
        if queue.quota_gpus is None:
            return
        for head in self._heads:
            if self._lines.queues[head.job.queue] is queue and _barred(head, queue):
                self._remove(head)
                self._gave_way = True

    # -- heads --

    def _settle_those_before(self, key: Key) -> None:
        """Check whether the jobs fit that come before this place, though it is not their queue's turn."""
        while self._unsure and self._unsure[0][0] < key:
            at, number = heappop(self._unsure)
            asked = self._lines.asked[number]
            entry = asked.first()
            if asked.blocked or entry is None:
                continue
            if entry[:3] > at:
                heappush(self._unsure, (entry[:3], number))
                continue
            if (shares := self._pool.find(asked.demand)) is None:
                self._block(asked)
            for share in shares or ():
                self._relied_on.setdefault(share.node_id, set()).add(number)

        while self._unelected and self._unelected[0][0] < key:
            at, number = heappop(self._unelected)
            asked = self._lines.asked[number]
            entry = asked.first()
            if entry is not None and entry[:3] > at:
                heappush(self._unelected, (entry[:3], number))
            elif entry is not None:
                self._heads.elect(entry[3], entry[:3], asked.demand)

    def _would_crowd_out(self, shares: Sequence[Share], asked: DemandState, key: Key) -> bool:
        """Whether a larger job that comes before, a head, would no longer fit. If the shares of the queues decided now,
        what was kept for it would go to smaller jobs of other queues, and it might never start."""
        near = {number for share in shares for number in self._relied_on.get(share.node_id, ())}
        crowded = False
        for number in sorted(near):
            other = self._lines.asked[number]
            entry = other.first()
            if other.blocked or entry is None or entry[:3] > key or other.demand.size <= asked.demand.size:
                continue
            if not self._pool.fits_beside(other.demand, shares):
                crowded = self._heads.elect(entry[3], entry[:3], other.demand) is not None or crowded
        return crowded

    def _block(self, asked: DemandState) -> None:
        """It does not fit into what is free, and what is free only shrinks during a pass."""
        asked.blocked = True
        asked.failed = [frozenset()]
        if (entry := asked.first()) is not None:
            heappush(self._unelected, (entry[:3], asked.number))

    def _remove(self, head: Reservation) -> None:
        """It is a head no longer; another job may be one now."""
        self._heads.remove(head)
        self._unelected = _by_first(each for each in self._lines.asked if each.blocked)

    # -- preemption --

    def _preempt(
        self, job: Job, key: Key, asked: DemandState, heads: Sequence[Reservation], over: int, group: GroupState | None
    ) -> bool:
        """Make room for a job by stopping others, unless room is being made already."""
        preempting, demand = self._preempting, asked.demand
        names = _names(heads)
        if not self._may_preempt(job, asked, names):
            return False
        quota_gpus = max(0, over - preempting.released_gpus(job.queue))
        victims: list[Job] | None
        if over and not quota_gpus and self._pool.find(demand, heads) is not None:
            victims = []
        else:
            victims = preempting.find(job, demand, heads, quota_gpus=quota_gpus)
        if victims is None:
            if not quota_gpus:
                asked.hopeless.append((job.priority, names))
            return False
        preempting.stop(victims)
        self._preemptions += [Preemption(victim=victim, by=job) for victim in victims]
        self._heads.touch(share.node_id for victim in victims for share in victim.live.shares)
        if victims and key[0] == math.inf:
            key = (self._now, key[1], key[2])
        if group is not None:
            group.advance()
        if (known := self._heads.get(job.job_id)) is not None:
            self._remove(known)
        self._heads.add(job, key, demand, near=preempting.near())
        return True

    def _may_preempt(self, job: Job, asked: DemandState, behind: frozenset[str]) -> bool:
        """Whether looking for victims makes sense for a job behind these heads."""
        if self._preempting.spent or job.priority <= self._spared(asked):
            return False
        return not any(job.priority <= priority and heads <= behind for priority, heads in asked.hopeless)

    def _spared(self, asked: DemandState) -> int:
        """The highest priority for which nobody on a backend can be preempted."""
        lowest = self._preempting.lowest(asked.demand.backend)
        return _ANY_PRIORITY if lowest is None else lowest

    def _told(self, asked: DemandState) -> Blocked:
        if not asked.demand.possible:
            return Blocked(behind=(frozenset(),), hopeless=_ANY_PRIORITY)
        tried = (priority for priority, heads in asked.hopeless if not heads)
        return Blocked(behind=tuple(asked.failed), hopeless=max(self._spared(asked), *tried, -1))


def _by_first(demands: Iterable[DemandState]) -> list[tuple[Key, int]]:
    """A heap of demands, by who waits first for each."""
    heap = [(entry[:3], each.number) for each in demands if (entry := each.first()) is not None]
    heapify(heap)
    return heap


def _names(heads: Sequence[Reservation]) -> frozenset[str]:
    return frozenset(head.job.job_id for head in heads)


def _barred(head: Reservation, queue: QueueState) -> bool:
    """Whether a head of a queue has to wait for the quota."""
    gpus = head.demand.total_gpus
    if not gpus or head.key[0] < math.inf:
        return False
    return queue.over(gpus) > 0 or (queue.closed is not None and queue.closed <= head.key)


def _runtime_s(job: Job) -> float:
    return math.inf if job.max_runtime_s is None or job.is_service else job.max_runtime_s

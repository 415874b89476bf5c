"""Which jobs to stop for one that waits: the cheapest set that makes room for it.

Only preemptible jobs of a lower priority, as it was given and not as it aged. Cheapest means, in this order: the
highest priority among them is as low as can be; they lose the least work; they are the fewest, with the fewest
GPUs. For a job on one node the set is the cheapest there is, unless more than `EXACT` jobs could be stopped on a
node. For a gang, nodes are added one by one, the cheapest next, and whoever is not needed in the end is spared.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from trainmaster.protocol.reasons import StopCause
from trainmaster.server.core.commands import grace_s
from trainmaster.server.core.job import Job
from trainmaster.server.core.resources import Free, Share
from trainmaster.server.scheduling.placement import members
from trainmaster.server.scheduling.pool import Keeper, Pool, Wish
from trainmaster.server.scheduling.reservations import Near
from trainmaster.server.scheduling.view import Occupancy, held_by, known_end

# Victims of a preemption: the cheapest set of preemptible jobs that frees enough.

EXACT = 12
"""Up to so many jobs every subset is considered."""

Cost = tuple[int, float, int, int]
"""The highest priority, GPU-seconds of work that is lost, jobs, GPUs."""


@dataclass(frozen=True, slots=True, eq=False)
class Victim:
    """A job that could be stopped."""

    job: Job
    loss: float
    """GPU-seconds."""
    gpus: int


def cost_of(victims: Collection[Victim]) -> Cost:
    """What it costs to stop these."""
    highest, loss, gpus = -1, 0.0, 0
    for each in victims:
        highest = max(highest, each.job.priority)
        loss += each.loss
        gpus += each.gpus
    return highest, loss, len(victims), gpus


def least_cost(victims: Sequence[Victim], priority: int, gpus: int) -> Cost | None:
    """What it costs at least to get so many GPUs from those of a lower priority; None when they do not have them.

    The cheapest come first.
    """
    able = [each for each in victims if each.job.priority < priority]
    for highest in sorted({each.job.priority for each in able}):
        allowed = [each for each in able if each.job.priority <= highest]
        given = [each.gpus for each in allowed]
        if sum(given) >= gpus:
            most = max(given)
            count = -(-gpus // most) if gpus > 0 and most else 1
            return highest, sum(each.loss for each in allowed[:count]), count, max(0, gpus)
    return None


def cheapest(
    victims: Iterable[Victim],
    enough: Callable[[Collection[Victim]], bool],
    missing: Callable[[Collection[Victim]], int] = lambda _: 1,
) -> list[Victim] | None:
    """The cheapest set that is enough, where a larger set is never less than enough; None when all are not.

    `missing` says how many more are needed at least, of a set that is not enough. What counts first, the highest
    priority, is for the caller to see to: all that are given are equal in that.
    """
    order = sorted(victims, key=lambda each: (each.loss, each.gpus, each.job.job_id))
    if len(order) > EXACT:
        count = bisect_left(range(len(order) + 1), True, key=lambda some: enough(set(order[:some])))
        return spared(order[:count], enough) if count <= len(order) else None
    best: tuple[tuple[float, ...], list[Victim]] | None = None

    def search(chosen: list[Victim], at: int) -> None:
        nonlocal best
        _, loss, count, gpus = cost_of(chosen)
        if best is not None and (loss, count, gpus) >= best[0]:
            return
        if enough(chosen):
            best = ((loss, count, gpus), chosen)
            return
        rest, more = order[at:], missing(chosen)
        if len(rest) < more or not enough([*chosen, *rest]):
            return
        least_loss = loss + sum(each.loss for each in rest[:more])
        least = (least_loss, count + more, gpus + more * min(each.gpus for each in rest))
        if best is not None and least >= best[0]:
            return
        for index in range(at, len(order)):
            search([*chosen, order[index]], index + 1)

    search([], 0)
    return best[1] if best else None


def spared(chosen: Sequence[Victim], enough: Callable[[Collection[Victim]], bool]) -> list[Victim]:
    """A set that is enough without those that are not needed, the dearest first."""
    kept = sorted(chosen, key=lambda each: (each.job.priority, each.loss, each.gpus, each.job.job_id), reverse=True)
    for each in list(kept):
        without = [other for other in kept if other is not each]
        if enough(without):
            kept = without
    return kept


def with_gpus(chosen: Collection[Victim], others: Iterable[Victim], gpus: int) -> list[Victim]:
    """The cheapest others too, until so many GPUs are given back."""
    more = list(chosen)
    have = sum(each.gpus for each in chosen)
    for each in sorted(others, key=lambda each: (each.loss / max(1, each.gpus), each.job.job_id)):
        if have >= gpus:
            break
        if each not in chosen and each.gpus:
            more.append(each)
            have += each.gpus
    return more


PREEMPTORS = 16
"""Jobs that room is made for in one pass."""
LOOKS = 5_000
"""Nodes that are looked at closely for victims in one pass; the next pass goes on."""
GLANCES = 8
"""So many nodes are weighed in the time that one is looked at closely."""

_Amounts = tuple[int, int, int, int, int]
"""GPUs that are good enough, cores, memory, disk, slots."""
_NOTHING: _Amounts = (0, 0, 0, 0, 0)


class Preempting:
    """Finds victims for the jobs of one pass."""

    def __init__(self, pool: Pool, occupancy: Occupancy, now: float) -> None:
        self._pool = pool
        self._now = now
        self._stopping = dict(occupancy.stopping)
        self._running = dict(occupancy.preemptible)
        self._priorities: Counter[tuple[str, int]] | None = None
        self._lowest: dict[str, int | None] = {}
        self._victims: dict[str, Victim] = {}
        self._by_node: dict[str, list[Victim]] = {}
        self._by_queue: dict[str, dict[str, Job]] | None = None
        self._weighed: dict[tuple[Wish, int], dict[str, Cost | None]] = {}
        self._sorted = False
        self._preemptors = 0
        self._looks = 0.0

    @property
    def spent(self) -> bool:
        """Whether this pass has preempted enough."""
        return self._preemptors >= PREEMPTORS or self._looks >= LOOKS

    def lowest(self, backend: str) -> int | None:
        """The lowest priority that could be preempted on a backend."""
        if self._priorities is None:
            self._priorities = Counter((job.host_backend, job.priority) for job in self._running.values())
        if backend not in self._lowest:
            left = (priority for (name, priority), count in self._priorities.items() if name == backend and count)
            self._lowest[backend] = min(left, default=None)
        return self._lowest[backend]

    def released_gpus(self, queue: str) -> int:
        """What jobs of a queue hold that are being stopped."""
        return sum(held_by(job).gpus for job in self._stopping.values() if job.queue == queue)

    def given_back(self) -> dict[str, int]:
        """Where jobs are being stopped, and how many GPUs they hold there."""
        gpus: dict[str, int] = {}
        for job in self._stopping.values():
            for share in job.live.shares:
                gpus[share.node_id] = gpus.get(share.node_id, 0) + len(share.gpus)
        return gpus

    def near(self) -> Near:
        """Where jobs are being stopped, and when the last of them is gone."""
        nodes = self.given_back()
        ends = (stay.end for node_id in nodes for stay in self._pool.stays(node_id) if stay.job_id in self._stopping)
        return Near(nodes, max(ends, default=-math.inf))

    def stop(self, victims: Iterable[Job]) -> None:
        """These will be stopped."""
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

    def find(self, job: Job, wish: Wish, keepers: Sequence[Keeper], *, quota_gpus: int = 0) -> list[Job] | None:
        """The jobs to stop for one that does not fit; None when that would not help.

        None need be stopped when what is being given back is enough. With `quota_gpus`, so many GPUs must come
        from the job's own queue, and only jobs of that queue are stopped.
        """
        if not self._sorted:
            self._sort_out()
        if quota_gpus > 0:
            found = self._within_queue(job, wish, keepers, quota_gpus)
        else:
            found = self._places(job, wish, keepers)
        return None if found is None else sorted((each.job for each in found), key=lambda each: each.job_id)

    def _sort_out(self) -> None:
        """Whoever ends by itself before it could be stopped is as good as stopped."""
        self._sorted = True
        ending = [
            job
            for job in self._running.values()
            if job.max_runtime_s is not None and known_end(job) <= self._now + grace_s(job, StopCause.PREEMPT)
        ]
        for job in ending:
            self._stopping[job.job_id] = self._running.pop(job.job_id)
        self._priorities = None
        self._lowest.clear()

    def _within_queue(
        self, job: Job, wish: Wish, keepers: Sequence[Keeper], quota_gpus: int
    ) -> Collection[Victim] | None:
        """Victims of the job's own queue, which bring the quota and the room."""
        own = [self._victim(other) for other in self._of_queue(job.queue) if _may(job, other, own_queue=True)]
        if sum(each.gpus for each in own) < quota_gpus:
            return None
        fits = self._pool.find(wish, keepers) is not None
        nodes = {share.node_id for each in own for share in each.job.live.shares}
        nodes.update(self.given_back(), self._pool.roomy(wish) if wish.count > 1 else ())
        sites = [] if fits else self._sites(nodes, job, wish, keepers, own_queue=True)

        def enough(gone: Collection[Victim]) -> bool:
            return sum(each.gpus for each in gone) >= quota_gpus and (fits or _room(sites, wish.count, gone))

        for highest in sorted({each.job.priority for each in own}):
            allowed = {each for each in own if each.job.priority <= highest}
            if enough(allowed):
                break
        else:
            return None
        if len(allowed) <= EXACT:
            return cheapest(allowed, enough)
        room = () if fits else self._places(job, wish, keepers, own_queue=True)
        return None if room is None else spared(with_gpus(room, allowed, quota_gpus), enough)

    def _places(
        self, job: Job, wish: Wish, keepers: Sequence[Keeper], *, own_queue: bool = False
    ) -> Collection[Victim] | None:
        """Room for the nodes of a gang, one after the other, each where it costs the least.

        A node is looked at closely only when no other could be cheaper.
        """
        near = {*self.given_back(), *(self._pool.roomy(wish) if wish.count > 1 else ())}
        sites = {site.node_id: site for site in self._sites(near, job, wish, keepers, own_queue=own_queue)}
        have = {node_id: site.members(()) for node_id, site in sites.items()}
        chosen: list[Victim] = []
        offers: list[tuple[Cost, bool, str, int, list[Victim]]] = []
        if sum(have.values()) < wish.count:
            offers = [(cost, True, node_id, 0, []) for cost, node_id in self._bounds(job, wish)]
            heapify(offers)
        while sum(have.values()) < wish.count:
            if not offers:
                return None
            _, guessed, node_id, known, found = heappop(offers)
            again = {node_id}
            if not guessed and known == len(chosen):
                chosen += found
                again = {share.node_id for each in found for share in each.job.live.shares}
            for node_id in again:
                site = sites.get(node_id) or self._site(node_id, job, wish, keepers, own_queue=own_queue)
                if site is not None:
                    sites[node_id] = site
                    have[node_id] = site.members(chosen)
                    more = site.cheapest(chosen, have[node_id] + 1) if have[node_id] < wish.count else None
                    if more:
                        heappush(offers, (cost_of(more), False, node_id, len(chosen), more))
        return spared(chosen, lambda gone: _room(sites.values(), wish.count, gone))

    def _bounds(self, job: Job, wish: Wish) -> list[tuple[Cost, str]]:
        """What room on each node costs at least. That does not fall during a pass, but where jobs are stopped."""
        weighed = self._weighed.setdefault((wish, job.priority), {})
        given_back, kinds = self.given_back(), dict(wish.kinds)
        for node_id, here in self._victims_by_node().items():
            if node_id not in weighed and self._pool.kind_of(node_id) in kinds:
                short = wish.gpus - len(self._pool.left(node_id).gpus) - given_back.get(node_id, 0)
                weighed[node_id] = least_cost(here, job.priority, short)
                self._looks += 1 / GLANCES
        return [(cost, node_id) for node_id, cost in weighed.items() if cost is not None]

    def _victim(self, job: Job) -> Victim:
        known = self._victims.get(job.job_id)
        if known is None:
            shares = job.live.shares
            gpus = len(shares[0].gpus) if len(shares) == 1 else held_by(job).gpus
            began = job.live.created_at if job.live.started_at is None else job.live.started_at
            # One that saves loses the time that saving takes; any other all that it did in this attempt.
            lost_s = grace_s(job, StopCause.PREEMPT) if job.can_save else max(0.0, self._now - began)
            known = self._victims[job.job_id] = Victim(job, max(1, gpus) * lost_s, gpus)
        return known

    def _of_queue(self, queue: str) -> list[Job]:
        if self._by_queue is None:
            self._by_queue = {}
            for job in self._running.values():
                self._by_queue.setdefault(job.queue, {})[job.job_id] = job
        return list(self._by_queue.get(queue, {}).values())

    def _victims_by_node(self) -> dict[str, list[Victim]]:
        """Who could be stopped on each node, the cheapest first."""
        if not self._by_node:
            for victim in sorted(map(self._victim, self._running.values()), key=lambda each: each.loss):
                shares = victim.job.live.shares
                nodes = {share.node_id for share in shares} if len(shares) > 1 else (shares[0].node_id,)
                for node_id in nodes:
                    self._by_node.setdefault(node_id, []).append(victim)
        return self._by_node

    def _sites(
        self, nodes: Iterable[str], job: Job, wish: Wish, keepers: Sequence[Keeper], *, own_queue: bool
    ) -> list[_Site]:
        sites = [self._site(node_id, job, wish, keepers, own_queue=own_queue) for node_id in sorted(nodes)]
        return [site for site in sites if site is not None]

    def _site(self, node_id: str, job: Job, wish: Wish, keepers: Sequence[Keeper], *, own_queue: bool) -> _Site | None:
        kind = self._pool.kind_of(node_id)
        matching = next((matching for each, matching in wish.kinds if each is kind), None)
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
        site = _Site(node_id, wish, list(here.values()))
        free = self._pool.left(node_id)
        limits = [limit for keeper in keepers for limit in keeper.limits(node_id, free)]
        for room, after in limits or [(free, -math.inf)]:
            base = _amounts(room, good)
            gives: dict[Victim, _Amounts] = {}
            for stay in stays:
                if stay.end <= after:
                    continue
                if stay.job_id in self._stopping:
                    base = _plus(base, _given(stay.share, good))
                elif stay.job_id in here:
                    each = here[stay.job_id]
                    gives[each] = _plus(gives.get(each, _NOTHING), _given(stay.share, good))
            site.limits.append((base, gives))
        return site


class _Site:
    """A node: what of it is within reach, and what each victim would add."""

    def __init__(self, node_id: str, wish: Wish, victims: list[Victim]) -> None:
        self.node_id = node_id
        self.limits: list[tuple[_Amounts, dict[Victim, _Amounts]]] = []
        self._wish = wish
        self._victims = victims

    def members(self, gone: Collection[Victim]) -> int:
        """How many nodes of the gang it holds once these are gone."""
        fewest = self._wish.count
        for base, gives in self.limits:
            have = base
            for each, given in gives.items():
                if each in gone:
                    have = _plus(have, given)
            fewest = min(fewest, members(self._wish.needs, self._wish.gpus, *have))
        return fewest

    def cheapest(self, gone: Collection[Victim], target: int) -> list[Victim] | None:
        """The cheapest set that lets it hold so many nodes of the gang, besides those that are gone anyway."""
        rest = [each for each in self._victims if each not in gone]
        for highest in sorted({each.job.priority for each in rest}):
            allowed = [each for each in rest if each.job.priority <= highest]
            if self.members([*gone, *allowed]) >= target:
                break
        else:
            return None
        base, gives = self.limits[0]
        short = target * self._wish.gpus - base[0] - sum(gives[each][0] for each in gives if each in gone)
        most = max((gives[each][0] for each in allowed if each in gives), default=0)

        def missing(chosen: Collection[Victim]) -> int:
            left = short - sum(gives[each][0] for each in chosen if each in gives)
            return -(-left // most) if most and left > 0 else 1

        return cheapest(allowed, lambda chosen: self.members([*gone, *chosen]) >= target, missing)


def _may(job: Job, other: Job, *, own_queue: bool) -> bool:
    return (
        other.priority < job.priority
        and other.host_backend == job.host_backend
        and (not own_queue or other.queue == job.queue)
    )


def _room(sites: Iterable[_Site], count: int, gone: Collection[Victim]) -> bool:
    have = 0
    for site in sites:
        have += site.members(gone)
        if have >= count:
            return True
    return False


def _amounts(free: Free, good: frozenset[int]) -> _Amounts:
    return len(good & free.gpus), free.cpu_cores, free.ram_mb, free.storage_mb, free.slots


def _given(share: Share, good: frozenset[int]) -> _Amounts:
    return len(good.intersection(share.gpus)), share.cpu_cores, share.ram_mb, share.storage_mb, 1


def _plus(first: _Amounts, second: _Amounts) -> _Amounts:
    a, b, c, d, e = first
    f, g, h, i, j = second
    return a + f, b + g, c + h, d + i, e + j

"""Checks a simulation against the scheduler's guarantees, with its own accounts: it trusts neither view nor plan.

Checked at every step: placements are whole gangs on nodes that accept jobs and have what was asked for; no resource is
given twice or beyond what a node has; what was given is given back once; quotas are kept; only preemptible jobs of
lower priority are stopped, once, for a job that waits; and a head starts when it was promised to, unless somebody came
or started who goes before it (also one of another queue, by its share), or the nodes changed. At the end: no job that
could run was left waiting, and none waited for longer than ageing allows (`Audit.finish`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import accumulate
from math import inf
from typing import NamedTuple

from trainmaster.server.core.job import AGEING_S_PER_PRIORITY, Attempt, Job
from trainmaster.server.core.resources import Node, NodeState, Share
from trainmaster.server.core.spec.configs import HIGHEST_PRIORITY
from trainmaster.server.core.states import JobStatus
from trainmaster.server.scheduling.placement import good_enough
from trainmaster.server.scheduling.pool import Pool
from trainmaster.server.scheduling.schedule import Plan
from trainmaster.server.scheduling.traces import Trace
from trainmaster.server.scheduling.view import ClusterView, Key, key_of
from trainmaster.server.scheduling.virtual_time import Watcher

PUNCTUAL_S = 1e-6
"""Times are sums of floating-point numbers."""


class GuaranteeViolationError(AssertionError):
    """The scheduler broke one of its guarantees."""


class _Promise(NamedTuple):
    """The latest start that a head was promised."""

    key: Key
    queue: str
    start: float


class Audit(Watcher):
    """Raises BrokenPromiseError as soon as something is wrong."""

    def __init__(self, trace: Trace, *, punctual: bool = True) -> None:
        """`punctual`: heads are held to their promised start. They cannot be where the scheduler's own time counts."""
        self._punctual = punctual
        self._steady = not trace.changes
        self._nodes: Mapping[str, Node] = {node.node_id: node for node in trace.nodes}
        self._quotas = {queue.name: queue.quota_gpus for queue in trace.queues if queue.quota_gpus is not None}
        self._shares: defaultdict[str, list[Share]] = defaultdict(list)
        """What jobs hold of each node."""
        self._held: dict[str, Attempt] = {}
        self._used: Counter[str] = Counter()
        """GPUs held, by queue."""
        self._promised: dict[str, _Promise] = {}
        self._waits: dict[str, tuple[Job, float]] = {}
        """How long each job waited for its first start."""
        self._held_s: defaultdict[str, float] = defaultdict(float)

    def arrived(self, job: Job, now: float) -> None:  # noqa: ARG002 - as the base has it
        """A job that goes before a head may delay it."""
        self._release_promises(job)

    def nodes_changed(self, view: ClusterView, now: float) -> None:  # noqa: ARG002 - as the base has it
        """Other nodes accept jobs now, so no promise holds any more."""
        self._promised.clear()
        self._nodes = view.nodes

    def passed(self, view: ClusterView, plan: Plan, now: float, took_s: float) -> None:  # noqa: ARG002
        """Check that the plan is about jobs that wait and victims that may be stopped."""
        placed = [placement.job for placement in plan.placements]
        _require(len({job.job_id for job in placed}) == len(placed), "a plan places a job twice", now)
        for job in placed:
            _require(view.jobs.get(job.job_id) is job, "is placed and is not in the view", now, job)
            waits = job.status is JobStatus.QUEUED and job.attempt is None
            _require(waits, "places a job that does not wait", now, job)
        victims = [preemption.victim.job_id for preemption in plan.preemptions]
        _require(len(set(victims)) == len(victims), "a plan preempts a job twice", now)
        starting = {job.job_id for job in placed}
        for preemption in plan.preemptions:
            victim, by = preemption.victim, preemption.by
            _require(view.holding.get(victim.job_id) is victim, "is preempted and holds nothing", now, victim)
            _require(victim.live.stop is None, "is preempted while it is being stopped", now, victim)
            _require(victim.preemptible, "is preempted and is not preemptible", now, victim)
            _require(victim.priority < by.priority, f"is preempted for {by.job_id} of no higher priority", now, victim)
            _require(view.jobs.get(by.job_id) is by, "gets room and is not in the view", now, by)
            _require(by.status is JobStatus.QUEUED, "gets room and does not wait", now, by)
            _require(by.job_id not in starting, "gets room and is started at once", now, by)
            self._release_promises(by.evolve(room_at=now if by.room_at is None else by.room_at))
        if self._punctual:
            self._check_promises(view, plan, starting, now)

    def placed(self, job: Job, now: float) -> None:
        needs, shares = job.needs, job.live.shares
        _require(job.job_id not in self._held, "holds two attempts", now, job)
        _require(len(shares) == needs.node_count, f"has {len(shares)} of {needs.node_count} nodes", now, job)
        for share in shares:
            self._check_share(job, share, now)
            node, here = self._nodes[share.node_id], self._shares[share.node_id]
            taken = {gpu for other in here for gpu in other.gpus}.intersection(share.gpus)
            _require(not taken, f"gets GPUs {sorted(taken)} of {share.node_id} from their holders", now, job)
            here.append(share)
            _require(len(here) <= node.slots, f"overcommits the slots of {share.node_id}", now, job)
            for name in ("cpu_cores", "ram_mb", "storage_mb"):
                over = sum(getattr(each, name) for each in here) - getattr(node, name)
                _require(over <= 0, f"overcommits {name} of {share.node_id} by {over}", now, job)
        self._held[job.job_id] = job.live
        self._promised.pop(job.job_id, None)
        self._waits.setdefault(job.job_id, (job, now - (job.queued_at or 0.0)))
        self._used[job.queue] += _gpus(job.live)
        if (quota := self._quotas.get(job.queue)) is not None:
            _require(self._used[job.queue] <= quota, f"brings queue {job.queue} above its quota of {quota}", now, job)

    def left(self, held: Job, after: Job, now: float) -> None:
        attempt = self._held.pop(held.job_id, None)
        _require(attempt is not None, "gives back what it does not hold", now, held)
        assert attempt is not None
        _require(attempt.number == held.live.number, "gives back for another attempt", now, held)
        for share in attempt.shares:
            self._shares[share.node_id].remove(share)
        self._used[held.queue] -= _gpus(attempt)
        self._held_s[held.job_id] += now - attempt.created_at
        if after.status is JobStatus.QUEUED:
            self._release_promises(after)

    def finish(self, view: ClusterView, now: float) -> None:
        """Check that all is given back, that nobody waits who could run, and that nobody had to wait for too long. When
        a job has waited for (10 - priority) half-hours, nobody who comes later goes before it. It starts once all who
        came until then ran one after the other, and the longest of those behind it twice (what runs when its turn
        comes, and when it has become the head)."""
        for job_id, attempt in self._held.items():
            raise GuaranteeViolationError(f"at {now:g}: {job_id} still holds {attempt.shares}")
        empty = Pool(ClusterView().with_nodes(view.nodes.values()))
        for job in view.queued():
            quota = self._quotas.get(job.queue)
            allowed = quota is None or (job.needs.gpus_per_node or 0) * job.needs.node_count <= quota
            possible = allowed and empty.demand(job.host_backend, job.needs).possible
            _require(not possible, "was left waiting on an empty cluster that could run it", now, job)
        if self._steady:
            self._check_patience()

    def _check_patience(self) -> None:
        by_arrival = sorted((job.queued_at or 0.0, self._held_s[job.job_id]) for job, _ in self._waits.values())
        arrivals = [came_s for came_s, _ in by_arrival]
        held_s = list(accumulate((held_s for _, held_s in by_arrival), initial=0.0))
        longest_s = max(self._held_s.values(), default=0.0)
        for job, waited_s in self._waits.values():
            came_s = job.queued_at or 0.0
            ageing_s = (HIGHEST_PRIORITY - job.priority) * AGEING_S_PER_PRIORITY
            earlier_s = held_s[bisect_right(arrivals, came_s + ageing_s)] - self._held_s[job.job_id]
            bound_s = ageing_s + earlier_s + 2 * longest_s
            fair = waited_s <= bound_s + PUNCTUAL_S
            _require(fair, f"waited {waited_s:g} s, more than {bound_s:g} s", came_s + waited_s, job)

    def _check_promises(self, view: ClusterView, plan: Plan, starting: set[str], now: float) -> None:
        for job_id, promise in self._promised.items():
            late = now > promise.start + PUNCTUAL_S and view.jobs[job_id].status is JobStatus.QUEUED
            _require(not late, f"was promised to start by {promise.start:g}", now, view.jobs[job_id])
        for placement in plan.placements:
            self._release_promises(placement.job)
        for job_id in plan.heads.keys() - self._promised.keys():
            self._release_promises(view.jobs[job_id])
        # Where others are only now being stopped for a head, nobody knows yet how long they take; and what a queue
        # with a quota may hold by then is another question than what is free.
        unknown = starting | {preemption.by.job_id for preemption in plan.preemptions}
        for job_id, (key, start) in plan.heads.items():
            if job_id not in unknown and now < start < inf and view.jobs[job_id].queue not in self._quotas:
                known = self._promised.get(job_id)
                earliest = start if known is None else min(start, known.start)
                self._promised[job_id] = _Promise(key=key, queue=view.jobs[job_id].queue, start=earliest)

    def _release_promises(self, comer: Job) -> None:
        """Who is before a head may delay it: in the same queue by key, in another one by the queues' shares too."""
        key = key_of(comer)
        self._promised = {
            job_id: promise
            for job_id, promise in self._promised.items()
            if promise.key < key and promise.queue == comer.queue
        }

    def _check_share(self, job: Job, share: Share, now: float) -> None:
        needs = job.needs
        node = self._nodes.get(share.node_id)
        _require(node is not None, f"is placed on {share.node_id}, which does not exist", now, job)
        assert node is not None
        _require(node.state is NodeState.READY, f"is placed on {node.node_id}, which is {node.state}", now, job)
        _require(node.backend == job.host_backend, f"is placed on {node.node_id} of another backend", now, job)
        _require(node.tags.issuperset(needs.capabilities), f"is placed on {node.node_id} without its tags", now, job)
        _require(len(share.gpus) == (needs.gpus_per_node or 0), f"gets {len(share.gpus)} GPUs of a node", now, job)
        same = (share.cpu_cores, share.ram_mb, share.storage_mb) == (needs.cpu_cores, needs.ram_mb, needs.storage_mb)
        _require(same, "gets other amounts than it asked for", now, job)
        units = {gpu.index: gpu for gpu in node.gpus}
        for index in share.gpus:
            gpu = units.get(index)
            _require(gpu is not None and gpu.healthy, f"gets GPU {index}, which {node.node_id} has not", now, job)
            assert gpu is not None
            fits = good_enough(needs, gpu.type, gpu.memory_mb)
            _require(fits, f"wants {needs.gpu_type} and gets {gpu.type} of {gpu.memory_mb} MB", now, job)


def _require(holds: bool, message: str, now: float, job: Job | None = None) -> None:
    if not holds:
        raise GuaranteeViolationError(f"at {now:g}: {f'{job.job_id} ({job.name}) ' if job else ''}{message}")


def _gpus(attempt: Attempt) -> int:
    return sum(len(share.gpus) for share in attempt.shares)

"""A cluster in virtual time: simulates what coordinator, workers and clock do, around the real scheduler and view."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Protocol

from trainmaster.protocol.reasons import Reason, StopCause
from trainmaster.server.core.commands import make_room, preempt
from trainmaster.server.core.endings import may_requeue
from trainmaster.server.core.job import Attempt, Job
from trainmaster.server.core.resources import Share
from trainmaster.server.core.states import JobStatus
from trainmaster.server.scheduling.preemption import drain
from trainmaster.server.scheduling.schedule import Plan, schedule
from trainmaster.server.scheduling.traces import NodeChange
from trainmaster.server.scheduling.view import ClusterView


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    backfill: bool = True
    limit: int = 256
    """Placements of one pass, as the coordinator asks for them."""
    charge: bool = False
    """The scheduler's own processor time passes in virtual time, too."""


class SimulatedWork(Protocol):
    """What attempts have to do, which the scheduler does not know."""

    def ends_at(self, job: Job) -> float | None:
        """When a job that has just started will end by itself; None: never."""

    def ended(self, job: Job) -> Reason:
        """How it ended then."""

    def saves_in_s(self, job: Job) -> float:
        """How long an attempt holds what it has after the request to stop."""


class Watcher:
    """Observes a simulation."""

    def arrived(self, job: Job, now: float) -> None:
        """A job was queued for the first time."""

    def placed(self, job: Job, now: float) -> None:
        """A job holds its shares from now on."""

    def stopping(self, victim: Job, by: Job | None, now: float) -> None:
        """An attempt was asked to stop; for a job, or for an operator who drains its node."""

    def left(self, held: Job, after: Job, now: float) -> None:
        """An attempt let go of its shares; the job before and after."""

    def nodes_changed(self, view: ClusterView, now: float) -> None:
        """The inventory is another one."""

    def passed(self, view: ClusterView, plan: Plan, now: float, took_s: float) -> None:
        """The scheduler looked at this view at this time, and decided."""


class VirtualCluster:
    def __init__(
        self,
        view: ClusterView,
        *,
        now: float,
        work: SimulatedWork,
        rules: Rules | None = None,
        arrivals: Sequence[Job] = (),
        changes: Sequence[NodeChange] = (),
        watchers: Iterable[Watcher] = (),
        stopwatch: Callable[[], float] = time.thread_time,
    ) -> None:
        """`arrivals` are QUEUED jobs, to come at their `queued_at`; `changes` come at their own time."""
        self.view = view
        self.now = now
        self.passes = 0
        self._work = work
        self._rules = rules or Rules()
        self._watchers = tuple(watchers)
        self._stopwatch = stopwatch
        self._arrivals = sorted(arrivals, key=lambda job: job.queued_at or 0.0, reverse=True)
        self._changes = sorted(changes, key=lambda change: change.at_s, reverse=True)
        self._leaving: dict[str, float] = {}
        """When each attempt lets go; what the heap says otherwise is out of date."""
        self._leaves: list[tuple[float, str]] = []
        self._backoffs = sorted((job.not_before for job in view.queued() if job.in_backoff(now)), reverse=True)
        self._plan = Plan()
        self._again = bool(view.jobs)
        """The last pass may have left something undone."""
        for job in view.holding.values():
            self._expect_end(job)

    def step(self) -> bool:
        """Process what is due by now, or else the next event, and schedule; False when nothing more will happen."""
        if not self._again:
            if (upcoming := self._next_at()) is None:
                return False
            self.now = max(self.now, upcoming)
        if self._take_in():
            self._pass()
        return True

    def _next_at(self) -> float | None:
        while self._leaves and self._leaving.get(self._leaves[0][1]) != self._leaves[0][0]:
            heappop(self._leaves)
        times = [self._leaves[0][0]] if self._leaves else []
        times += [job.queued_at or 0.0 for job in self._arrivals[-1:]]
        times += [change.at_s for change in self._changes[-1:]]
        times += self._backoffs[-1:]
        return min(times, default=None)

    def _take_in(self) -> bool:
        """Process everything that is due; returns whether the scheduler could do anything with it."""
        now, worth = self.now, self._again
        changed: list[Job] = []
        while self._leaves and self._leaves[0][0] <= now:
            at, job_id = heappop(self._leaves)
            if self._leaving.get(job_id) == at:
                del self._leaving[job_id]
                held = self.view.jobs[job_id]
                after = self._after(held, at)
                changed.append(after)
                worth = True
                for watcher in self._watchers:
                    watcher.left(held, after, at)
        while self._arrivals and (self._arrivals[-1].queued_at or 0.0) <= now:
            job = self._arrivals.pop()
            changed.append(job)
            worth = worth or not self._plan.blocks(job)
            for watcher in self._watchers:
                watcher.arrived(job, job.queued_at or 0.0)
        while self._backoffs and self._backoffs[-1] <= now:
            self._backoffs.pop()
            worth = True
        if changed:
            self.view = self.view.with_jobs(changed)
        return self._change_nodes() or worth

    def _change_nodes(self) -> bool:
        if not (self._changes and self._changes[-1].at_s <= self.now):
            return False
        nodes = dict(self.view.nodes)
        while self._changes and self._changes[-1].at_s <= self.now:
            change = self._changes.pop()
            nodes[change.node.node_id] = change.node
        self.view = self.view.with_nodes(nodes.values())
        for watcher in self._watchers:
            watcher.nodes_changed(self.view, self.now)
        stops = [self._stop(each.job, None, grace_s=each.node.drain_grace_s) for each in drain(self.view).evictions]
        self.view = self.view.with_jobs(stopped for stopped in stops if stopped is not None)
        return True

    def _pass(self) -> None:
        view = self.view
        began = self._stopwatch()
        self._plan = plan = schedule(view, now=self.now, limit=self._rules.limit, backfill=self._rules.backfill)
        took_s = self._stopwatch() - began
        self.passes += 1
        self._again = len(plan.placements) >= self._rules.limit
        for watcher in self._watchers:
            watcher.passed(view, plan, self.now, took_s)
        if self._rules.charge:
            self.now += took_s
        changed: dict[str, Job] = {}
        for placement in plan.placements:
            job = _placed(placement.job, placement.shares, self.now)
            changed[job.job_id] = job
            for watcher in self._watchers:
                watcher.placed(job, self.now)
            self._expect_end(job)
        for preemption in plan.preemptions:
            stopped = self._stop(preemption.victim, preemption.by)
            roomy = make_room(preemption.by, now=self.now, victims=[preemption.victim.job_id])
            if stopped is not None and roomy is not None:
                changed[stopped.job_id] = stopped
                changed[roomy.job.job_id] = roomy.job
        if changed:
            self.view = view.with_jobs(changed.values())

    def _stop(self, victim: Job, by: Job | None, grace_s: float | None = None) -> Job | None:
        """Tell an attempt to stop; None when it is stopping already, or over."""
        if (end := self._leaving.get(victim.job_id)) is not None and end <= self.now:
            return None
        if (change := preempt(victim, now=self.now, message="", grace_s=grace_s)) is None:
            return None
        stopped = change.job
        for watcher in self._watchers:
            watcher.stopping(stopped, by, self.now)
        self._leave(stopped, self.now + min(self._work.saves_in_s(stopped), stopped.live.stop_grace_s))
        return stopped

    def _expect_end(self, job: Job) -> None:
        attempt, end = job.live, self._work.ends_at(job)
        if attempt.stop is not None and attempt.stop_at is not None:
            killed_at = attempt.stop_at + attempt.stop_grace_s
            end = killed_at if end is None else min(end, killed_at)
        if end is not None:
            self._leave(job, max(end, self.now))

    def _leave(self, job: Job, at: float) -> None:
        self._leaving[job.job_id] = at
        heappush(self._leaves, (at, job.job_id))

    def _after(self, job: Job, now: float) -> Job:
        """The job after its attempt: over, or queued again."""
        reason = Reason.PREEMPTED if job.live.stop is StopCause.PREEMPT else self._work.ended(job)
        after = job.evolve(status_at=now, reason=reason, attempt=None)
        if reason is Reason.PREEMPTED and may_requeue(job):
            return after.evolve(status=JobStatus.QUEUED, preemptions_used=job.preemptions_used + 1)
        known = {Reason.PREEMPTED: JobStatus.PREEMPTED, Reason.SUCCEEDED: JobStatus.COMPLETED}
        return after.evolve(status=known.get(reason, JobStatus.FAILED), finished_at=now)


def starts_ahead(
    view: ClusterView,
    *,
    now: float,
    ends_at: Callable[[Job], float | None],
    wanted: Collection[str] | None = None,
    backfill: bool = True,
    max_passes: int = 200,
    patience: Callable[[], bool] = lambda: True,
) -> dict[str, float]:
    """When queued jobs would start, if nothing new came: the view run forward with the scheduler. `ends_at` says when a
    job lets go (None: it does not). Others do not start within `max_passes`, the last known end, or the patience."""
    starts: dict[str, float] = {}
    missing = set(wanted) if wanted is not None else {job.job_id for job in view.queued()}
    cluster = VirtualCluster(
        view, now=now, work=_Expected(ends_at), rules=Rules(backfill=backfill), watchers=(_Starts(starts, missing),)
    )
    while missing and cluster.passes < max_passes and patience() and cluster.step():
        pass
    return starts


class _Expected:
    """Work of which only the end is known."""

    def __init__(self, ends_at: Callable[[Job], float | None]) -> None:
        self.ends_at = ends_at

    def ended(self, job: Job) -> Reason:  # noqa: ARG002 - nobody knows better
        return Reason.SUCCEEDED

    def saves_in_s(self, job: Job) -> float:  # noqa: ARG002 - nobody knows better
        return inf


class _Starts(Watcher):
    def __init__(self, starts: dict[str, float], missing: set[str]) -> None:
        self._starts = starts
        self._missing = missing

    def placed(self, job: Job, now: float) -> None:
        self._starts.setdefault(job.job_id, now)
        self._missing.discard(job.job_id)


def _placed(job: Job, shares: Iterable[Share], now: float) -> Job:
    """The job at work: in virtual time nothing happens between placing a job and running it."""
    number = job.attempt_count + 1
    attempt = Attempt(
        number=number, token="", backend=job.backend, shares=tuple(shares), created_at=now, started_at=now
    )
    return job.evolve(
        status=JobStatus.TRAINING,
        status_at=now,
        started_at=now if job.started_at is None else job.started_at,
        attempt=attempt,
        attempt_count=number,
        room_at=None,
    )

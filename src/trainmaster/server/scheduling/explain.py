"""Why a job waits, and what would let it run; computed on request. The scheduler itself is the judge: a job is in the
way only if `schedule` starts the one that asks when those that are named are gone."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainmaster.protocol.reasons import StopCause
from trainmaster.server.core.commands import grace_s
from trainmaster.server.core.job import Job
from trainmaster.server.core.states import JobStatus, PendingCode
from trainmaster.server.scheduling.obstacles import Obstacles, Patience, Situation, expected_end, gpus_of
from trainmaster.server.scheduling.shortage import (
    BestNode,
    best_node,
    free_in_words,
    needs_in_words,
    nodes_away,
    why_never,
)
from trainmaster.server.scheduling.view import key_of

NAMED = 3
"""How many jobs a sentence names."""
ANOTHERS = "a job of another account"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocker:
    job_id: str | None
    """None: it is another account's."""
    name: str | None
    """Its handle, else its id."""
    queued: bool
    """It waits, and comes first; otherwise it holds what is needed."""
    gpus: int
    """What it holds, or asks for."""
    ends_in_s: float | None
    """When it gives that back, as far as is known; 0 when it should have done so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    code: PendingCode
    message: str
    """For people; completes `the job ...`."""
    needs: str
    best_node: BestNode | None = None
    blockers: Sequence[Blocker] = ()
    """When all of these are gone, it starts."""
    would_start_if: str
    """For people; completes `it would start if ...`."""
    runtime_s: int | None = None
    """With a `max_runtime_seconds` of no more than this it would start now."""


def explain(
    situation: Situation,
    job: Job,
    *,
    visible: Callable[[str], bool] = bool,
    thorough: bool = True,
    patience: Patience = lambda: True,
) -> Explanation | None:
    """Why a job waits; None when it does not. `visible` says whether the jobs of an account may be named. The situation
    has the jobs that hold something and at least those that come before. With `thorough`, what is in the way is found
    by several runs of the scheduler; without patience more may be named than is."""
    if job.status is JobStatus.QUEUED:
        return _Case(situation, job, visible, patience).explain(thorough)
    if job.status is not JobStatus.PENDING:
        return None
    needs = needs_in_words(job.needs, situation.view.inventory.gpus_wanted(job.needs, job.host_backend))
    done = "its checks were done"
    return Explanation(code=PendingCode.ADMITTING, message="is being admitted", needs=needs, would_start_if=done)


def about(seconds: float) -> str:
    """A time that is not known to the second.

    >>> about(4), about(100), about(2400), about(9000), about(400_000)
    ('4 s', '2 min', '40 min', '2.5 h', '4.6 days')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86400:.1f} days"


class _Case:
    def __init__(self, situation: Situation, job: Job, visible: Callable[[str], bool], patience: Patience) -> None:
        self._situation = situation
        self._job = job
        self._now = situation.now
        self._visible = visible
        self._way = Obstacles(situation, job, patience)
        self._needs = needs_in_words(job.needs, self._way.demand.gpus)

    def explain(self, thorough: bool) -> Explanation:
        job, way = self._job, self._way
        if job.in_backoff(self._now):
            wait = about(job.not_before - self._now)
            last = job.message or "the last one failed"
            return self._told(PendingCode.BACKOFF, f"waits {wait} more before its next try ({last})", f"{wait} passed")
        gpus = way.demand.total_gpus
        if way.quota is not None and gpus > way.quota:
            message = f"asks for {gpus} GPUs, and queue {job.queue} may hold {way.quota}"
            remedy = f"it were in another queue, or queue {job.queue} had a quota of {gpus} GPUs"
            return self._told(PendingCode.QUOTA, message, remedy)
        if not way.demand.possible:
            return self._nowhere()
        return self._held_up(thorough)

    def _nowhere(self) -> Explanation:
        """No node that accepts jobs could hold it."""
        backend, nodes = self._job.host_backend, self._way.nodes
        away = nodes_away(self._job.needs, nodes, backend)
        outage = self._situation.outages.get(backend)
        if outage is not None and (away or not nodes):
            silent_for = about(max(0.0, self._now - outage.since))
            parts = [f"needs {self._needs}", *(away or ())[:1]]
            parts.append(
                f"{backend} has not answered for {silent_for} ({outage.problem}), and the job waits until it does"
            )
            return self._told(PendingCode.UNAVAILABLE, "; ".join(parts), f"{backend} answered")
        code = PendingCode.UNAVAILABLE if away else PendingCode.IMPOSSIBLE
        message, remedy = away or why_never(self._job.needs, nodes, backend)
        return self._told(code, f"needs {self._needs}; {message}", remedy)

    def _held_up(self, thorough: bool) -> Explanation:
        """It could run; others hold what it needs, or come first."""
        job, way = self._job, self._way
        plan = self._situation.plan
        if any(placement.job.job_id == job.job_id for placement in plan.placements):
            return self._told(PendingCode.STARTING, "is about to be placed", "nothing else happened")
        best = best_node(way.demand, way.pool)
        preempted = [each.victim for each in plan.preemptions if each.by.job_id == job.job_id]
        holders = preempted or (way.holders() if thorough else [])
        ahead = way.ahead(holders) if thorough else []
        if thorough and preempted and not way.starts_without([*preempted, *ahead]):
            # It counts on room that is made for somebody else.
            preempted += [each.victim for each in plan.preemptions if each.victim not in preempted]
            holders, ahead = preempted, way.ahead(preempted)
        blockers = [self._blocker(other, preempted=other in preempted) for other in (*holders, *ahead)]
        told = functools.partial(self._told, best_node=best, blockers=tuple(blockers))
        remedy, others = _remedy(blockers), list(_in_words(blockers))
        if preempted or (job.room_at is not None and not way.over_quota):
            parts = [f"needs {self._needs}; room is being made for it", *others]
            return told(PendingCode.PREEMPTING, "; ".join(parts), remedy)
        if way.over_quota:
            holds = f"may hold {way.quota} GPUs and holds {way.gpus_held}"
            asks = f"asks for {_gpus(way.demand.total_gpus)} in queue {job.queue}"
            if way.fits and way.starts_without_quota():
                remedy = f"{remedy}, or the quota were {way.gpus_held + way.demand.total_gpus} GPUs"
            return told(PendingCode.QUOTA, "; ".join([f"{asks}, which {holds}", *others]), remedy)
        if not way.fits:
            have = free_in_words(way.demand, way.pool, best) if best else "no node accepts jobs"
            return told(PendingCode.ROOM, "; ".join([f"needs {self._needs}; {have}", *others]), remedy)
        if any(other.queue != job.queue and key_of(other) > key_of(job) for other in ahead):
            held = f" ({_gpus(way.gpus_held)})" if way.gpus_held else ""
            message = f"is in queue {job.queue}, which has had its share{held} of the cluster"
            return told(PendingCode.FAIR_SHARE, "; ".join([message, *others]), remedy)
        parts = ["would fit into what is free, which goes to others", *others]
        starts = [plan.heads[other.job_id][1] for other in ahead if other.job_id in plan.heads]
        if starts and max(starts) < math.inf:
            parts[-1] += f", in about {about(max(starts) - self._now)} at the latest"
        runtime_s = way.runtime_s(plan, ahead) if thorough else None
        if runtime_s is not None:
            parts.append(f"with a max_runtime_seconds of {about(runtime_s)} or less it would start now")
            remedy = f"{remedy}, or its max_runtime_seconds were {runtime_s} or less"
        return told(PendingCode.BEHIND, "; ".join(parts), remedy, runtime_s=runtime_s)

    def _told(self, code: PendingCode, message: str, would_start_if: str, **more: Any) -> Explanation:
        return Explanation(code=code, message=message, needs=self._needs, would_start_if=would_start_if, **more)

    def _blocker(self, other: Job, *, preempted: bool) -> Blocker:
        named = self._visible(other.account_id)
        queued = other.status is JobStatus.QUEUED
        end = None if queued else expected_end(other)
        if preempted:
            stopped = self._now + grace_s(other, StopCause.PREEMPT)
            end = stopped if end is None else min(end, stopped)
        return Blocker(
            job_id=other.job_id if named else None,
            name=(other.handle or other.job_id) if named else None,
            queued=queued,
            gpus=gpus_of(other),
            ends_in_s=None if end is None else max(0.0, end - self._now),
        )


def _in_words(blockers: Sequence[Blocker]) -> Iterator[str]:
    """Who is in the way, in a clause for those that hold something and one for those that come first."""
    holders = [blocker for blocker in blockers if not blocker.queued]
    ahead = [blocker for blocker in blockers if blocker.queued]
    if holders:
        yield _listed([_leaving(blocker) for blocker in holders[:NAMED]], len(holders) - NAMED)
    if ahead:
        yield f"{_names(ahead)} {'comes' if len(ahead) == 1 else 'come'} first"


def _remedy(blockers: Sequence[Blocker]) -> str:
    holders = [blocker for blocker in blockers if not blocker.queued]
    ahead = [blocker for blocker in blockers if blocker.queued]
    parts = [f"{_names(holders)} ended"] if holders else []
    if ahead:
        parts.append(f"{_names(ahead)} no longer waited before it")
    return " and ".join(parts) or "others ended"


def _names(blockers: Sequence[Blocker]) -> str:
    if named := [_name(blocker) for blocker in blockers if blocker.name][:NAMED]:
        return _listed(named, len(blockers) - len(named))
    return ANOTHERS if len(blockers) == 1 else f"{len(blockers)} jobs"


def _leaving(blocker: Blocker) -> str:
    name = _name(blocker)
    if blocker.ends_in_s is None:
        return f"{name} holds {_gpus(blocker.gpus)} and does not say when it ends"
    if blocker.ends_in_s == 0:
        return f"{name} should have ended by now"
    return f"{name} ends in about {about(blocker.ends_in_s)}"


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}" if count else "a slot"


def _name(blocker: Blocker) -> str:
    if blocker.name is None:
        return ANOTHERS
    return blocker.name if blocker.name.startswith("job-") else f"job {blocker.name}"


def _listed(names: Sequence[str], more: int) -> str:
    every = [*names, f"{more} more"] if more > 0 else names
    return " and ".join(filter(None, (", ".join(every[:-1]), every[-1])))

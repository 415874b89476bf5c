"""Timers of attempts: what happens to a job with an attempt when time passes.

A job without an attempt (PENDING, QUEUED, PAUSED or ended) has no timer here. The scheduler respects the back-off of a
queued job (`Job.in_backoff`).
"""

from __future__ import annotations

from trainmaster.protocol.reasons import Reason, StopCause
from trainmaster.server.core.commands import request_stop
from trainmaster.server.core.endings import may_retry
from trainmaster.server.core.job import Change, Job
from trainmaster.server.core.state_machine import Draft
from trainmaster.server.core.states import RUNNING, Actor, Desired, JobStatus
from trainmaster.server.core.workloads.service import DEFAULT_INACTIVITY_S
from trainmaster.server.core.workloads.trainer_service import KIND as TRAINER

STALLED_AFTER_S = 900.0
"""Without a step, and never before the first one."""
DUMP_PATIENCE_S = 10.0
"""Between asking for stacks and stopping a stalled attempt."""
RUNTIME_MARGIN_S = 15.0
"""A worker stops its ranks by itself when their time is up. One that has not done so by then is told, then killed."""
FIRST_USE_WITHIN_S = 600.0
"""A trainer that no client has used since it started is parked after this, unless its job names a timeout: the client
that asked for it has probably failed."""


def due(
    job: Job,
    *,
    now: float,
    last_activity_at: float | None = None,
    heard_at: float | None = None,
    stalled_after_s: float = STALLED_AFTER_S,
    awake_since: float = 0.0,
) -> Change | None:
    """The change that time makes to a job with an attempt; None for a job without one, or whose attempt is stopping.

    This covers run time that is up, stalls, and services that nobody uses. The leader calls it for the jobs that have
    an attempt (`view.holding`), and for no others.

    Time before `awake_since` does not count for the last two: the machine slept then, or nobody led. Nor do times
    that lie in the future, because the clock was set back since. `heard_at` is the last heartbeat of the attempt's
    workers, of the one that has been silent for longest.
    """
    if job.attempt is None or job.attempt.stop is not None:
        return None
    draft = Draft(job, now)
    began_at = job.attempt.started_at
    if (problem := _overtime(job, now=now, heard_at=heard_at, awake_since=awake_since)) is not None:
        request_stop(draft, StopCause.TIMEOUT, save=True)
        draft.note("stopping", actor=Actor.COORDINATOR, reason=Reason.TIMEOUT, message=problem)
        return draft.change()
    if job.status not in RUNNING:
        return None
    step_at = job.progress.step_at
    if job.status is JobStatus.TRAINING and not job.is_service and step_at is not None:
        quiet_s = now - max((at for at in (step_at, job.status_at, awake_since) if at <= now), default=now)
        if job.stalled_at is None and quiet_s > stalled_after_s:
            draft.set(stalled_at=now)
            draft.set_attempt(stack_dump=True)
            draft.note(
                "stalled",
                actor=Actor.COORDINATOR,
                reason=Reason.STALLED,
                message=f"no step for {_told(quiet_s)}; the stacks of its ranks are asked for",
            )
        elif job.stalled_at is not None and now - job.stalled_at > DUMP_PATIENCE_S and may_retry(job):
            request_stop(draft, StopCause.STALL, save=False)
            draft.note(
                "stopping", actor=Actor.COORDINATOR, reason=Reason.STALLED, message="stalled: stopped for another try"
            )
    if job.is_service and job.desired is Desired.RUN and job.inactivity_timeout_s is not None:
        uses = (last_activity_at, job.last_activity_at, began_at, awake_since)
        used_at = max((at for at in uses if at is not None and at <= now), default=now)
        # The job notes as its own activity when it could be used for the first time.
        unused = (last_activity_at or 0.0) < max(job.last_activity_at or 0.0, began_at or 0.0)
        limit_s = job.inactivity_timeout_s
        if unused and job.workload_kind == TRAINER and limit_s == DEFAULT_INACTIVITY_S:
            limit_s = FIRST_USE_WITHIN_S
        if now - used_at > limit_s:
            draft.set(desired=Desired.PAUSE)
            request_stop(draft, StopCause.INACTIVE, save=True)
            draft.note(
                "inactive",
                actor=Actor.COORDINATOR,
                reason=Reason.INACTIVE,
                message=f"not used for {limit_s:.0f} s: saved and parked",
            )
    return draft.change()


def _overtime(job: Job, *, now: float, heard_at: float | None, awake_since: float) -> str | None:
    """Why the server has to end an attempt that its worker should have ended; None when it does not have to.

    Preparing takes as long as it takes, and does not count as running time; but a worker that was stopped (SIGSTOP) by
    what it runs must not prepare for ever.
    """
    began_at = job.live.started_at
    if job.max_runtime_s is None:
        return None
    limit_s = job.max_runtime_s + RUNTIME_MARGIN_S
    if began_at is not None:
        if now - began_at > limit_s:
            return f"runs for longer than {job.max_runtime_s:g} s, and its worker has not stopped it"
    elif job.status is JobStatus.PREPARING:
        signs = (heard_at, job.status_at, awake_since)
        if now - max((at for at in signs if at is not None and at <= now), default=now) > limit_s:
            return f"prepares, and its worker has been silent for longer than {job.max_runtime_s:g} s"
    return None


def _told(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"

"""What the passing of time does to jobs."""

from __future__ import annotations

from trainmaster.core.endings import may_retry
from trainmaster.core.job import Change, Job
from trainmaster.core.machine import Draft
from trainmaster.core.states import RUNNING, Actor, Desired, JobStatus
from trainmaster.core.stopping import request_stop
from trainmaster.protocol.reasons import Reason, StopCause

STALLED_AFTER_S = 900.0
"""Without a step, and never before the first one."""
DUMP_PATIENCE_S = 10.0
"""Between asking for stacks and stopping a stalled attempt."""


def due(
    job: Job,
    *,
    now: float,
    last_activity_at: float | None = None,
    stalled_after_s: float = STALLED_AFTER_S,
    awake_since: float = 0.0,
) -> Change | None:
    """What the passing of time does to a job: stalls, and services that nobody uses.

    Time before `awake_since` does not count: the machine slept then, or nobody led.
    """
    if job.status not in RUNNING or job.attempt is None or job.attempt.stop is not None:
        return None
    draft = Draft(job, now)
    step_at = job.progress.step_at
    if job.status is JobStatus.TRAINING and not job.is_service and step_at is not None:
        quiet_s = now - max(step_at, job.status_at, awake_since)
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
        used_at = max(last_activity_at or 0.0, job.last_activity_at or 0.0, job.attempt.started_at or 0.0, awake_since)
        if now - used_at > job.inactivity_timeout_s:
            draft.set(desired=Desired.PAUSE)
            request_stop(draft, StopCause.INACTIVE, save=True)
            draft.note(
                "inactive",
                actor=Actor.COORDINATOR,
                reason=Reason.INACTIVE,
                message=f"not used for {job.inactivity_timeout_s:.0f} s: saved and parked",
            )
    return draft.change()


def _told(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"

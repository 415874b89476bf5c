"""Having attempts stopped: what is asked of the workers, and how long they get."""

from __future__ import annotations

from collections.abc import Sequence

from trainmaster.protocol.reasons import Reason, StopCause
from trainmaster.protocol.request import Control
from trainmaster.server.core.job import Change, Job
from trainmaster.server.core.state_machine import Draft
from trainmaster.server.core.states import Actor

CANCEL_GRACE_S = 10.0
"""A cancelled job need not save anything."""
SAVE_GRACE_S = 30.0
"""For a pause or a preemption, or three times the last save, whichever is longer."""


def preempt(job: Job, *, now: float, message: str, grace_s: float | None = None) -> Change | None:
    """Take a job's resources away, after a grace period in which it saves; the message says for what."""
    if job.attempt is None or job.attempt.stop is not None:
        return None
    draft = Draft(job, now)
    request_stop(draft, StopCause.PREEMPT, save=True)
    if grace_s is not None:
        draft.set_attempt(stop_grace_s=grace_s)
    draft.note("preempting", actor=Actor.SCHEDULER, reason=Reason.PREEMPTED, message=message)
    return draft.change()


def make_room(job: Job, *, now: float, victims: Sequence[str]) -> Change | None:
    """Record that others are preempted for a waiting job: what they leave is kept for it."""
    draft = Draft(job, now)
    draft.set(room_at=now if job.room_at is None else job.room_at)
    draft.note(
        "making_room",
        actor=Actor.SCHEDULER,
        message=f"preempts {len(victims)} {'job' if len(victims) == 1 else 'jobs'} of lower priority",
        data={"count": len(victims)},
    )
    return draft.change()


def request_stop(draft: Draft, cause: StopCause, *, save: bool) -> None:
    """Have the current attempt stopped. A later, stronger wish replaces an earlier one."""
    job = draft.job
    draft.set_attempt(stop=cause, stop_save=save and job.can_save, stop_grace_s=grace_s(job, cause), stop_at=draft.now)


def grace_s(job: Job, cause: StopCause) -> float:
    """How long a job gets between being asked to stop and being killed."""
    own = (job.spec.get("workload") or {}).get("grace_period_s")
    if cause in (StopCause.CANCEL, StopCause.DELETE, StopCause.PEER):
        return min(CANCEL_GRACE_S, float(own)) if own is not None else CANCEL_GRACE_S
    return max(float(own) if own is not None else SAVE_GRACE_S, 3 * job.last_save_s)


def control_for(job: Job) -> Control | None:
    """What the workers of the current attempt are to be told; None when there is nothing to say."""
    attempt = job.attempt
    if attempt is None or not (attempt.stop or attempt.stack_dump):
        return None
    return Control(
        seq=job.version,
        stop=attempt.stop,
        save=attempt.stop_save,
        grace_s=attempt.stop_grace_s,
        dump_stacks=attempt.stack_dump,
    )

"""How attempts end, when time alone ends them, and the status that their jobs get."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trainmaster.protocol.reasons import REASON_OF_STOP, Reason, StopCause
from trainmaster.server.core.commands import bury, request_stop
from trainmaster.server.core.job import PREEMPTION_BUDGET, Attempt, Change, Job
from trainmaster.server.core.reports import Liveness, NodeObservation, ending
from trainmaster.server.core.state_machine import Draft
from trainmaster.server.core.states import CONSEQUENCES, RUNNING, Actor, AttemptOutcome, Desired, JobStatus, Trigger
from trainmaster.server.core.workloads.programs import DEFAULT_INACTIVITY_S
from trainmaster.server.core.workloads.trainer_service import KIND as TRAINER

BACKOFF_S = 5.0
BACKOFF_MAX_S = 300.0
LAUNCH_BACKOFF_MAX_S = 60.0
"""So an engine that recovers is noticed within this time."""
MOST_UNCLAIMED_LAUNCHES = 3
"""Launches in a row that no worker claims in time; after that, waiting will not fix the cause."""


def refuse_launch(
    job: Job,
    *,
    now: float,
    attempt: int,
    message: str,
    reason: Reason,
    before: int = 0,
    again_in_s: float | None = None,
) -> Change | None:
    """Record that a backend could not launch an attempt, of which nothing ran. The next launch waits for `again_in_s`,
    or else longer the more were refused in a row."""
    if job.attempt is None or job.attempt.number != attempt:
        return None
    draft = Draft(job, now)
    draft.end_attempt(reason=reason, message=message)
    if job.desired in (Desired.STOP, Desired.DELETE):
        draft.move(Trigger.CANCEL, reason=reason, message=job.attempt.message or message)
    elif CONSEQUENCES[reason].outcome is AttemptOutcome.PERMANENT:
        draft.move(Trigger.REFUSE, reason=reason, message=message)
    else:
        wait_s = min(backoff_s(before), LAUNCH_BACKOFF_MAX_S) if again_in_s is None else again_in_s
        draft.set(not_before=now + wait_s)
        draft.move(Trigger.UNPLACE, reason=reason, message=message)
    if job.desired is Desired.DELETE:
        bury(draft)
    return draft.change()


def record_launch_wait(job: Job, *, now: float, message: str) -> Change | None:
    """Record what a backend has to do before it can launch the current attempt."""
    if job.status is not JobStatus.SCHEDULING or job.live.stop is not None or job.message == message:
        return None
    draft = Draft(job, now)
    draft.set(message=message)
    draft.note("launch_waits", actor=Actor.BACKEND, message=message)
    return draft.change()


def record_engine_handle(job: Job, *, now: float, handle: str) -> Change | None:
    """Record what the backend's engine calls the current attempt."""
    draft = Draft(job, now)
    draft.set_attempt(handle=handle)
    return draft.change()


_LOST: Mapping[Liveness, tuple[Reason, str]] = {
    Liveness.GONE: (Reason.WORKER_LOST, "the worker of node {node} died without reporting an exit"),
    Liveness.REBOOTED: (Reason.NODE_LOST, "the machine of node {node} was rebooted"),
    Liveness.REVOKED: (Reason.NEVER_STARTED, "withdrawn before it began"),
}


def record_node_exit(draft: Draft, node: int, seen: NodeObservation) -> None:
    """Record that a node has ended: by its exit document, or because its worker is known to be gone."""
    attempt = draft.job.live
    if node in attempt.exits or (seen.exit is None and seen.liveness not in _LOST):
        return
    document = seen.exit
    if document is None:
        reason, message = _LOST[seen.liveness]
        document = {"reason": reason, "message": message.format(node=node)}
    ended = ending(document, since=attempt.created_at, now=draft.now)
    # The grace period is over, or began by a clock that was set back since.
    late = attempt.stop_at is not None and not attempt.stop_at <= draft.now <= attempt.stop_at + attempt.stop_grace_s
    if ended["reason"] == Reason.WORKER_LOST and attempt.stop is not None and late:
        # It was killed because it did not stop: that is how it ended, and no loss.
        ended["reason"], ended["stop_cause"] = REASON_OF_STOP[attempt.stop], attempt.stop
        ended["message"] = f"stopped ({attempt.stop}): its worker did not react within the grace period and was killed"
    draft.set_attempt(
        exits={**attempt.exits, node: ended},
        # Where nobody heard that it had started, its end still says when.
        started_at=ended.get("started_at") if attempt.started_at is None else attempt.started_at,
    )


def settle(draft: Draft, *, unclaimed_launches: int = 0) -> None:
    """End the attempt when every node has; when one failed, have the others stopped."""
    attempt = draft.job.live
    if len(attempt.exits) < len(attempt.shares):
        failed = any(ended["reason"] != Reason.SUCCEEDED for ended in attempt.exits.values())
        if failed and attempt.stop is None:
            draft.set_attempt(stop=StopCause.PEER, stop_save=False, stop_grace_s=5.0, stop_at=draft.now)
        return
    cause = _cause(attempt)
    told = ("exit_code", "signal", "rank", "step", "evidence")
    evidence = {name: cause[name] for name in told if cause.get(name) is not None}
    # The resources of the last node were not free before this.
    ended_at = max(float(ended["ended_at"]) for ended in attempt.exits.values())
    reason, message = Reason(cause["reason"]), str(cause["message"])
    gives_up = reason is Reason.NEVER_STARTED and unclaimed_launches >= MOST_UNCLAIMED_LAUNCHES
    if gives_up:
        message = f"no worker started in {unclaimed_launches} launches in a row"
    _finish(draft, reason, message, evidence, ended_at, gives_up=gives_up)


def unclaimed_launches(job: Job, attempts: Iterable[Attempt]) -> int:
    """How many launches in a row no worker claimed in time since the job was queued or resumed, with the current one;
    one that was refused, or withdrawn for another reason, neither counts nor breaks the row."""
    earlier = [each for each in attempts if each.number < job.live.number and each.created_at >= (job.queued_at or 0.0)]
    count = 0
    for attempt in [job.live, *sorted(earlier, key=lambda each: each.number, reverse=True)]:
        if len(attempt.claimed) == len(attempt.shares):
            break
        if attempt.reason in (None, Reason.NEVER_STARTED) and attempt.stop in (None, StopCause.PEER):
            count += 1
    return count


def _cause(attempt: Attempt) -> Mapping[str, Any]:
    """The exit that explains the attempt's end: the first failure that no peer caused. A node that never started
    explains why its peers stopped, and why their success is none, but no other failure."""

    def rank(ended: Mapping[str, Any]) -> tuple[bool, bool, bool, float]:
        return (
            ended["reason"] == Reason.SUCCEEDED,
            ended.get("stop_cause") == StopCause.PEER,
            ended["reason"] == Reason.NEVER_STARTED,
            float(ended["ended_at"]),
        )

    return min(attempt.exits.values(), key=rank)


def _finish(
    draft: Draft, reason: Reason, message: str, evidence: Mapping[str, Any], ended_at: float, *, gives_up: bool
) -> None:
    """End the attempt and send the job where the reason, the user's wish and the budgets lead."""
    job = draft.job
    unwanted = job.desired in (Desired.STOP, Desired.DELETE)
    if unwanted and reason is Reason.NEVER_STARTED:
        # It is not placed again, as that reason would promise.
        reason = Reason.DELETED if job.desired is Desired.DELETE else Reason.CANCELLED
    outcome = CONSEQUENCES[reason].outcome
    cancelled = unwanted and outcome is not AttemptOutcome.COMPLETED
    if job.status is JobStatus.SCHEDULING and outcome is not AttemptOutcome.NOT_STARTED and not cancelled:
        draft.move(Trigger.LAUNCH)
    draft.end_attempt(reason=reason, message=message, evidence=evidence, ended_at=ended_at)
    if cancelled:
        # Whoever cancelled it may have said why; the attempt keeps how it ended.
        draft.move(Trigger.CANCEL, reason=reason, message=job.live.message or message, data=evidence)
    elif outcome is AttemptOutcome.COMPLETED:
        draft.move(Trigger.COMPLETE, reason=reason, message=message)
    elif outcome is AttemptOutcome.PARKED or (job.desired is Desired.PAUSE and outcome is not AttemptOutcome.PERMANENT):
        # A service that nobody used is parked as unused, however its attempt ended: its next client resumes it.
        _park(draft, Reason.INACTIVE if job.live.stop is StopCause.INACTIVE else reason, message)
    elif outcome is AttemptOutcome.NOT_STARTED and gives_up:
        last = Trigger.REFUSE if draft.edge(Trigger.REFUSE) is not None else Trigger.FAIL
        draft.move(last, reason=reason, message=message)
    elif outcome is AttemptOutcome.NOT_STARTED:
        # No budget is charged: nothing failed that ran. The other nodes of a gang may have begun already.
        draft.set(not_before=draft.now + BACKOFF_S)
        again = Trigger.UNPLACE if draft.edge(Trigger.UNPLACE) is not None else Trigger.RETRY
        draft.move(again, reason=reason, message=message)
    elif outcome is AttemptOutcome.PREEMPTED and may_requeue(job):
        draft.set(preemptions_used=job.preemptions_used + 1)
        draft.move(Trigger.RETRY, reason=reason, message=message or "preempted; queued again")
    elif outcome is AttemptOutcome.PREEMPTED:
        draft.move(Trigger.PREEMPT, reason=reason, message=message)
    elif outcome is AttemptOutcome.TRANSIENT and may_retry(job):
        wait_s = backoff_s(job.retries_used)
        draft.set(retries_used=job.retries_used + 1, not_before=draft.now + wait_s)
        message = f"{message}; try {job.retries_used + 1} of {job.max_retries} in {wait_s:.0f} s"
        draft.move(Trigger.RETRY, reason=reason, message=message, data=evidence)
    else:
        draft.move(Trigger.FAIL, reason=reason, message=message, data=evidence)
    if job.desired is Desired.DELETE:
        bury(draft)


def _park(draft: Draft, reason: Reason, message: str) -> None:
    if draft.edge(Trigger.PARK) is None and draft.edge(Trigger.TRAIN) is not None:
        draft.move(Trigger.TRAIN)
    if draft.edge(Trigger.PARK) is not None:
        draft.move(Trigger.PARK, reason=reason, message=message, data={"checkpoint_id": draft.job.latest_checkpoint_id})
    else:
        # Exporting had begun before the pause took effect: nothing to park, so it resumes from its checkpoint.
        draft.set(desired=Desired.RUN)
        draft.move(Trigger.RETRY, reason=reason, message="was exporting; is queued again instead of being paused")


def may_requeue(job: Job) -> bool:
    """Whether a preempted job is queued again: on a budget of its own, and only where retries are wanted at all."""
    return job.max_retries > 0 and not job.is_service and job.preemptions_used < PREEMPTION_BUDGET


def may_retry(job: Job) -> bool:
    # A service's users must learn that its state is gone: it is resumed by them, never behind their backs.
    return not job.is_service and job.retries_used < job.max_retries


def backoff_s(tries: int) -> float:
    return float(min(BACKOFF_S * 2 ** min(tries, 10), BACKOFF_MAX_S))


# Timers. A job without an attempt (PENDING, QUEUED, PAUSED or ended) has none here; the scheduler respects the back-off
# of a queued job (`Job.in_backoff`).

STALLED_AFTER_S = 900.0
"""Without a step, and never before the first one."""
DUMP_PATIENCE_S = 10.0
"""Between asking for stacks and stopping a stalled attempt."""
RUNTIME_MARGIN_S = 15.0
"""A worker stops its ranks when their time is up. After this time more the server asks it to stop, then kills it."""
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
    """The change that time makes to an attempt that is not stopping: its run time is up, it stalls, or nobody uses it.
    Time before `awake_since` (the machine slept, or nobody led) does not count for the last two, nor do times in the
    future, after the clock was set back. `heard_at` is the last heartbeat of the worker that was silent for longest."""
    if job.attempt is None or job.attempt.stop is not None:
        return None
    draft = Draft(job, now)
    if (problem := _overtime(job, now=now, heard_at=heard_at, awake_since=awake_since)) is not None:
        request_stop(draft, StopCause.TIMEOUT, save=True)
        draft.note("stopping", actor=Actor.COORDINATOR, reason=Reason.TIMEOUT, message=problem)
        return draft.change()
    if job.status not in RUNNING:
        return None
    step_at = job.progress.step_at
    if job.status is JobStatus.TRAINING and not job.is_service and step_at is not None:
        quiet_s = _since(now, step_at, job.status_at, awake_since)
        if job.stalled_at is None and quiet_s > stalled_after_s:
            draft.set(stalled_at=now)
            draft.set_attempt(stack_dump=True)
            quiet = f"{quiet_s / 60:.0f} min" if quiet_s >= 120 else f"{quiet_s:.0f} s"
            message = f"no step for {quiet}; requesting the stacks of its ranks"
            draft.note("stalled", actor=Actor.COORDINATOR, reason=Reason.STALLED, message=message)
        elif job.stalled_at is not None and now - job.stalled_at > DUMP_PATIENCE_S and may_retry(job):
            request_stop(draft, StopCause.STALL, save=False)
            message = "stalled: stopped for another try"
            draft.note("stopping", actor=Actor.COORDINATOR, reason=Reason.STALLED, message=message)
    if job.is_service and job.desired is Desired.RUN and job.inactivity_timeout_s is not None:
        began_at = job.attempt.started_at
        # The job notes as its own activity when it could be used for the first time.
        unused = (last_activity_at or 0.0) < max(job.last_activity_at or 0.0, began_at or 0.0)
        limit_s = job.inactivity_timeout_s
        if unused and job.workload_kind == TRAINER and limit_s == DEFAULT_INACTIVITY_S:
            limit_s = FIRST_USE_WITHIN_S
        if _since(now, last_activity_at, job.last_activity_at, began_at, awake_since) > limit_s:
            draft.set(desired=Desired.PAUSE)
            request_stop(draft, StopCause.INACTIVE, save=True)
            message = f"not used for {limit_s:.0f} s: saved and parked"
            draft.note("inactive", actor=Actor.COORDINATOR, reason=Reason.INACTIVE, message=message)
    return draft.change()


def _overtime(job: Job, *, now: float, heard_at: float | None, awake_since: float) -> str | None:
    """Why the server has to end an attempt that its worker should have ended; None when it does not have to. Preparing
    is no running time, but a worker that was stopped (SIGSTOP) by what it runs must not prepare for ever."""
    began_at = job.live.started_at
    if job.max_runtime_s is None:
        return None
    limit_s = job.max_runtime_s + RUNTIME_MARGIN_S
    if began_at is not None and now - began_at > limit_s:
        return f"runs for longer than {job.max_runtime_s:g} s, and its worker has not stopped it"
    prepares = began_at is None and job.status is JobStatus.PREPARING
    if prepares and _since(now, heard_at, job.status_at, awake_since) > limit_s:
        return f"prepares, and its worker has been silent for longer than {job.max_runtime_s:g} s"
    return None


def _since(now: float, *times: float | None) -> float:
    """How long the latest of these is ago; what is unknown or lies in the future does not count."""
    return now - max((at for at in times if at is not None and at <= now), default=now)

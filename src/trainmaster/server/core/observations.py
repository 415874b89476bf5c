"""What happens to jobs from outside: admission, placement, workers' records. Pure, and safe to repeat: a record is
taken in once because its stream's offset is committed with what it said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainmaster.protocol.reasons import Phase, Reason
from trainmaster.server.core import reports
from trainmaster.server.core.endings import record_node_exit, settle
from trainmaster.server.core.job import Attempt, Change, CheckpointRecord, Job, JobProgress
from trainmaster.server.core.reports import AttemptObservation
from trainmaster.server.core.resources import Share
from trainmaster.server.core.state_machine import Draft
from trainmaster.server.core.states import ACTIVE, TRANSITIONS, Actor, JobStatus, Trigger

_PHASE_TRIGGERS: Mapping[Phase, Trigger] = {
    Phase.TRAINING: Trigger.TRAIN,
    Phase.CHECKPOINTING: Trigger.CHECKPOINT,
    Phase.EVALUATING: Trigger.EVALUATE,
    Phase.EXPORTING: Trigger.EXPORT,
}
_PHASE_STATUSES: Mapping[Trigger, JobStatus] = {trigger: edge.to for (_, trigger), edge in TRANSITIONS.items()}
"""Wherever a phase begins, it leads to one status."""
KINDS = frozenset({"training", "sampler", "external"})
"""Of checkpoints that users of a trainer service ask for."""
_LONGEST_SAVE_S = 86_400.0
"""A job gets three times its last save to stop; nobody is to wait for ever."""


def admit(job: Job, *, now: float) -> Change | None:
    draft = Draft(job, now)
    draft.move(Trigger.ADMIT)
    return draft.change()


def reject(job: Job, *, now: float, message: str) -> Change | None:
    draft = Draft(job, now)
    draft.move(Trigger.REJECT, reason=Reason.ADMISSION, message=message)
    return draft.change()


def place(job: Job, *, now: float, shares: Sequence[Share], token: str) -> Change | None:
    draft = Draft(job, now)
    attempt = Attempt(
        number=job.attempt_count + 1,
        token=token,
        backend=job.backend,
        shares=tuple(shares),
        created_at=now,
        resume_checkpoint_id=job.resume_checkpoint_id or job.own_checkpoint_id,
    )
    # What a new attempt knows of the old one's progress: no step is recent.
    carried = replace(job.progress, eta_s=None, step_at=None, first_step=None, first_at=None)
    draft.set(attempt=attempt, attempt_count=attempt.number, progress=carried, room_at=None)
    draft.move(Trigger.PLACE, message=f"placed on {', '.join(dict.fromkeys(share.node_id for share in shares))}")
    return draft.change()


def observe(job: Job, observation: AttemptObservation, *, now: float) -> Change | None:
    """Apply what was seen of the current attempt; what is about an older one is ignored."""
    attempt = job.attempt
    if attempt is None or attempt.number != observation.attempt or job.status not in ACTIVE:
        return None
    draft = Draft(job, now)
    if observation.progress is not None:
        _take_progress(draft, observation.progress)
    endpoint = next((seen.endpoint for seen in observation.nodes if seen.endpoint), None)
    if endpoint and endpoint != job.endpoint:
        draft.set(endpoint=endpoint)
        _advance(draft)
    for node, seen in enumerate(observation.nodes):
        for record in seen.records:
            try:
                _take_record(draft, node, record)
            except (KeyError, ValueError) as error:
                # Ranks write these; a wrong one must not hide the rest.
                draft.note("report_ignored", actor=Actor.WORKER, message=f"a report was not understood: {error!r}")
        record_node_exit(draft, node, seen)
    if dict(observation.offsets) != dict(attempt.offsets):
        draft.set_attempt(offsets={**attempt.offsets, **observation.offsets})
    settle(draft, unclaimed_launches=observation.unclaimed_launches)
    return draft.change()


def _take_record(draft: Draft, node: int, record: Mapping[str, Any]) -> None:
    written_at = reports.moment(record.get("t"), since=draft.job.live.created_at, now=draft.now)
    at = draft.now if written_at is None else written_at  # its time may be missing or impossible
    first = draft.job.started_at is None
    _take_word(draft, node, record, at)
    if first and draft.job.started_at is not None:
        draft.set(started_at=at)


def _take_word(draft: Draft, node: int, record: Mapping[str, Any], at: float) -> None:
    # Whoever speaks has claimed: over HTTP a rank's record may arrive before its worker's.
    if node not in draft.job.live.claimed:
        draft.set_attempt(claimed=draft.job.live.claimed | {node})
        _advance(draft)
    attempt = draft.job.live
    match record.get("type"):
        case "step_started":
            # Told before the ranks start: from then on they might keep their worker from telling anything.
            if record.get("starts_ranks") and attempt.started_at is None:
                draft.set_attempt(started_at=at)
        case "started":
            draft.set_attempt(started_at=at if attempt.started_at is None else attempt.started_at)
            if not draft.job.is_service and not record.get("reports_phases"):
                draft.set_attempt(started=attempt.started | {node})
        case "ready":
            draft.set_attempt(started=attempt.started | {node})
            # Nobody could use it before: the time until it is parked begins here.
            draft.set(last_activity_at=draft.now)
        case "phase":
            _take_phase(draft, reports.text(record.get("phase"), reports.MAX_NAME) or "")
        case "checkpoint":
            _take_checkpoint(draft, record, at)
        case "capable":
            if record.get("save") and (draft.job.spec.get("workload") or {}).get("can_save") is not False:
                draft.set(can_save=True)
        case "doing":
            if draft.job.status is JobStatus.PREPARING:
                draft.set(message=reports.text(record.get("message")))
        case "note" | "reports_cut" as said:
            actor = Actor.WORKER if said == "note" else Actor.COORDINATOR
            draft.note(said, actor=actor, message=reports.text(record.get("message")) or "")
        case "grace_missed":
            grace_s = reports.number(record.get("grace_s"))
            late = "in time" if grace_s is None else f"within {grace_s:g} s"
            message = f"did not stop {late} and was killed; it resumes from its last committed checkpoint"
            draft.note("grace_missed", actor=Actor.WORKER, message=message)
        case "stacks":
            draft.set_attempt(stack_dump=False)
            stacks = reports.stacks(record.get("stacks"))
            draft.note("stacks", actor=Actor.WORKER, message="stacks of its ranks", data=stacks)
        case "strays_killed":
            count = reports.whole(record.get("count"))
            many = "" if count is None else f"{count} "
            draft.note("strays_killed", actor=Actor.WORKER, message=f"{many}left-over processes were killed")
    # A newer worker may say more than this server understands.
    _advance(draft)


def _advance(draft: Draft) -> None:
    """Take the edges that the state of the workers allows by now."""
    attempt = draft.job.live
    everyone = frozenset(range(len(attempt.shares)))
    if draft.job.status is JobStatus.SCHEDULING and attempt.claimed >= everyone:
        draft.move(Trigger.LAUNCH)
        chosen = attempt.resume_checkpoint_id
        if attempt.number > 1 or chosen:
            fresh = "starts anew" if draft.job.is_service else "starts at step 0: there is no checkpoint"
            message = f"attempt {attempt.number} {f'resumes from checkpoint {chosen}' if chosen else fresh}"
            draft.note("resumed", actor=Actor.COORDINATOR, message=message, data={"checkpoint_id": chosen})
    # An engine may name the address of a service after its worker has said that it is ready.
    is_reached = not draft.job.is_service or draft.job.endpoint is not None
    if draft.job.status is JobStatus.PREPARING and attempt.started >= everyone and is_reached:
        draft.move(Trigger.TRAIN)


def _take_phase(draft: Draft, name: str) -> None:
    try:
        trigger = _PHASE_TRIGGERS[Phase(name)]
    except (ValueError, KeyError):
        return
    if draft.job.status is _PHASE_STATUSES[trigger]:
        return
    if draft.job.is_service and draft.job.status is JobStatus.PREPARING:
        return  # It runs from when it answers, whatever it says of itself, and nobody could have used it before.
    if draft.edge(trigger) is None and draft.edge(Trigger.TRAIN) is not None:
        draft.move(Trigger.TRAIN)
    if draft.edge(trigger) is not None:
        draft.move(trigger)
    else:
        message = f"reported {name} while {draft.job.status}; ignored, because it is not allowed in this state"
        draft.note("phase_ignored", actor=Actor.WORKER, message=message)


def _take_checkpoint(draft: Draft, record: Mapping[str, Any], at: float) -> None:
    job = draft.job
    checkpoint_id = reports.exact_text(record["checkpoint_id"], reports.MAX_ID)
    says_best = job.best_metric is None and record.get("is_best") is True
    if checkpoint_id == job.latest_checkpoint_id:
        # Several ranks may report the one that they wrote together; and it may have turned out to be the best.
        if says_best:
            draft.set(best_checkpoint_id=checkpoint_id)
        return
    told = record.get("step")
    step = 0 if told is None else reports.whole(told)
    if step is None:
        raise ValueError("the step of a checkpoint is no number that can be kept")
    metrics = reports.metrics(record.get("metrics"))
    kind = reports.text(record.get("kind"), reports.MAX_NAME) or ""
    attributes = reports.attributes(record.get("attributes"))
    checkpoint = CheckpointRecord(
        checkpoint_id=checkpoint_id,
        job_id=job.job_id,
        attempt=job.live.number,
        step=step,
        epoch=reports.number(record.get("epoch")),
        created_at=at,
        metrics=metrics,
        size_bytes=reports.whole(record.get("size_bytes")) or 0,
        root=reports.exact_text(record["root"]),
        path=reports.exact_text(record["path"]),
        kind=kind if kind in KINDS else "",
        name=reports.text(record.get("name"), reports.MAX_ID) or "",
        attributes=attributes,
        expires_at=reports.number(attributes.get("expires_at"), low=0.0),
    )
    before = attributes.get("replaces") if checkpoint.kind else None
    draft.register(checkpoint, replaces=[str(each) for each in before] if isinstance(before, list) else ())
    took_s = reports.number(record.get("duration_s"), low=0.0, high=_LONGEST_SAVE_S)
    draft.set(can_save=True, last_save_s=took_s or job.last_save_s)
    if not checkpoint.kind:
        draft.set(resume_checkpoint_id=None)
    value = metrics.get(job.best_metric) if job.best_metric else None
    if value is not None:
        best = job.best_metric_value
        if best is None or (value > best if job.best_is_greater else value < best):
            draft.set(best_checkpoint_id=checkpoint_id, best_metric_value=value)
    elif says_best:
        # Nobody named a metric to go by: the job's own word counts.
        draft.set(best_checkpoint_id=checkpoint_id)
    data = {"checkpoint_id": checkpoint_id, "step": step, "metrics": metrics}
    draft.note("checkpoint", actor=Actor.WORKER, message=f"checkpoint {checkpoint_id} at step {step}", data=data)


def _take_progress(draft: Draft, progress: JobProgress) -> None:
    before = draft.job.progress
    step_at = reports.moment(progress.step_at, since=draft.job.live.created_at, now=draft.now)
    first_step, first_at = before.first_step, before.first_at
    if progress.step is not None and (first_step is None or progress.step < first_step):
        first_step, first_at = progress.step, step_at
    progress = replace(progress, step_at=step_at, first_step=first_step, first_at=first_at)
    if progress == before:
        return
    rose = progress.step is not None and progress.step != before.step
    if rose and draft.job.stalled_at is not None:
        draft.set(stalled_at=None)
        draft.set_attempt(stack_dump=False)
        draft.note("moving_again", actor=Actor.WORKER, message=f"step {progress.step}: no longer stalled")
    draft.set(progress=progress)

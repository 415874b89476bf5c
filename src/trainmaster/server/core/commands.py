"""Commands: submit, retry, cancel, pause, resume, edit, delete and preempt. Pure; each returns a `Change`."""

from __future__ import annotations

import os
import random
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

from trainmaster.protocol.reasons import Reason, StopCause
from trainmaster.protocol.request import Control
from trainmaster.server.core.errors import ConflictError, InvalidTransitionError, Problem, SpecError
from trainmaster.server.core.job import Change, CheckpointRecord, Job, JobEvent
from trainmaster.server.core.resources import Needs
from trainmaster.server.core.spec.configs import ResourceConfig
from trainmaster.server.core.spec.documents import SPEC_VERSION, dump, load_stored, parse
from trainmaster.server.core.spec.submit import CompiledJob, SubmitJobRequest
from trainmaster.server.core.state_machine import Draft
from trainmaster.server.core.states import ACTIVE, TERMINAL, TRANSITIONS, Action, Actor, Desired, Trigger, allowed_from
from trainmaster.server.core.workloads.programs import Serving


def cancel(job: Job, *, now: float, message: str = "") -> Change | None:
    """End a job for good. One that runs is stopped first; asking twice changes nothing."""
    check_allowed(job, Action.CANCEL)
    draft = Draft(job, now)
    if job.status not in ACTIVE:
        draft.set(desired=Desired.STOP)
        draft.move(Trigger.CANCEL, reason=Reason.CANCELLED, message=message)
    elif job.desired in (Desired.RUN, Desired.PAUSE):
        draft.set(desired=Desired.STOP)
        request_stop(draft, StopCause.CANCEL, save=False)
        if message:
            draft.set(message=message)
            draft.set_attempt(message=message)  # whatever the job says until it has stopped
        draft.note("cancel_requested", actor=Actor.API, message=message or "cancel requested")
    return draft.change()


def pause(job: Job, *, now: float, save: bool = True) -> Change | None:
    """Park a running job; it is PAUSED once it has stopped. ConflictError if it cannot, or cannot `save`."""
    check_allowed(job, Action.PAUSE)
    if job.desired is not Desired.RUN:
        allowed = sorted(allowed_from(Action.PAUSE, service=job.is_service))
        message = f"the job is being stopped already (wanted: {job.desired})"
        raise InvalidTransitionError(action=Action.PAUSE, status=job.status, allowed_from=allowed, message=message)
    if save and not job.can_save:
        raise ConflictError(
            "this workload has not shown that it can save; pause it without saving (save_checkpoint=false, or "
            "--no-save), and it resumes from its last committed checkpoint, or from the start"
        )
    draft = Draft(job, now)
    draft.set(desired=Desired.PAUSE)
    request_stop(draft, StopCause.PAUSE, save=save)
    draft.note("pause_requested", actor=Actor.API, message="pause requested", data={"save_checkpoint": save})
    return draft.change()


def resume(job: Job, *, now: float, checkpoint: CheckpointRecord | None = None) -> Change | None:
    """Queue a parked job again, from `checkpoint` or else from its latest one; a service also after its end."""
    check_allowed(job, Action.RESUME)
    # A job that has saved nothing yet still starts from the checkpoint that it was given.
    inherited = job.resume_checkpoint_id if job.latest_checkpoint_id is None else None
    chosen = checkpoint.checkpoint_id if checkpoint else job.own_checkpoint_id or inherited
    draft = Draft(job, now)
    draft.set(
        desired=Desired.RUN,
        resume_checkpoint_id=checkpoint.checkpoint_id if checkpoint else inherited,
        queued_at=now,
        not_before=0.0,
        paused_at=None,
        finished_at=None,
        retries_used=0,
        last_activity_at=None,
    )
    fresh = "starts again" if job.is_service else "has no checkpoint: starts again at step 0"
    message = f"resumes from checkpoint {chosen}" if chosen else fresh
    draft.move(Trigger.RESUME, message=message, data={"checkpoint_id": chosen})
    return draft.change()


def edit(
    job: Job,
    *,
    now: float,
    priority: int | None = None,
    queue: str | None = None,
    labels: Mapping[str, str] | None = None,
) -> Change | None:
    """Change priority, queue or labels of a job that has not ended."""
    check_allowed(job, Action.EDIT)
    wanted: dict[str, Any] = {"priority": priority, "queue": queue, "labels": labels}
    changes = {name: value for name, value in wanted.items() if value is not None and value != getattr(job, name)}
    if not changes:
        return None
    spec = dict(job.spec)
    if "labels" in changes:
        spec["labels"] = dict(changes["labels"])
    if scheduling := {name: changes[name] for name in ("priority", "queue") if name in changes}:
        spec["scheduling_config"] = {**spec.get("scheduling_config", {}), **scheduling}
    if "priority" in changes and isinstance(spec.get("training_config"), dict):
        spec["training_config"] = {name: v for name, v in spec["training_config"].items() if name != "priority"}
    draft = Draft(job, now)
    draft.set(**changes, spec=spec)
    said = ", ".join(f"{name} is now {value}" for name, value in changes.items())
    draft.note("edited", actor=Actor.API, message=said, data=changes)
    return draft.change()


def delete(job: Job, *, now: float, purge: bool = False) -> Change | None:
    """Hide a job behind a tombstone; a live one is stopped first. `purge` also removes its files, also afterwards."""
    draft = Draft(job, now)
    if job.deleted_at is not None:
        if purge and not job.purge:
            draft.set(purge=True)
            draft.note("purge_requested", actor=Actor.API, message="the files of the deleted job are to be removed")
    elif job.status in ACTIVE and job.desired is Desired.DELETE and job.purge >= purge:
        return None
    elif job.status in ACTIVE:
        draft.set(desired=Desired.DELETE, purge=purge or job.purge)
        request_stop(draft, StopCause.DELETE, save=False)
        draft.note("delete_requested", actor=Actor.API, message="deletion requested", data={"purge": purge})
    else:
        draft.set(desired=Desired.DELETE, purge=purge or job.purge)
        if job.status not in TERMINAL:
            draft.move(Trigger.CANCEL, reason=Reason.DELETED, message="the job was deleted")
        bury(draft)
    return draft.change()


def bury(draft: Draft) -> None:
    """Set the tombstone of a job that holds nothing any more."""
    draft.set(deleted_at=draft.now)
    draft.note("deleted", actor=Actor.API, message="the job was deleted", data={"purge": draft.job.purge})


def check_allowed(job: Job, action: Action) -> None:
    allowed = allowed_from(action, service=job.is_service)
    if job.status not in allowed:
        raise InvalidTransitionError(action=action, status=job.status, allowed_from=sorted(allowed))


CANCEL_GRACE_S = 10.0
"""A cancelled job need not save anything."""
SAVE_GRACE_S = 30.0
"""For a pause or a preemption, or three times the last save, whichever is longer."""


def preempt(job: Job, *, now: float, message: str, grace_s: float | None = None) -> Change | None:
    """Preempt a job after a grace period in which it saves; the message says for what."""
    if job.attempt is None or job.attempt.stop is not None:
        return None
    draft = Draft(job, now)
    request_stop(draft, StopCause.PREEMPT, save=True)
    if grace_s is not None:
        draft.set_attempt(stop_grace_s=grace_s)
    draft.note("preempting", actor=Actor.SCHEDULER, reason=Reason.PREEMPTED, message=message)
    return draft.change()


def make_room(job: Job, *, now: float, victims: Sequence[str]) -> Change | None:
    """Record that others are preempted for a waiting job: what they give back is kept for it."""
    draft = Draft(job, now)
    draft.set(room_at=now if job.room_at is None else job.room_at)
    message = f"preempts {len(victims)} {'job' if len(victims) == 1 else 'jobs'} of lower priority"
    draft.note("making_room", actor=Actor.SCHEDULER, message=message, data={"count": len(victims)})
    return draft.change()


def request_stop(draft: Draft, cause: StopCause, *, save: bool) -> None:
    """Ask for the current attempt to be stopped. A later request replaces an earlier one."""
    job = draft.job
    draft.set_attempt(stop=cause, stop_save=save and job.can_save, stop_grace_s=grace_s(job, cause), stop_at=draft.now)


def grace_s(job: Job, cause: StopCause) -> float:
    """How long a job gets between being asked to stop and being killed."""
    own = (job.spec.get("workload") or {}).get("grace_period_s")
    if cause in (StopCause.CANCEL, StopCause.DELETE, StopCause.PEER):
        return min(CANCEL_GRACE_S, float(own)) if own is not None else CANCEL_GRACE_S
    return max(float(own) if own is not None else SAVE_GRACE_S, 3 * job.last_save_s)


def control_for(job: Job) -> Control | None:
    """The control message for the workers of the current attempt; None when there is none."""
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


# New jobs: from a request, or as the child of a job that ended.

_ALPHABET = string.digits + string.ascii_lowercase
# Seeded once from the system: an id must be unique, not secret, and asking the kernel for each one costs time.
_ids = random.Random(secrets.token_bytes(32))
os.register_at_fork(after_in_child=lambda: _ids.seed(secrets.token_bytes(32)))  # or both would make the same ids


def new_job_id() -> str:
    """Short enough to type, long enough (62 bits) to be unique."""
    return f"job-{''.join(_ids.choices(_ALPHABET, k=12))}"


def submit(
    compiled: CompiledJob,
    *,
    account_id: str,
    job_id: str,
    created_by: str,
    now: float,
    default_backend: str,
    parent: Job | None = None,
) -> Change:
    """The record of a new job, PENDING."""
    request, workload, launch = compiled.request, compiled.workload, compiled.launch
    checkpoint, scheduling = request.output_config.checkpoint, request.scheduling_config
    edge = TRANSITIONS[None, Trigger.SUBMIT]
    job = Job(
        account_id=account_id,
        job_id=job_id,
        handle=request.handle,
        name=request.name,
        labels=dict(request.labels),
        created_by=created_by,
        created_at=now,
        parent_job_id=parent.job_id if parent else None,
        root_job_id=parent.root_job_id if parent else job_id,
        spec_version=SPEC_VERSION,
        spec=dump(request),
        workload_kind=workload.kind,
        lifetime=launch.lifetime,
        backend=request.backend or default_backend,
        queue=scheduling.queue,
        priority=scheduling.priority,
        needs=needs_of(request),
        max_retries=scheduling.max_retries,
        preemptible=scheduling.preemptible,
        max_runtime_s=scheduling.max_runtime_seconds,
        inactivity_timeout_s=workload.effective_inactivity_s if isinstance(workload, Serving) else None,
        best_metric=checkpoint.metric_for_best_model,
        best_is_greater=checkpoint.best_is_greater,
        can_save=bool(launch.can_save),
        resume_checkpoint_id=request.resume_from_checkpoint,
        status=edge.to,
        event_count=1,
        updated_at=now,
        status_at=now,
    )
    message = f"created by a retry of {parent.job_id}" if parent else "the job was submitted"
    event = JobEvent(
        job_id=job_id, seq=1, at=now, type="status", actor=edge.actor, attempt=0, to_status=edge.to, message=message
    )
    return Change(job=job, events=(event,))


def needs_of(request: SubmitJobRequest) -> Needs:
    resources = request.resource_config
    return Needs(
        node_count=resources.node_count,
        gpus_per_node=resources.gpus_per_node,
        gpu_type=resources.gpu_type,
        gpu_memory_min_mb=resources.gpu_memory_min_mb or 0,
        cpu_cores=resources.cpu_cores or 0,
        ram_mb=resources.ram_min_mb or 0,
        storage_mb=resources.storage_min_mb or 0,
        capabilities=tuple(request.scheduling_config.required_capabilities),
        affinity=tuple(resources.node_affinity),
        anti_affinity=tuple(resources.node_anti_affinity),
    )


def check_retry(job: Job, *, modify_resources: bool, new_resource_config: Mapping[str, Any] | None) -> None:
    check_allowed(job, Action.RETRY)
    if modify_resources != (new_resource_config is not None):
        message = (
            "required when modify_resources is true" if modify_resources else "set modify_resources to true to use it"
        )
        raise SpecError([Problem(field="new_resource_config", message=message)])


def child_request(
    job: Job, *, new_resource_config: Mapping[str, Any] | None, handle: str | None = None
) -> SubmitJobRequest:
    """The request of a retry: the parent's, with other resources if they were given. The parent keeps its handle."""
    document = {**job.spec, "handle": handle}
    if new_resource_config is None:
        return load_stored(job.spec_version, document)
    resources = _resources(new_resource_config)
    document["resource_config"] = resources.model_dump(mode="json")
    document["training_config"] = _for_other_ranks(document.get("training_config"), resources)
    request = load_stored(job.spec_version, document)
    request.check_workload()
    return request


def in_queue(request: SubmitJobRequest, queue: str) -> SubmitJobRequest:
    scheduling = request.scheduling_config.model_copy(update={"queue": queue})
    return request.model_copy(update={"scheduling_config": scheduling})


def _for_other_ranks(training: Mapping[str, Any] | None, resources: ResourceConfig) -> Mapping[str, Any] | None:
    """A stored training_config in which the number of ranks follows from the GPUs, where those are others now."""
    if training is None or not resources.gpu_count:
        return training
    framework = training.get("framework") or {}
    distributed = framework.get("distributed") or {}
    if distributed.get("world_size") in (None, resources.gpu_count):
        return training
    return {**training, "framework": {**framework, "distributed": {**distributed, "world_size": None}}}


def _resources(document: Mapping[str, Any]) -> ResourceConfig:
    try:
        return parse(ResourceConfig, document)
    except SpecError as error:
        problems = [
            Problem(field=f"new_resource_config.{problem.field}", message=problem.message) for problem in error.problems
        ]
    raise SpecError(problems)

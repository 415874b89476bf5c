"""Jobs as JSON, in lists and whole, with their attempts, checkpoints and wait reasons."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainmaster.protocol.reasons import Reason
from trainmaster.schema import jobs as schema
from trainmaster.server.coordinator.explain import Waiting
from trainmaster.server.core.job import Attempt, CheckpointRecord, Job
from trainmaster.server.core.spec.documents import load_stored, redacted
from trainmaster.server.core.spec.submit import SubmitJobRequest
from trainmaster.server.core.states import CONSEQUENCES, Desired, Fault, JobStatus
from trainmaster.server.core.workloads import trainer
from trainmaster.server.http.envelope import clean, encoded, instant, number, numbers, reported_at, resource
from trainmaster.server.http.requests import PREFIX
from trainmaster.server.scheduling.explain import Explanation
from trainmaster.server.storage import ARTIFACTS, Location
from trainmaster.server.store.records import StoredDocument


def pending_resource(explanation: Explanation) -> schema.PendingResource:
    best = explanation.best_node
    return resource(
        schema.PendingResource,
        explanation,
        best_node=None if best is None else resource(schema.BestNodeResource, best, id=best.node_id),
        blockers=[
            resource(
                schema.BlockerResource,
                each,
                ends_in_seconds=None if each.ends_in_s is None else round(each.ends_in_s, 3),
            )
            for each in explanation.blockers[: schema.MOST_BLOCKERS]
        ],
        blocker_count=len(explanation.blockers),
        max_runtime_seconds=explanation.runtime_s,
    )


def checkpoint_resource(job: Job, checkpoint: CheckpointRecord) -> schema.CheckpointResource:
    return resource(
        schema.CheckpointResource,
        checkpoint,
        checkpoint_id=clean(checkpoint.checkpoint_id),
        epoch=number(checkpoint.epoch),
        metrics=numbers(dict(checkpoint.metrics)),
        is_best=checkpoint.checkpoint_id == job.best_checkpoint_id,
        is_latest=checkpoint.checkpoint_id == job.latest_checkpoint_id,
        name=clean(checkpoint.name),
        expires_at=reported_at(checkpoint.expires_at),
        uri=clean(Location(root=checkpoint.root, path=checkpoint.path).uri),
    )


def placement_of(attempt: Attempt) -> schema.PlacementResource:
    return {
        "backend": attempt.backend,
        "nodes": [share.node_id for share in attempt.shares],
        "gpus": [{"node_id": share.node_id, "index": gpu} for share in attempt.shares for gpu in share.gpus],
    }


def attempt_resource(attempt: Attempt, *, service: bool) -> schema.AttemptResource:
    return resource(
        schema.AttemptResource,
        attempt,
        placement=placement_of(attempt),
        stopping=attempt.stop,
        message=clean(attempt.message),
        error=_failure(attempt.reason, attempt.message, attempt.evidence, service=service),
    )


def failure_of(job: Job, attempts: Sequence[Attempt]) -> schema.FailureResource | None:
    if job.status is not JobStatus.FAILED:
        return None
    # A job that was refused before its first attempt has no evidence.
    ended = [attempt for attempt in attempts if attempt.reason is not None and attempt.reason == job.reason]
    return _failure(job.reason, job.message, ended[-1].evidence if ended else {}, service=job.is_service)


def _failure(
    reason: Reason | None, message: str | None, evidence: Mapping[str, Any], *, service: bool
) -> schema.FailureResource | None:
    if reason is None or CONSEQUENCES[reason].fault is Fault.NONE:
        return None
    found = evidence.get("evidence")
    inner = found if isinstance(found, Mapping) else {}
    lines = inner.get("last_lines")
    return {
        "error_type": reason,
        "error_message": clean(message or ""),
        "fault": CONSEQUENCES[reason].fault,
        "advice": CONSEQUENCES[reason].advice_for(service=service),
        "exit_code": _integer(evidence.get("exit_code")),
        "signal": _text(evidence.get("signal")),
        "rank": _integer(evidence.get("rank")),
        "step": _text(evidence.get("step")),
        "last_lines": [clean(str(line)) for line in lines] if isinstance(lines, list) else [],
        "frame": _text(inner.get("frame")),
    }


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return clean(value) if isinstance(value, str) else None


CONFIGS = ("training_config", "data_config", "resource_config", "output_config", "scheduling_config")
_REQUESTS_KEPT = 512
_LONGEST_KEPT = 64 << 10
"""Characters of a stored request whose JSON is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    job: Job
    attempts: Sequence[Attempt]
    checkpoints: Sequence[CheckpointRecord]
    waiting: Waiting
    used_at: float | None
    """When a service was last reached through the gateway."""
    has_output: bool
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A job as lists show it, as JSON. Only its run time changes by itself."""

    head: bytes
    """The members before the run time, without a brace."""
    tail: bytes
    """The members after it."""
    runtime_s: float
    """Of the attempts that ended, as `gpu_s`."""
    gpu_s: float
    running_since: float | None
    gpus: int

    def members(self, now: float) -> bytes:
        running_s = 0.0 if self.running_since is None else max(0.0, now - self.running_since)
        runtime_s, gpu_s = round(self.runtime_s + running_s, 3), round(self.gpu_s + running_s * self.gpus, 3)
        times = f',"runtime_seconds":{float(runtime_s)!r},"gpu_seconds":{float(gpu_s)!r},'
        return self.head + times.encode() + self.tail


def summary_of(job: Job) -> Summary:
    failed = job.status is JobStatus.FAILED
    attempt = job.attempt
    progress = job.progress
    own = f"{PREFIX}/jobs/{job.job_id}"
    head = resource(
        schema.JobHead,
        job,
        labels=dict(job.labels),
        kind=job.workload_kind,
        status_reason=job.reason,
        status_message=clean(job.message),
        error_type=job.reason if failed else None,
        error_message=clean(job.message) if failed else None,
        cancel_requested=job.desired is Desired.STOP,
        stalled=job.stalled_at is not None,
        attempt=job.attempt_count,
        node_count=job.needs.node_count,
        placement=placement_of(attempt) if attempt else None,
        progress={
            "step": progress.step,
            "total_steps": progress.total_steps,
            "epoch": number(progress.epoch),
            "percent": number(progress.percent),
            "eta_seconds": number(progress.remaining_s if attempt else progress.eta_s),
        },
        metrics=numbers(dict(progress.metrics)),
        endpoint={"address": job.endpoint, "path": f"{own}/proxy/"} if job.endpoint else None,
    )
    links = {"self": own, "logs": f"{own}/logs", "metrics": f"{own}/metrics", "events": f"{own}/events"}
    return Summary(
        head=encoded(head)[1:-1],
        tail=encoded({"version": job.version, "links": links})[1:-1],
        runtime_s=job.runtime_s,
        gpu_s=job.gpu_s,
        running_since=attempt.started_at if attempt else None,
        gpus=sum(len(share.gpus) for share in attempt.shares) if attempt else 0,
    )


def job_json(view: JobView, **more: str | None) -> bytes:
    """A job, whole, as JSON: a `JobResource`, with the members `more` at its end."""
    job, waiting = view.job, view.waiting
    request = _request(job)
    before = {
        "queue_position": waiting.queue_position,
        "pending_reason": waiting.explanation.message if waiting.explanation else None,
        "pending": pending_resource(waiting.explanation) if waiting.explanation else None,
        "estimated_wait_seconds": None if waiting.estimated_wait_s is None else round(waiting.estimated_wait_s, 3),
        "retries_used": job.retries_used,
        "preemptions_used": job.preemptions_used,
    }
    after = {
        "attempts": [attempt_resource(attempt, service=job.is_service) for attempt in view.attempts],
        "checkpoints": [checkpoint_resource(job, checkpoint) for checkpoint in view.checkpoints],
        "error": failure_of(job, view.attempts),
        "output": {"model_uri": _model_uri(job, request, has_output=view.has_output), "hub_url": None},
        "can_save": job.can_save,
        "stalled_at": instant(job.stalled_at),
        "last_activity_at": instant(max(filter(None, (view.used_at, job.last_activity_at)), default=None)),
        **more,
    }
    parts = (summary_of(job).members(view.now), encoded(before)[1:-1], request.members, encoded(after)[1:-1])
    return b"{" + b",".join(parts) + b"}"


def controlled_json(view: JobView) -> bytes:
    """A job after a command that has to do with a checkpoint, as JSON: a `ControlledJob`."""
    return job_json(view, checkpoint_id=view.job.resume_checkpoint_id or view.job.own_checkpoint_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    members: bytes
    result_uri: str | None
    """Where a trainer puts its result, if the request says so."""


def _request(job: Job) -> _Request:
    if isinstance(job.spec, StoredDocument) and len(job.spec.text) <= _LONGEST_KEPT:
        return _kept_request(job.spec_version, job.spec.text)
    return _shown(load_stored(job.spec_version, job.spec))


@functools.lru_cache(_REQUESTS_KEPT)
def _kept_request(version: int, text: str) -> _Request:
    """Cached: parsing a stored request takes longer than the rest of the answer."""
    return _shown(load_stored(version, StoredDocument(text)))


def _shown(request: SubmitJobRequest) -> _Request:
    shown = redacted(request)
    document = {name: shown[name] for name in ("workload", *CONFIGS)}
    data = request.data_config
    document["effective_batch_size"] = (
        None if data is None else data.batch_size * data.gradient_accumulation_steps * request.world_size
    )
    return _Request(members=encoded(document)[1:-1], result_uri=trainer.result_uri(request.output_config))


def _model_uri(job: Job, request: _Request, *, has_output: bool) -> Any:
    if job.status is not JobStatus.COMPLETED:
        return None
    is_training = job.workload_kind == trainer.KIND
    named = request.result_uri if is_training else None
    if named is None and has_output:
        below = f"/{trainer.RESULT}" if is_training else ""
        named = Location(root=ARTIFACTS, path=f"{job.job_id}/output{below}").uri
    return clean(named)

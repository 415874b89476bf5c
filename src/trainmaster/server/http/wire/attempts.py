"""Attempts of jobs: where they ran, and how they ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainmaster.protocol.reasons import Reason
from trainmaster.schema.jobs import AttemptResource, FailureResource, Placement
from trainmaster.server.core.job import Attempt, Job
from trainmaster.server.core.states import CONSEQUENCES, Fault, JobStatus
from trainmaster.server.http.envelope import clean, instant


def placement_of(attempt: Attempt) -> Placement:
    return {
        "backend": attempt.backend,
        "nodes": [share.node_id for share in attempt.shares],
        "gpus": [{"node_id": share.node_id, "index": gpu} for share in attempt.shares for gpu in share.gpus],
    }


def attempt_resource(attempt: Attempt, *, service: bool) -> AttemptResource:
    return {
        "number": attempt.number,
        "placement": placement_of(attempt),
        "resume_checkpoint_id": attempt.resume_checkpoint_id,
        "created_at": instant(attempt.created_at),
        "started_at": instant(attempt.started_at),
        "ended_at": instant(attempt.ended_at),
        "stopping": attempt.stop,
        "reason": attempt.reason,
        "message": clean(attempt.message),
        "error": _failure(attempt.reason, attempt.message, attempt.evidence, service=service),
    }


def failure_of(job: Job, attempts: Sequence[Attempt]) -> FailureResource | None:
    """Why a job failed; None unless it did."""
    if job.status is not JobStatus.FAILED:
        return None
    # A job that was refused before it ever ran has no attempt to tell of.
    ended = [attempt for attempt in attempts if attempt.reason is not None and attempt.reason == job.reason]
    return _failure(job.reason, job.message, ended[-1].evidence if ended else {}, service=job.is_service)


def _failure(
    reason: Reason | None, message: str | None, evidence: Mapping[str, Any], *, service: bool
) -> FailureResource | None:
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

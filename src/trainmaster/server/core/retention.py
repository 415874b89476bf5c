"""What of a job may be removed, and when. Pure. Nothing that somebody may still need goes: a pinned checkpoint, one
that an unfinished job resumes from, the last good one of such a job."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from trainmaster.server.core.errors import ConflictError
from trainmaster.server.core.job import Change, CheckpointRecord, Job
from trainmaster.server.core.state_machine import Draft
from trainmaster.server.core.states import TERMINAL, Actor

COMMITTED = "COMMITTED"
DELETING = "DELETING"
"""Of a checkpoint that nobody sees any more, and whose files are about to go."""
_PRUNED_SINCE = 3
"""The version of job specs from which on `save_total_limit` has an effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """How long things are kept, in seconds; 0 means for ever."""

    runs_s: float = 0.0
    checkpoints_s: float = 0.0
    deleted_s: float = 0.0
    caches_s: float = 0.0
    sessions_s: float = 0.0
    blobs_s: float = 24 * 3600.0
    """The exception: a shipped file that no job names goes at once when this is 0."""


def pin(job: Job, checkpoint: CheckpointRecord, *, pinned: bool, now: float) -> Change | None:
    """Keep a checkpoint whatever the limits say, or do so no more; None when it is so already."""
    if pinned and job.deleted_at is not None:
        raise ConflictError(f"job {job.job_id} was deleted; pins do not keep what it left")
    word = "pinned" if pinned else "unpinned"
    return None if checkpoint.pinned == pinned else _noted(job, checkpoint, word, f"was {word}", now)


def expire_at(job: Job, checkpoint: CheckpointRecord, at: float | None, *, now: float) -> Change | None:
    """Have a checkpoint go by itself at a time, or never; None when it is so already."""
    if checkpoint.expires_at == at:
        return None
    said = "no longer expires" if at is None else f"expires in {max(0.0, at - now):.0f} s"
    return _noted(job, checkpoint, "expiry", said, now, expires_at=at)


def publish(job: Job, checkpoint: CheckpointRecord, *, public: bool, now: float) -> Change | None:
    """Let others load a checkpoint, or no more; None when it is so already."""
    word = "published" if public else "unpublished"
    return None if checkpoint.public == public else _noted(job, checkpoint, word, f"was {word}", now)


def _noted(job: Job, checkpoint: CheckpointRecord, kind: str, said: str, now: float, **data: Any) -> Change | None:
    draft = Draft(job, now)
    name = checkpoint.checkpoint_id
    message = f"checkpoint {name} {said}"
    draft.note(f"checkpoint_{kind}", actor=Actor.API, message=message, data={"checkpoint_id": name, **data})
    return draft.change()


def delete_checkpoint(
    job: Job, checkpoint: CheckpointRecord, *, others: Sequence[CheckpointRecord], users: Collection[str], now: float
) -> Change | None:
    """Remove a checkpoint on request, unless it is pinned or needed; `latest` and `best` move to what is left. `others`
    are the job's other checkpoints, oldest first; `users` are unfinished jobs that resume from this one."""
    name = checkpoint.checkpoint_id
    if checkpoint.pinned:
        raise ConflictError(f"checkpoint {name} is pinned; unpin it first")
    if users:
        raise ConflictError(f"job {min(users)} needs checkpoint {name} to resume; delete it when that job has ended")
    if job.status not in TERMINAL and not others and not checkpoint.kind:
        raise ConflictError(f"checkpoint {name} is the last one of a job that has not ended; without it all is lost")
    return _without(job, [checkpoint], others, actor=Actor.API, now=now)


def prune(job: Job, doomed: Sequence[CheckpointRecord], *, now: float) -> Change | None:
    """Remove checkpoints beyond the job's limit; neither the latest nor the best is among them."""
    why = f": save_total_limit is {checkpoint_limit(job)}"
    return _without(job, doomed, (), actor=Actor.COORDINATOR, now=now, why=why)


def best_checkpoint(job: Job, checkpoints: Sequence[CheckpointRecord]) -> CheckpointRecord | None:
    """The best of some checkpoints by the metric that a job names; None when it names none, or none has it."""
    measured = [c for c in checkpoints if job.best_metric is not None and job.best_metric in c.metrics]
    # Of equals the first, as when they were registered one after the other.
    sign = -1.0 if job.best_is_greater else 1.0
    return min(measured, key=lambda checkpoint: sign * checkpoint.metrics[job.best_metric or ""], default=None)


def expired_checkpoints(
    job: Job, checkpoints: Sequence[CheckpointRecord], *, in_use: Collection[str], keep: RetentionPolicy, now: float
) -> list[CheckpointRecord]:
    if not keep.checkpoints_s or not ended_before(job, now - keep.checkpoints_s):
        return []
    kept = set(in_use)
    if job.deleted_at is None:
        kept |= {c.checkpoint_id for c in checkpoints if c.pinned}
        kept |= {pointer for pointer in (job.latest_checkpoint_id, job.best_checkpoint_id) if pointer}
    return [checkpoint for checkpoint in checkpoints if checkpoint.checkpoint_id not in kept]


def overdue_checkpoints(
    checkpoints: Sequence[CheckpointRecord], *, in_use: Collection[str], now: float
) -> list[CheckpointRecord]:
    """Checkpoints whose expiry has passed and that nobody uses."""
    return [
        checkpoint
        for checkpoint in checkpoints
        if checkpoint.expires_at is not None
        and checkpoint.expires_at < now
        and not checkpoint.pinned
        and checkpoint.checkpoint_id not in in_use
    ]


def without(checkpoints: Iterable[CheckpointRecord], gone: Iterable[CheckpointRecord]) -> list[CheckpointRecord]:
    """Compares by id: a job may have tens of thousands."""
    names = {checkpoint.checkpoint_id for checkpoint in gone}
    return [checkpoint for checkpoint in checkpoints if checkpoint.checkpoint_id not in names]


def expire_checkpoints(
    job: Job, doomed: Sequence[CheckpointRecord], *, others: Sequence[CheckpointRecord], now: float
) -> Change | None:
    return _without(job, doomed, others, actor=Actor.COORDINATOR, now=now)


def expire_runs(job: Job, *, now: float) -> Change | None:
    draft = Draft(job, now)
    message = "its run directories were removed, with logs and metrics"
    draft.note("runs_removed", actor=Actor.COORDINATOR, message=message)
    return draft.change()


def runs_expired(job: Job, keep: RetentionPolicy, *, now: float) -> bool:
    return bool(keep.runs_s) and ended_before(job, now - keep.runs_s)


def deletion_expired(job: Job, keep: RetentionPolicy, *, now: float) -> bool:
    return bool(keep.deleted_s) and job.deleted_at is not None and job.deleted_at < now - keep.deleted_s


def ended_before(job: Job, moment: float) -> bool:
    return job.status in TERMINAL and job.attempt is None and (job.finished_at or job.updated_at) < moment


def owns_files(
    checkpoint: CheckpointRecord, others: Sequence[CheckpointRecord], *, root: str, homes: Sequence[str] = ()
) -> bool:
    """Whether a checkpoint's files go with it: they lie in its job's own directory, and are no part of another's. Code
    inside the job may say anything about where they lie; what is outside of `root` is not ours. `homes` are the
    directories of that root in which the job saves, by default the one with the job's id."""
    path = PurePosixPath(checkpoint.path)
    if checkpoint.root != root or not any(PurePosixPath(home) in path.parents for home in homes or [checkpoint.job_id]):
        return False
    theirs = [PurePosixPath(other.path) for other in others if other.root == root]
    return not any(other == path or path in other.parents or other in path.parents for other in theirs)


def _without(
    job: Job,
    gone: Sequence[CheckpointRecord],
    left: Sequence[CheckpointRecord],
    *,
    actor: Actor,
    now: float,
    why: str = "",
) -> Change | None:
    names = {checkpoint.checkpoint_id for checkpoint in gone}
    draft = Draft(job, now)
    if job.latest_checkpoint_id in names:
        draft.set(latest_checkpoint_id=left[-1].checkpoint_id if left else None)
    if job.best_checkpoint_id in names:
        best = best_checkpoint(job, left)
        value = best.metrics[job.best_metric] if best and job.best_metric else None
        draft.set(best_checkpoint_id=best.checkpoint_id if best else None, best_metric_value=value)
    if job.resume_checkpoint_id in names:
        draft.set(resume_checkpoint_id=None)
    for checkpoint in gone:
        draft.note(
            "checkpoint_deleted",
            actor=actor,
            message=f"checkpoint {checkpoint.checkpoint_id} at step {checkpoint.step} was deleted{why}",
            data={
                "checkpoint_id": checkpoint.checkpoint_id,
                "latest_checkpoint_id": draft.job.latest_checkpoint_id,
                "best_checkpoint_id": draft.job.best_checkpoint_id,
            },
        )
    return draft.change()


def checkpoint_limit(job: Job) -> int | None:
    """How many checkpoints a job keeps; None: all."""
    # A service saves what its users ask it to. Jobs that were stored before had the field without an effect.
    if job.is_service or job.spec_version < _PRUNED_SINCE:
        return None
    limit = job.checkpoint_config.get("save_total_limit")
    return limit if isinstance(limit, int) and limit >= 1 else None

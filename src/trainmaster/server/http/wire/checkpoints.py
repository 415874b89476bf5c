"""Checkpoints of jobs."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from pydantic import Field

from trainmaster.server.core.job import Checkpoint, Job
from trainmaster.server.http.envelope import Wire, clean, instant, number, numbers, reported_at
from trainmaster.server.storage import Location


class CheckpointResource(Wire):
    """A checkpoint that was committed."""

    checkpoint_id: str
    step: int
    epoch: float | None
    attempt: int
    created_at: datetime
    metrics: dict[str, float | None]
    is_best: bool
    is_latest: bool
    pinned: bool = Field(description="Kept until it is unpinned.")
    kind: str = Field(description="`training` or `sampler` of what a trainer service was asked to save; else empty.")
    name: str = Field(description="What it was saved as, there.")
    expires_at: datetime | None = Field(description="When it goes by itself; null: never.")
    size_bytes: int
    uri: str = Field(description="The root that holds it, and the path there.")
    status: str


class JobCheckpoints(Wire):
    """What a job has saved, and what is there of it."""

    job_id: str
    deleted_at: datetime | None = Field(description="When the job was deleted; null: it was not.")
    checkpoints: list[CheckpointResource] = Field(description="One page of them, the oldest first.")
    next_page_token: str | None
    total_count: int = Field(description="Over all pages; 10001 means more than 10000.")
    latest_checkpoint_id: str | None
    best_checkpoint_id: str | None


def checkpoint_document(job: Job, checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint of a job as it is shown: a `CheckpointResource`."""
    return {
        "checkpoint_id": clean(checkpoint.checkpoint_id),
        "step": checkpoint.step,
        "epoch": number(checkpoint.epoch),
        "attempt": checkpoint.attempt,
        "created_at": instant(checkpoint.created_at),
        "metrics": numbers(dict(checkpoint.metrics)),
        "is_best": checkpoint.checkpoint_id == job.best_checkpoint_id,
        "is_latest": checkpoint.checkpoint_id == job.latest_checkpoint_id,
        "pinned": checkpoint.pinned,
        "kind": checkpoint.kind,
        "name": clean(checkpoint.name),
        "expires_at": reported_at(checkpoint.expires_at),
        "size_bytes": checkpoint.size_bytes,
        "uri": clean(Location(root=checkpoint.root, path=checkpoint.path).uri),
        "status": checkpoint.status,
    }


def checkpoint_resources(job: Job, checkpoints: Iterable[Checkpoint]) -> list[CheckpointResource]:
    """A job's checkpoints as they are shown."""
    return [CheckpointResource(**checkpoint_document(job, checkpoint)) for checkpoint in checkpoints]

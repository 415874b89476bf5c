"""Checkpoints of jobs."""

from __future__ import annotations

from trainmaster.schema.jobs import CheckpointResource
from trainmaster.server.core.job import Checkpoint, Job
from trainmaster.server.http.envelope import clean, instant, number, numbers, reported_at
from trainmaster.server.storage import Location


def checkpoint_resource(job: Job, checkpoint: Checkpoint) -> CheckpointResource:
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

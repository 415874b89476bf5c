"""Machines, what jobs left on them, and what was used."""

from __future__ import annotations

from typing import Literal, TypedDict

from trainmaster.client.types.jobs import Checkpoint, Status


class Gpu(TypedDict):
    """An accelerator of a node; `job_id` is the job of yours that holds it."""

    index: int
    type: str
    memory_mb: int
    healthy: bool
    problem: str | None
    free: bool
    job_id: str | None


class Amount(TypedDict):
    """How much there is of something, and how much of it is free."""

    total: int
    free: int


class Node(TypedDict):
    """A machine and what is free on it."""

    id: str
    hostname: str
    backend: str
    state: str
    drain_reason: str | None
    drain_force: bool
    labels: list[str]
    capabilities: list[str]
    given_labels: list[str]
    given_capabilities: list[str]
    gpus: list[Gpu]
    cpu_cores: Amount
    ram_mb: Amount
    storage_mb: Amount
    slots: Amount
    jobs: list[str]
    last_heartbeat: str


class JobCheckpoints(TypedDict):
    """What a job has saved, and what is there of it."""

    job_id: str
    deleted_at: str | None
    checkpoints: list[Checkpoint]
    next_page_token: str | None
    total_count: int
    latest_checkpoint_id: str | None
    best_checkpoint_id: str | None


class Tombstone(TypedDict):
    """A deleted job whose files are still there."""

    job_id: str
    handle: str | None
    name: str
    kind: str
    status: Status
    deleted_at: str
    size_bytes: int


class Artifact(TypedDict):
    """A file that a job left."""

    path: str
    kind: Literal["output", "checkpoint"]
    checkpoint_id: str | None
    size_bytes: int
    modified_at: str
    etag: str
    sha256: str | None


class UsageRow(TypedDict):
    """What a group of attempts used."""

    key: str
    jobs: int
    attempts: int
    gpu_seconds: float
    cpu_seconds: float
    wall_seconds: float


Interval = TypedDict("Interval", {"from": str | None, "to": str})


class Usage(Interval):
    """What was used in an interval."""

    group_by: str
    rows: list[UsageRow]
    total: UsageRow
    truncated: bool


class CollectedKind(TypedDict):
    """Things of one kind that were collected, or would be."""

    what: str
    count: int
    size_bytes: int
    names: list[str]
    removed: bool


class Collection(TypedDict):
    """What was collected, or would be."""

    dry_run: bool
    kinds: list[CollectedKind]

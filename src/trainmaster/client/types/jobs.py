"""Jobs: as they are submitted, listed and shown, and the request of a shown job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

Status = Literal[
    "PENDING",
    "QUEUED",
    "SCHEDULING",
    "PREPARING",
    "TRAINING",
    "CHECKPOINTING",
    "EVALUATING",
    "EXPORTING",
    "PAUSED",
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "PREEMPTED",
]
TERMINAL: frozenset[Status] = frozenset({"COMPLETED", "FAILED", "CANCELLED", "PREEMPTED"})
"""A job that is not a service never leaves these."""


class Submitted(TypedDict):
    """The answer to a submission."""

    job_id: str
    handle: str | None
    name: str
    status: Status
    message: str
    estimated_wait_seconds: float | None
    checkpoint_id: str | None


class CheckedJob(TypedDict):
    """A job that would be accepted."""

    missing_blobs: list[str]
    """Digests of files that have to be uploaded before it is submitted."""


class GpuUse(TypedDict):
    """One GPU that a job holds."""

    node_id: str
    index: int


class Placement(TypedDict):
    """Where an attempt runs."""

    backend: str
    nodes: list[str]
    gpus: list[GpuUse]


class Progress(TypedDict):
    """How far a job is, as far as it says."""

    step: int | None
    total_steps: int | None
    epoch: float | None
    percent: float | None
    eta_seconds: float | None


class Checkpoint(TypedDict):
    """A committed checkpoint."""

    checkpoint_id: str
    step: int
    epoch: float | None
    attempt: int
    created_at: str
    metrics: dict[str, float | None]
    is_best: bool
    is_latest: bool
    pinned: bool
    kind: str
    name: str
    expires_at: str | None
    size_bytes: int
    uri: str
    status: str


class Failure(TypedDict):
    """Why something ended badly, whose turn it is, and what to do."""

    error_type: str
    error_message: str
    fault: str
    advice: str
    exit_code: int | None
    signal: str | None
    rank: int | None
    step: str | None
    last_lines: list[str]
    frame: str | None


class Attempt(TypedDict):
    """One try at running a job."""

    number: int
    placement: Placement
    resume_checkpoint_id: str | None
    created_at: str
    started_at: str | None
    ended_at: str | None
    stopping: str | None
    reason: str | None
    message: str | None
    error: Failure | None


class Endpoint(TypedDict):
    """Where a service answers: at its own address, and below a path of the server."""

    address: str
    path: str


class JobSummary(TypedDict):
    """A job, as lists show it. The keys that most programs want; the server sends all that its API documents."""

    job_id: str
    handle: str | None
    name: str
    labels: dict[str, str]
    kind: str
    parent_job_id: str | None
    created_at: str
    status: Status
    status_reason: str | None
    status_message: str | None
    desired: str
    cancel_requested: bool
    stalled: bool
    backend: str
    queue: str
    priority: int
    attempt: int
    max_retries: int
    node_count: int
    placement: Placement | None
    progress: Progress
    metrics: dict[str, float | None]
    latest_checkpoint_id: str | None
    best_checkpoint_id: str | None
    endpoint: Endpoint | None
    queued_at: str | None
    started_at: str | None
    finished_at: str | None
    paused_at: str | None
    runtime_seconds: float
    gpu_seconds: float
    version: int


class BestNode(TypedDict):
    """The node that lacks the least of what a job needs."""

    id: str
    gpus_free: int
    cpu_cores_free: int
    ram_mb_free: int
    storage_mb_free: int
    slots_free: int


class Blocker(TypedDict):
    """A job that is in the way: it holds what is needed, or waits and comes first."""

    job_id: str | None
    queued: bool
    gpus: int
    ends_in_seconds: float | None


class Pending(TypedDict):
    """Why a job waits, and what would let it run."""

    code: str
    message: str
    needs: str
    best_node: BestNode | None
    blockers: list[Blocker]
    blocker_count: int
    would_start_if: str
    max_runtime_seconds: int | None


class Output(TypedDict):
    """What a job leaves behind; null before it has ended well."""

    model_uri: str | None
    hub_url: str | None


class Job(JobSummary):
    """A job, whole."""

    queue_position: int | None
    pending_reason: str | None
    pending: Pending | None
    estimated_wait_seconds: float | None
    retries_used: int
    workload: dict[str, Any] | None
    training_config: dict[str, Any] | None
    data_config: dict[str, Any] | None
    resource_config: dict[str, Any]
    output_config: dict[str, Any]
    scheduling_config: dict[str, Any]
    attempts: list[Attempt]
    checkpoints: list[Checkpoint]
    error: Failure | None
    output: Output
    can_save: bool


class ControlledJob(Job):
    """A job after a pause, a resume or a retry."""

    checkpoint_id: str | None


REQUEST_FIELDS = (
    "name",
    "labels",
    "workload",
    "backend",
    "training_config",
    "data_config",
    "resource_config",
    "output_config",
    "scheduling_config",
)
"""What a request has and a job shows. A handle stays with its job, as it is unique."""
RESERVED_LABEL, RESERVED_PREFIX = "type", "system/"
"""Labels that the server sets."""
SHARED_FIELDS = ("priority", "max_retries")
"""A job shows them in training_config and in scheduling_config; one place is enough, and easier to change."""


def is_job(document: Mapping[str, Any]) -> bool:
    """Whether a document is a job that a server has shown, and not a job file."""
    return isinstance(document.get("job_id"), str) and "status" in document


def request_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """The request of a job, in which `***` stands for the values of secrets."""
    request = {field: job[field] for field in REQUEST_FIELDS if job.get(field) is not None}
    request["labels"] = {
        key: value
        for key, value in request.get("labels", {}).items()
        if key != RESERVED_LABEL and not key.startswith(RESERVED_PREFIX)
    }
    if (training := request.get("training_config")) is not None:
        request["training_config"] = {key: value for key, value in training.items() if key not in SHARED_FIELDS}
    return request

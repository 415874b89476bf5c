"""What the server answers with, as it comes over the wire.

Plain dictionaries with known keys: a newer server may send more, and nothing is lost on the way to a user's JSON.
Timestamps are ISO 8601 in UTC.
"""

from __future__ import annotations

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


class LogLine(TypedDict):
    """One line that a job wrote."""

    ts: str | None
    attempt: int
    node: int
    rank: int
    step: str
    stream: Literal["stdout", "stderr"]
    message: str


class LogPage(TypedDict):
    """Lines, and where to go on. `complete`: there will be no more. `notice`: why there are none, where there were."""

    lines: list[LogLine]
    next_cursor: str
    complete: bool
    notice: str | None


Transition = TypedDict("Transition", {"from": Status | None, "to": Status | None})


class Event(Transition):
    """One thing that happened to a job; `from` and `to` when its status changed."""

    job_id: str
    seq: int
    ts: str
    type: str
    actor: str
    reason: str | None
    attempt: int
    message: str
    data: dict[str, Any]


class EventPage(TypedDict):
    """Events, and where to go on."""

    events: list[Event]
    next_cursor: int


class Series(TypedDict):
    """A metric over time: points of step, time and value."""

    name: str
    points: list[tuple[int | None, str | None, float | None]]


class Metrics(TypedDict):
    """A job's metrics."""

    job_id: str
    status: Status
    step: int | None
    epoch: float | None
    latest: dict[str, float | None]
    series: list[Series]
    checkpoints: list[Checkpoint]
    best_checkpoint_id: str | None
    notice: str | None


class MetricsReport(TypedDict):
    """What a job reported at one moment."""

    ts: str | None
    attempt: int
    step: int | None
    total_steps: int | None
    epoch: float | None
    percent: float | None
    eta_seconds: float | None
    values: dict[str, float | None]


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

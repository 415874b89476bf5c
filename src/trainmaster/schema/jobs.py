"""Jobs: as they are submitted, listed and shown, with their attempts and checkpoints."""

from __future__ import annotations

from typing import Annotated, Any

from typing_extensions import TypedDict

from trainmaster.schema import Doc, OneOf, Timestamp
from trainmaster.server.core import states

Status = Annotated[str, OneOf(states.JobStatus)]
STATUSES: tuple[str, ...] = tuple(states.JobStatus)
TERMINAL: frozenset[str] = states.TERMINAL
"""A job that is not a service never leaves these statuses."""
MOST_BLOCKERS = 20


class SubmittedJob(TypedDict):
    """A job that was accepted."""

    job_id: str
    handle: str | None
    name: str
    status: str
    message: str
    estimated_wait_seconds: float | None
    checkpoint_id: Annotated[str | None, Doc("The checkpoint that the job starts from.")]


class CheckedJob(TypedDict):
    """A job that would be accepted."""

    rendered: Annotated[
        str | None, Doc("With `render=true`: what its backend would send to its engine, without secrets.")
    ]
    missing_blobs: Annotated[list[str], Doc("Digests of the files in `workload.files` that are not uploaded yet.")]


class GpuUse(TypedDict):
    """One GPU that an attempt holds."""

    node_id: str
    index: int


class PlacementResource(TypedDict):
    """Where an attempt runs. Several nodes of a gang may be the same machine."""

    backend: str
    nodes: Annotated[list[str], Doc("In the order of node ranks.")]
    gpus: list[GpuUse]


class ProgressResource(TypedDict):
    """A job's progress, as far as the job reports it."""

    step: int | None
    total_steps: int | None
    epoch: float | None
    percent: float | None
    eta_seconds: float | None


class CheckpointResource(TypedDict):
    """A committed checkpoint."""

    checkpoint_id: str
    step: int
    epoch: float | None
    attempt: int
    created_at: Timestamp
    metrics: dict[str, float | None]
    is_best: bool
    is_latest: bool
    pinned: Annotated[bool, Doc("Kept until it is unpinned.")]
    kind: Annotated[str, Doc("Of a save that a trainer service was asked for: `training` or `sampler`; else empty.")]
    name: Annotated[str, Doc("Of a save that a trainer service was asked for: its name; else empty.")]
    expires_at: Annotated[Timestamp | None, Doc("When it is removed; null: never.")]
    size_bytes: int
    uri: Annotated[str, Doc("The storage root that holds it, and the path there.")]
    status: str


class JobCheckpoints(TypedDict):
    """The committed checkpoints of a job that still exist."""

    job_id: str
    deleted_at: Annotated[Timestamp | None, Doc("When the job was deleted; null: it was not.")]
    checkpoints: Annotated[list[CheckpointResource], Doc("One page, the oldest first.")]
    next_page_token: str | None
    total_count: Annotated[int, Doc("Over all pages; 10001 means more than 10000.")]
    latest_checkpoint_id: str | None
    best_checkpoint_id: str | None


class FailureResource(TypedDict):
    """Why a job or an attempt failed, whose fault it was, and what to do."""

    error_type: str
    error_message: str
    fault: str
    advice: str
    exit_code: int | None
    signal: str | None
    rank: int | None
    step: Annotated[str | None, Doc("The step of the workload that failed.")]
    last_lines: Annotated[list[str], Doc("The last lines that the failing rank wrote.")]
    frame: Annotated[str | None, Doc("The last frame of its traceback.")]


class AttemptResource(TypedDict):
    """One attempt to run a job."""

    number: int
    placement: PlacementResource
    resume_checkpoint_id: Annotated[str | None, Doc("The checkpoint that the attempt started from.")]
    created_at: Timestamp
    started_at: Timestamp | None
    ended_at: Timestamp | None
    stopping: Annotated[str | None, Doc("Why the attempt is being stopped, or was.")]
    reason: Annotated[str | None, Doc("Why the attempt ended.")]
    message: str | None
    error: FailureResource | None


class Endpoint(TypedDict):
    """Where a service answers."""

    address: Annotated[str, Doc("host:port of the machine that the service runs on.")]
    path: Annotated[str, Doc("The path of this server that leads to the service.")]


class Links(TypedDict):
    """Paths of a job's other routes."""

    self: str
    logs: str
    metrics: str
    events: str


class Output(TypedDict):
    """The result of a job."""

    model_uri: Annotated[
        str | None,
        Doc("The model that the job trained, or its output directory; null until it has COMPLETED, or without output."),
    ]
    hub_url: str | None


class JobHead(TypedDict):
    """The part of a summary that changes only with the job."""

    job_id: str
    handle: str | None
    name: str
    labels: dict[str, str]
    kind: Annotated[str, Doc("The kind of its workload.")]
    parent_job_id: Annotated[str | None, Doc("The job that this one is a retry of.")]
    root_job_id: str
    created_at: Timestamp
    created_by: str
    status: Status
    status_reason: str | None
    status_message: str | None
    error_type: str | None
    error_message: str | None
    desired: Annotated[str, OneOf(states.Desired), Doc("What was last requested.")]
    cancel_requested: bool
    stalled: Annotated[bool, Doc("The job has not made a step for too long.")]
    backend: str
    queue: str
    priority: int
    attempt: Annotated[int, Doc("The number of the latest attempt; 0 before the first.")]
    max_retries: int
    node_count: Annotated[int, Doc("Nodes of the gang.")]
    placement: Annotated[PlacementResource | None, Doc("The resources that the job holds now.")]
    progress: ProgressResource
    metrics: Annotated[dict[str, float | None], Doc("The last value of each metric.")]
    latest_checkpoint_id: str | None
    best_checkpoint_id: str | None
    endpoint: Annotated[Endpoint | None, Doc("Of a service that is ready.")]
    queued_at: Timestamp | None
    started_at: Timestamp | None
    finished_at: Timestamp | None
    paused_at: Timestamp | None
    updated_at: Timestamp


class JobSummary(JobHead):
    """A job, as lists show it."""

    runtime_seconds: Annotated[float, Doc("Over all attempts, including the current one.")]
    gpu_seconds: float
    version: Annotated[int, Doc("Rises with every change.")]
    links: Links


class BestNodeResource(TypedDict):
    """The node that lacks the least of what a job needs."""

    id: str
    gpus_free: Annotated[int, Doc("Free GPUs that meet the job's requirements.")]
    cpu_cores_free: int
    ram_mb_free: int
    storage_mb_free: int
    slots_free: int


class BlockerResource(TypedDict):
    """A job that is in the way."""

    job_id: Annotated[str | None, Doc("Null: another account's.")]
    queued: Annotated[bool, Doc("True: it waits, too, and comes first; false: it holds what the job needs.")]
    gpus: Annotated[int, Doc("GPUs that it holds, or asks for.")]
    ends_in_seconds: Annotated[float | None, Doc("An estimate; null: unknown; 0: it should have ended by now.")]


class PendingResource(TypedDict):
    """Why a job waits, and what would let it run."""

    code: Annotated[str, OneOf(states.PendingCode)]
    message: Annotated[str, Doc("Continues the sentence: the job ...")]
    needs: str
    best_node: BestNodeResource | None
    blockers: Annotated[
        list[BlockerResource], Doc(f"When all of these are gone, the job starts; the first {MOST_BLOCKERS}.")
    ]
    blocker_count: Annotated[int, Doc("How many blockers there are.")]
    would_start_if: Annotated[str, Doc("Continues the sentence: the job would start if ...")]
    max_runtime_seconds: Annotated[int | None, Doc("With a time limit no longer than this the job would start now.")]


class JobResource(JobSummary):
    """A job, whole."""

    queue_position: Annotated[int | None, Doc("1 is next; null when the job is not queued.")]
    pending_reason: Annotated[str | None, Doc("Why the job waits.")]
    pending: Annotated[PendingResource | None, Doc("Why the job waits, in parts, and what would let it run.")]
    estimated_wait_seconds: Annotated[float | None, Doc("If no job is submitted meanwhile; null: unknown.")]
    retries_used: int
    preemptions_used: int
    workload: dict[str, Any] | None
    training_config: dict[str, Any] | None
    data_config: dict[str, Any] | None
    resource_config: dict[str, Any]
    output_config: dict[str, Any]
    scheduling_config: dict[str, Any]
    effective_batch_size: Annotated[int | None, Doc("Batch size × accumulation steps × ranks.")]
    attempts: list[AttemptResource]
    checkpoints: list[CheckpointResource]
    error: Annotated[FailureResource | None, Doc("Why the job failed, and what to do.")]
    output: Output
    can_save: Annotated[bool, Doc("The job saves when asked, as it has shown or declared, so it can be paused.")]
    stalled_at: Timestamp | None
    last_activity_at: Annotated[Timestamp | None, Doc("When a service was last used.")]


class ControlledJob(JobResource):
    """A job after a pause, a resume or a retry."""

    checkpoint_id: Annotated[str | None, Doc("The checkpoint that it starts from; null: from the beginning.")]


class JobList(TypedDict):
    """One page of jobs."""

    jobs: list[JobSummary]
    next_page_token: Annotated[str | None, Doc("Send it as `page_token`; null on the last page.")]
    total_count: Annotated[int, Doc("Over all pages; 10001 means more than 10000.")]


class TombstoneResource(TypedDict):
    """A deleted job whose files still exist."""

    job_id: str
    handle: Annotated[str | None, Doc("Another job may have it by now.")]
    name: str
    kind: Annotated[str, Doc("The kind of its workload.")]
    status: Annotated[Status, Doc("How it ended.")]
    deleted_at: Timestamp
    size_bytes: Annotated[int, Doc("The disk space that its files take.")]


class TombstonePage(TypedDict):
    """One page of deleted jobs."""

    tombstones: list[TombstoneResource]
    next_page_token: Annotated[str | None, Doc("Send it as `page_token`; null on the last page.")]

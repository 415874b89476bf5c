"""What the server reports about jobs (logs, events, metrics, files, usage) and about nodes."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from trainmaster.client.types.jobs import Checkpoint, Status


class LogLine(TypedDict):
    """One line that a job wrote."""

    ts: str | None
    attempt: int
    node: int
    rank: int
    step: str
    stream: Literal["stdout", "stderr"]
    message: str
    open: NotRequired[bool]
    """True of the newest state of a line that is still being overwritten, such as a progress bar."""


class LogPage(TypedDict):
    """Lines, and where to go on. `complete`: there will be no more. `notice`: why there are none, where there were."""

    lines: list[LogLine]
    open_lines: list[LogLine]
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

"""The job record: one for every door, one lifecycle. Frozen; `evolve` gives a changed copy."""

from __future__ import annotations

import dataclasses
import functools
import hmac
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from trainmaster.protocol.launch import Lifetime
from trainmaster.protocol.reasons import Reason, StopCause
from trainmaster.server.core.resources import Needs, Share, host_backend
from trainmaster.server.core.states import Actor, Desired, JobStatus

PREEMPTION_BUDGET = 100
"""How often a job may be queued again after a preemption; apart from `max_retries`."""
AGEING_S_PER_PRIORITY = 1800.0
"""One step of priority is worth this much waiting."""


def _values(record: Job | Attempt) -> dict[str, Any]:
    """The fields of a record; `dataclasses.replace` looks at them one by one, which takes twice as long."""
    names, values_of = _fields_of(type(record))  # type: ignore[arg-type]  # all classes are hashable
    return dict(zip(names, values_of(record), strict=True))


@functools.cache
def _fields_of(kind: type[Job | Attempt]) -> tuple[tuple[str, ...], operator.attrgetter[Any]]:
    names = tuple(field.name for field in dataclasses.fields(kind))
    return names, operator.attrgetter(*names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at running a job."""

    number: int
    token: str
    """Held by this attempt's workers alone; see `trainmaster.protocol.request`."""
    backend: str
    shares: tuple[Share, ...]
    """One for each node of the gang, in the order of node ranks."""
    created_at: float
    resume_checkpoint_id: str | None = None
    handle: str | None = None
    """What the backend's engine calls it, where the engine has names of its own."""
    claimed: frozenset[int] = frozenset()
    """Nodes whose worker has claimed the attempt."""
    started: frozenset[int] = frozenset()
    """Nodes whose ranks run (and, for a service, answer)."""
    exits: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    offsets: Mapping[str, int] = field(default_factory=dict)
    """How far each stream was taken in; committed together with what it said."""
    stop: StopCause | None = None
    """Set when this attempt is to be stopped; never taken back."""
    stop_save: bool = False
    stop_grace_s: float = 30.0
    stop_at: float | None = None
    stack_dump: bool = False
    started_at: float | None = None
    ended_at: float | None = None
    reason: Reason | None = None
    message: str | None = None
    """How it ended; while it runs, why it was cancelled."""
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rank_token(self) -> str:
        """What the attempt's ranks hold. It follows from the token, and the token does not follow from it."""
        return hmac.digest(self.token.encode(), b"rank", "sha256").hex()

    def evolve(self, **changes: Any) -> Self:
        return type(self)(**{**_values(self), **changes})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    """How far a job is, by the last report of its rank 0."""

    step: int | None = None
    total_steps: int | None = None
    epoch: float | None = None
    percent: float | None = None
    eta_s: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    step_at: float | None = None
    """When the step last rose."""
    first_step: int | None = None
    """The first step that was seen of this attempt; its pace is counted from there."""
    first_at: float | None = None

    @property
    def remaining_s(self) -> float | None:
        """The time left from `step_at` on, by the job's own estimate or else by its pace; None when unknown."""
        if self.eta_s is not None:
            return self.eta_s
        if self.step is None or self.first_step is None or self.step_at is None or self.first_at is None:
            return None
        if not self.total_steps or self.step <= self.first_step or self.step_at <= self.first_at:
            return None
        pace_s = (self.step_at - self.first_at) / (self.step - self.first_step)
        return max(self.total_steps - self.step, 0) * pace_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """A committed checkpoint; nothing else is ever listed."""

    checkpoint_id: str
    job_id: str
    attempt: int
    step: int
    epoch: float | None = None
    created_at: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    size_bytes: int = 0
    root: str
    path: str
    """Relative to the root."""
    status: str = "COMMITTED"
    pinned: bool = False
    """Kept until it is unpinned, whatever the limits say."""
    kind: str = ""
    """`training` or `sampler` for one that a user of a trainer service asked for; empty for one that the job made for
    itself, to resume from."""
    name: str = ""
    """What its user calls it: of several of a kind, the latest has the name."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """What a trainer service says of it: the model, its base model, its rank."""
    expires_at: float | None = None
    """When it goes by itself; None: never."""
    public: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """One thing that happened to a job. Numbered per job without gaps."""

    job_id: str
    seq: int
    at: float
    type: str
    """`status` for a transition; otherwise what happened, such as `checkpoint` or `pause_requested`."""
    actor: Actor
    attempt: int
    from_status: JobStatus | None = None
    to_status: JobStatus | None = None
    reason: Reason | None = None
    message: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    # Who it is.
    account_id: str
    job_id: str
    handle: str | None = None
    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    created_by: str = ""
    created_at: float
    parent_job_id: str | None = None
    root_job_id: str

    # What was asked; `spec` is the stored document, the rest is read off it at submission.
    spec_version: int
    spec: Mapping[str, Any]
    workload_kind: str
    lifetime: Lifetime = Lifetime.BATCH
    backend: str
    queue: str = "default"
    priority: int = 5
    needs: Needs = Needs()
    max_retries: int = 0
    preemptible: bool = False
    max_runtime_s: float | None = None
    inactivity_timeout_s: float | None = None
    """Service jobs: parked after so long without use; None means never."""
    best_metric: str | None = None
    best_is_greater: bool = False

    # Where it stands.
    status: JobStatus
    desired: Desired = Desired.RUN
    reason: Reason | None = None
    message: str | None = None
    version: int = 1
    """Rises with every change; every write compares it."""
    event_count: int = 0
    can_save: bool = False
    """The workload declares, or has shown, that it saves when asked."""
    retries_used: int = 0
    preemptions_used: int = 0
    queued_at: float | None = None
    """When it was first QUEUED, or last resumed; attempts that are retried keep it."""
    not_before: float = 0.0
    """Back-off: not placed before this time."""
    room_at: float | None = None
    """When others were first preempted to make room for it; until it is placed it goes before everybody."""
    started_at: float | None = None
    finished_at: float | None = None
    paused_at: float | None = None
    updated_at: float
    status_at: float
    """When the status last changed."""
    runtime_s: float = 0.0
    """Of attempts that ended."""
    gpu_s: float = 0.0
    stalled_at: float | None = None
    last_save_s: float = 0.0
    progress: JobProgress = JobProgress()
    latest_checkpoint_id: str | None = None
    best_checkpoint_id: str | None = None
    best_metric_value: float | None = None
    resume_checkpoint_id: str | None = None
    """What the next attempt resumes from, when it was named; otherwise the latest."""
    endpoint: str | None = None
    """host:port of a service that answers."""
    last_activity_at: float | None = None
    """When a service became ready. Its use is kept apart from the job, in the table `activity`."""
    deleted_at: float | None = None
    purge: bool = False
    """On deletion: the checkpoints too."""
    attempt_count: int = 0
    attempt: Attempt | None = None

    def evolve(self, **changes: Any) -> Self:
        return type(self)(**{**_values(self), **changes})

    @property
    def host_backend(self) -> str:
        return host_backend(self.backend)

    @property
    def is_service(self) -> bool:
        return self.lifetime is Lifetime.SERVICE

    def in_backoff(self, now: float) -> bool:
        """Whether it may not be placed yet. A back-off that began in the future (the clock was set back) is over."""
        return self.not_before > now and self.status_at <= now

    @property
    def order_key(self) -> float:
        """The place in its queue: earlier is smaller. Constant while it waits, so it can be indexed."""
        return (self.queued_at or self.created_at) - self.priority * AGEING_S_PER_PRIORITY

    @property
    def own_checkpoint_id(self) -> str | None:
        """The checkpoint of its own that the job resumes from: the latest, or the best where that was asked for."""
        return (self.best_checkpoint_id if self.resumes_from_best else None) or self.latest_checkpoint_id

    @property
    def resumes_from_best(self) -> bool:
        return bool(self.checkpoint_config.get("resume_from_best"))

    @property
    def checkpoint_config(self) -> Mapping[str, Any]:
        return (self.spec.get("output_config") or {}).get("checkpoint") or {}

    @property
    def waits_for_nodes(self) -> bool:
        """Whether it may wait for nodes that do not exist yet."""
        return bool((self.spec.get("scheduling_config") or {}).get("allow_waiting_for_nodes"))

    @property
    def live(self) -> Attempt:
        """The current attempt; ValueError when there is none."""
        if self.attempt is None:
            raise ValueError(f"job {self.job_id} is {self.status} and has no current attempt")
        return self.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a decision makes of a job: committed as a whole, or not at all."""

    job: Job
    """Its version is one above the one that was decided on."""
    events: tuple[JobEvent, ...] = ()
    checkpoints: tuple[CheckpointRecord, ...] = ()
    replaced: tuple[str, ...] = ()
    """The ids of checkpoints of the job in whose place those are."""
    ended: Attempt | None = None
    """The attempt that ended with this change; its resources are released."""


def merge(first: Change, second: Change) -> Change:
    """Two changes of one job in a row as one commit."""
    return Change(
        job=second.job.evolve(version=first.job.version),
        events=first.events + second.events,
        checkpoints=first.checkpoints + second.checkpoints,
        replaced=first.replaced + second.replaced,
        ended=second.ended or first.ended,
    )

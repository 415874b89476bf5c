"""The lifecycle: the table of transitions (409s, documentation and tests are made from it), and what follows from
reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from trainmaster.protocol.reasons import Reason


class JobStatus(StrEnum):
    """Where a job stands; `MEANINGS` says what each value means."""

    PENDING = "PENDING"
    QUEUED = "QUEUED"
    SCHEDULING = "SCHEDULING"
    PREPARING = "PREPARING"
    TRAINING = "TRAINING"
    CHECKPOINTING = "CHECKPOINTING"
    EVALUATING = "EVALUATING"
    EXPORTING = "EXPORTING"
    PAUSED = "PAUSED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    PREEMPTED = "PREEMPTED"


MEANINGS: Mapping[JobStatus, str] = MappingProxyType(
    {
        JobStatus.PENDING: "accepted; admission checks are still to run",
        JobStatus.QUEUED: "admitted; waits for resources",
        JobStatus.SCHEDULING: "resources are reserved; its workers are being started",
        JobStatus.PREPARING: "its workers have claimed it; they stage files and the environment",
        JobStatus.TRAINING: "the workload runs (a service: it is ready)",
        JobStatus.CHECKPOINTING: "the workload writes a checkpoint",
        JobStatus.EVALUATING: "the workload evaluates",
        JobStatus.EXPORTING: "the workload merges, converts or uploads its result",
        JobStatus.PAUSED: "stopped by a user, or as an unused service; can be resumed",
        JobStatus.COMPLETED: "succeeded",
        JobStatus.FAILED: "failed; the error says who caused it and what to do",
        JobStatus.CANCELLED: "ended on request",
        JobStatus.PREEMPTED: "preempted, and not queued again",
    }
)
"""Every status in a few words, as the documentation has them."""

WAITING = frozenset({JobStatus.PENDING, JobStatus.QUEUED})
"""Hold nothing."""
RUNNING = frozenset({JobStatus.TRAINING, JobStatus.CHECKPOINTING, JobStatus.EVALUATING, JobStatus.EXPORTING})
"""The running lifetime; the last three are transient phases of it."""
ACTIVE = RUNNING | {JobStatus.SCHEDULING, JobStatus.PREPARING}
"""Have a current attempt, which holds resources."""
TERMINAL = frozenset({JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.PREEMPTED})
"""A batch job never leaves these."""
UNFINISHED = frozenset(JobStatus) - TERMINAL
LAUNCHED = RUNNING | {JobStatus.PREPARING}
"""Workers have claimed the attempt."""


class PendingCode(StrEnum):
    """What kind of thing a job waits for."""

    ADMITTING = "ADMITTING"  # its checks are under way
    BACKOFF = "BACKOFF"  # a time has to pass before the next try
    STARTING = "STARTING"  # the next pass of the scheduler places it
    QUOTA = "QUOTA"  # its queue holds all the GPUs that it may
    IMPOSSIBLE = "IMPOSSIBLE"  # no node could ever run it
    UNAVAILABLE = "UNAVAILABLE"  # only nodes that accept no jobs or do not answer, or unusable GPUs, could run it
    ROOM = "ROOM"  # others hold what it needs
    PREEMPTING = "PREEMPTING"  # others are being stopped for it
    BEHIND = "BEHIND"  # it would fit, and others come first
    FAIR_SHARE = "FAIR_SHARE"  # it would fit, and jobs of other queues come first, which hold less than their share


class Desired(StrEnum):
    """What the user wants of the job; survives attempts and restarts."""

    RUN = "run"
    PAUSE = "pause"
    STOP = "stop"
    DELETE = "delete"


class Actor(StrEnum):
    """Who caused a transition."""

    API = "api"
    SCHEDULER = "scheduler"
    COORDINATOR = "coordinator"
    BACKEND = "backend"
    WORKER = "worker"


class Trigger(StrEnum):
    """What moves a job along an edge."""

    SUBMIT = "submit"
    ADMIT = "admit"
    REJECT = "reject"
    PLACE = "place"
    UNPLACE = "unplace"
    LAUNCH = "launch"
    REFUSE = "refuse"
    TRAIN = "train"
    CHECKPOINT = "checkpoint"
    EVALUATE = "evaluate"
    EXPORT = "export"
    COMPLETE = "complete"
    PARK = "park"
    RESUME = "resume"
    CANCEL = "cancel"
    RETRY = "retry"
    FAIL = "fail"
    PREEMPT = "preempt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Where a trigger leads."""

    to: JobStatus
    actor: Actor
    meaning: str
    service_only: bool = False


def _table() -> dict[tuple[JobStatus | None, Trigger], Edge]:
    s, t, a = JobStatus, Trigger, Actor
    edges: dict[tuple[JobStatus | None, Trigger], Edge] = {}

    def add(
        sources: frozenset[JobStatus] | set[JobStatus] | set[None],
        trigger: Trigger,
        to: JobStatus,
        actor: Actor,
        meaning: str,
        service_only: bool = False,
    ) -> None:
        for source in sources:
            edges[source, trigger] = Edge(to=to, actor=actor, meaning=meaning, service_only=service_only)

    add({None}, t.SUBMIT, s.PENDING, a.API, "the job was submitted, or created by a retry")
    add({s.PENDING}, t.ADMIT, s.QUEUED, a.COORDINATOR, "admission passed")
    add({s.PENDING}, t.REJECT, s.FAILED, a.COORDINATOR, "admission failed")
    add({s.QUEUED}, t.PLACE, s.SCHEDULING, a.SCHEDULER, "nodes were chosen and reserved")
    add({s.SCHEDULING}, t.UNPLACE, s.QUEUED, a.SCHEDULER, "the placement was lost before anything ran")
    add({s.SCHEDULING}, t.LAUNCH, s.PREPARING, a.BACKEND, "every node's worker has claimed the attempt")
    add({s.SCHEDULING}, t.REFUSE, s.FAILED, a.BACKEND, "the backend refused the launch permanently")
    add({s.PREPARING}, t.TRAIN, s.TRAINING, a.WORKER, "the workload runs")
    add({s.CHECKPOINTING}, t.TRAIN, s.TRAINING, a.WORKER, "the checkpoint is committed")
    add({s.EVALUATING}, t.TRAIN, s.TRAINING, a.WORKER, "the evaluation is done")
    add({s.TRAINING}, t.CHECKPOINT, s.CHECKPOINTING, a.WORKER, "a checkpoint is being written")
    add({s.TRAINING, s.CHECKPOINTING}, t.EVALUATE, s.EVALUATING, a.WORKER, "an evaluation started")
    add({s.PREPARING}, t.EVALUATE, s.EVALUATING, a.WORKER, "an evaluation job started")
    add({s.TRAINING, s.CHECKPOINTING, s.EVALUATING}, t.EXPORT, s.EXPORTING, a.WORKER, "the result is being exported")
    add(RUNNING | {s.PREPARING}, t.COMPLETE, s.COMPLETED, a.WORKER, "every rank exited with 0")
    add({s.TRAINING, s.CHECKPOINTING}, t.PARK, s.PAUSED, a.WORKER, "the job stopped for a pause")
    add({s.PAUSED}, t.RESUME, s.QUEUED, a.API, "the job was resumed")
    add(TERMINAL, t.RESUME, s.QUEUED, a.API, "the service was resumed under the same id", service_only=True)
    add(WAITING | ACTIVE | {s.PAUSED}, t.CANCEL, s.CANCELLED, a.API, "the job was cancelled")
    add(LAUNCHED, t.RETRY, s.QUEUED, a.COORDINATOR, "a transient failure or a preemption, with retries left")
    add(LAUNCHED, t.FAIL, s.FAILED, a.COORDINATOR, "a permanent failure, or no retries left")
    # Legal, but not taken: a job whose last checkpoint is lost resumes from the one before.
    add({s.PAUSED}, t.FAIL, s.FAILED, a.COORDINATOR, "the checkpoint to resume from is lost")
    add(LAUNCHED, t.PREEMPT, s.PREEMPTED, a.SCHEDULER, "the job was preempted and may not be queued again")
    return edges


TRANSITIONS: Mapping[tuple[JobStatus | None, Trigger], Edge] = MappingProxyType(_table())
"""Every legal move. What is not here is refused."""


class Action(StrEnum):
    """What a user can ask of a job that exists."""

    CANCEL = "cancel"
    PAUSE = "pause"
    RESUME = "resume"
    RETRY = "retry"
    EDIT = "edit"
    DELETE = "delete"


def allowed_from(action: Action, *, service: bool = False) -> frozenset[JobStatus]:
    """The states from which an action is possible; read off the table."""
    match action:
        case Action.CANCEL:
            return sources(Trigger.CANCEL, service=service)
        case Action.PAUSE:
            # A transient phase that returns to training is paused at its end.
            parkable = sources(Trigger.PARK, service=service)
            edges = {source: edge for (source, by), edge in TRANSITIONS.items() if by is Trigger.TRAIN}
            return parkable | {status for status in RUNNING & edges.keys() if edges[status].to in parkable}
        case Action.RESUME:
            return sources(Trigger.RESUME, service=service)
        case Action.RETRY:
            # The record stays as it is; a child continues. A completed job needs no retry.
            return TERMINAL - {JobStatus.COMPLETED}
        case Action.EDIT:
            return UNFINISHED
        case Action.DELETE:
            return frozenset(JobStatus)


def sources(trigger: Trigger, *, service: bool) -> frozenset[JobStatus]:
    return frozenset(
        source
        for (source, by), edge in TRANSITIONS.items()
        if by is trigger and source is not None and (service or not edge.service_only)
    )


# Consequences of a reason: who caused it, whether a retry may help, and what to do.


class Fault(StrEnum):
    """Who has to act."""

    NONE = "none"
    USER = "user"
    PLATFORM = "platform"
    INFRASTRUCTURE = "infrastructure"


class AttemptOutcome(StrEnum):
    """What the end of an attempt means for its job."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    PARKED = "parked"
    PREEMPTED = "preempted"
    TRANSIENT = "transient"
    PERMANENT = "permanent"
    NOT_STARTED = "not_started"


@dataclass(frozen=True, slots=True, kw_only=True)
class Consequence:
    outcome: AttemptOutcome
    fault: Fault
    advice: str = ""
    service_advice: str = ""
    """For a service, which is resumed by its users instead of being retried; empty: the same."""

    def advice_for(self, *, service: bool) -> str:
        return (service and self.service_advice) or self.advice


def _rows() -> dict[Reason, Consequence]:
    def row(outcome: AttemptOutcome, fault: Fault, advice: str = "", service: str = "") -> Consequence:
        """With `{again}` in the advice, a job is retried and a service resumed."""
        if "{again}" in advice:
            advice, service = advice.format(again="retry"), advice.format(again="resume it")
        return Consequence(outcome=outcome, fault=fault, advice=advice, service_advice=service)

    permanent, transient = AttemptOutcome.PERMANENT, AttemptOutcome.TRANSIENT
    user, infrastructure = Fault.USER, Fault.INFRASTRUCTURE
    return {
        Reason.SUCCEEDED: row(AttemptOutcome.COMPLETED, Fault.NONE),
        Reason.CANCELLED: row(AttemptOutcome.CANCELLED, Fault.NONE),
        Reason.DELETED: row(AttemptOutcome.CANCELLED, Fault.NONE),
        Reason.PAUSED: row(AttemptOutcome.PARKED, Fault.NONE, "resume it to continue"),
        Reason.INACTIVE: row(
            AttemptOutcome.PARKED, Fault.NONE, "it was parked because nobody used it; resume it to use it again"
        ),
        Reason.PREEMPTED: row(
            AttemptOutcome.PREEMPTED,
            Fault.NONE,
            "retry it, or submit with max_retries of 1 or more to be queued again",
            "resume it: it is queued, and starts when resources are free",
        ),
        Reason.EXITED_NONZERO: row(
            permanent,
            user,
            "read the last lines of its log, fix the program and submit again",
            "read the last lines of its log, fix the cause and resume it",
        ),
        Reason.COMMAND_NOT_FOUND: row(permanent, user, "check the first word of argv and the PATH of the node"),
        Reason.BAD_INPUT: row(permanent, user, "fix what the message names and submit again"),
        Reason.TIMEOUT: row(
            permanent,
            user,
            "raise scheduling_config.max_runtime_seconds, then retry from its checkpoint",
            "resume it for the same time again, or submit a job with more scheduling_config.max_runtime_seconds",
        ),
        Reason.NOT_READY: row(permanent, user, "check the readiness path, the port and the log of the service"),
        Reason.CREDENTIALS_REFUSED: row(permanent, user, "renew the credentials and submit again"),
        Reason.ADMISSION: row(permanent, user, "fix what the message names and submit again"),
        Reason.LAUNCH_REFUSED: row(permanent, user, "fix what the message names and submit again"),
        Reason.RETRYABLE_EXIT: row(
            transient,
            user,
            "it exited with one of the job's retry_exit_codes until no retries were left; read its log, then retry",
            "it exited with a code that the job declares as transient; resume it",
        ),
        Reason.KILLED_BY_SIGNAL: row(
            transient,
            infrastructure,
            "it crashed, or something other than Trainmaster killed it; look at its log and the node's system log",
            "it crashed, or something other than Trainmaster killed it; look at its log and the node's system log, "
            "then resume it",
        ),
        Reason.OUT_OF_MEMORY: row(
            transient,
            user,
            "use a smaller batch or a node with more memory, then retry from its checkpoint",
            "resume it and send smaller batches, or submit a job with more memory",
        ),
        Reason.WORKER_LOST: row(
            transient, infrastructure, "its worker died; retry from its checkpoint", "its worker died; resume it"
        ),
        Reason.NODE_LOST: row(
            transient,
            infrastructure,
            "the node was lost or rebooted; retry from its checkpoint",
            "the node was lost or rebooted; resume it",
        ),
        Reason.STALLED: row(
            transient, user, "it reported no step for too long; read its stacks with `trainmaster events`, then {again}"
        ),
        Reason.DISK_FULL: row(transient, infrastructure, "free space on the disk that the message names, then {again}"),
        Reason.STORAGE_UNAVAILABLE: row(transient, infrastructure, "the storage did not answer; {again} when it does"),
        Reason.ENGINE_UNAVAILABLE: row(
            transient, infrastructure, "the backend's engine did not answer; {again} when it does"
        ),
        Reason.EVICTED: row(
            transient,
            infrastructure,
            "the cluster took its node away, or the node ran out of a resource; {again}, and it continues from its "
            "checkpoint",
        ),
        Reason.ENGINE_CANCELLED: row(
            transient,
            infrastructure,
            "somebody cancelled or deleted it on the cluster itself, not through Trainmaster; ask them, then {again}",
        ),
        Reason.NEVER_STARTED: row(
            AttemptOutcome.NOT_STARTED,
            Fault.PLATFORM,
            "it is placed again automatically; if it FAILED, look for the cause in the server's log, then {again}",
        ),
    }


CONSEQUENCES: Mapping[Reason, Consequence] = MappingProxyType(_rows())
"""One row for every reason; a test enforces this."""

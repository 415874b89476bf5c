"""Why an attempt ended or a job changed state. `core.states` says what follows from a reason."""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any


class Reason(StrEnum):
    """Recorded first; status, retry budget, fault and advice follow from tables."""

    # As requested.
    SUCCEEDED = "SUCCEEDED"
    CANCELLED = "CANCELLED"
    PAUSED = "PAUSED"
    INACTIVE = "INACTIVE"
    PREEMPTED = "PREEMPTED"
    DELETED = "DELETED"

    # Caused by the job: running it again would end the same way.
    EXITED_NONZERO = "EXITED_NONZERO"
    COMMAND_NOT_FOUND = "COMMAND_NOT_FOUND"
    BAD_INPUT = "BAD_INPUT"
    TIMEOUT = "TIMEOUT"
    NOT_READY = "NOT_READY"
    CREDENTIALS_REFUSED = "CREDENTIALS_REFUSED"
    ADMISSION = "ADMISSION"
    LAUNCH_REFUSED = "LAUNCH_REFUSED"

    # Transient: another attempt may succeed.
    RETRYABLE_EXIT = "RETRYABLE_EXIT"
    KILLED_BY_SIGNAL = "KILLED_BY_SIGNAL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    WORKER_LOST = "WORKER_LOST"
    NODE_LOST = "NODE_LOST"
    STALLED = "STALLED"
    DISK_FULL = "DISK_FULL"
    STORAGE_UNAVAILABLE = "STORAGE_UNAVAILABLE"
    ENGINE_UNAVAILABLE = "ENGINE_UNAVAILABLE"
    EVICTED = "EVICTED"
    ENGINE_CANCELLED = "ENGINE_CANCELLED"

    # Never started.
    NEVER_STARTED = "NEVER_STARTED"


class StopCause(StrEnum):
    CANCEL = "cancel"
    PAUSE = "pause"
    INACTIVE = "inactive"
    PREEMPT = "preempt"
    TIMEOUT = "timeout"
    STALL = "stall"
    DELETE = "delete"
    PEER = "peer"
    """Another node of the gang failed, or was lost."""
    ENGINE = "engine"
    """The engine of the cluster ends it: for a job of a higher priority, at a time limit, or because it was cancelled
    there."""


REASON_OF_STOP: Mapping[StopCause, Reason] = MappingProxyType(
    {
        StopCause.CANCEL: Reason.CANCELLED,
        StopCause.DELETE: Reason.DELETED,
        StopCause.PAUSE: Reason.PAUSED,
        StopCause.INACTIVE: Reason.INACTIVE,
        StopCause.PREEMPT: Reason.PREEMPTED,
        StopCause.TIMEOUT: Reason.TIMEOUT,
        StopCause.STALL: Reason.STALLED,
        StopCause.PEER: Reason.WORKER_LOST,
        # Unless the engine says why.
        StopCause.ENGINE: Reason.PREEMPTED,
    }
)


class Phase(StrEnum):
    """What a rank reports that it is doing."""

    PREPARING = "preparing"
    TRAINING = "training"
    CHECKPOINTING = "checkpointing"
    EVALUATING = "evaluating"
    EXPORTING = "exporting"


REPORTABLE_REASONS = frozenset(
    {Reason.BAD_INPUT, Reason.CREDENTIALS_REFUSED, Reason.STORAGE_UNAVAILABLE, Reason.OUT_OF_MEMORY}
)
"""Reasons that code inside a job may give for its own failure."""

EXIT_STOPPED = 85
"""The exit code of a rank that was asked to stop and has saved."""


def exit_record(reason: Reason, message: str, **known: Any) -> dict[str, Any]:
    """The exit document of a node that ended now, with null for every field that is not known."""
    unknown = dict.fromkeys(("exit_code", "signal", "rank", "step", "stop_cause", "started_at"))
    evidence: dict[str, Any] = {"last_lines": [], "frame": None, "oom_kills": None}
    record = {**unknown, "ended_at": time.time(), "evidence": evidence, "streams": {}}
    return {"reason": reason, "message": message, **record, **known}

"""Consequences of a reason: who caused it, whether a retry may help, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from trainmaster.protocol.reasons import Reason


class Fault(StrEnum):
    """Who has to act."""

    NONE = "none"
    USER = "user"
    PLATFORM = "platform"
    INFRASTRUCTURE = "infrastructure"


class Outcome(StrEnum):
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
    """One row of the table."""

    outcome: Outcome
    fault: Fault
    advice: str = ""
    service_advice: str = ""
    """For a service, which is resumed by its users instead of being retried; empty: the same."""

    def advice_for(self, *, service: bool) -> str:
        """What to do about a job that ended so."""
        return (service and self.service_advice) or self.advice


def _rows() -> dict[Reason, Consequence]:
    def row(outcome: Outcome, fault: Fault, advice: str = "", service: str = "") -> Consequence:
        return Consequence(outcome=outcome, fault=fault, advice=advice, service_advice=service)

    permanent, transient = Outcome.PERMANENT, Outcome.TRANSIENT
    user, infrastructure = Fault.USER, Fault.INFRASTRUCTURE
    return {
        Reason.SUCCEEDED: row(Outcome.COMPLETED, Fault.NONE),
        Reason.CANCELLED: row(Outcome.CANCELLED, Fault.NONE),
        Reason.DELETED: row(Outcome.CANCELLED, Fault.NONE),
        Reason.PAUSED: row(Outcome.PARKED, Fault.NONE, "resume it when you want it to go on"),
        Reason.INACTIVE: row(Outcome.PARKED, Fault.NONE, "nobody used it for a while; resume it to use it again"),
        Reason.PREEMPTED: row(
            Outcome.PREEMPTED,
            Fault.NONE,
            "retry it, or submit with max_retries of 1 or more to be queued again",
            "resume it: it waits for a place, and starts again when there is one",
        ),
        Reason.EXITED_NONZERO: row(
            permanent,
            user,
            "read the last lines of its log, mend the program and submit again",
            "read the last lines of its log, mend what is wrong and resume it",
        ),
        Reason.COMMAND_NOT_FOUND: row(permanent, user, "check the first word of argv and the PATH of the node"),
        Reason.BAD_INPUT: row(permanent, user, "mend what the message names and submit again"),
        Reason.TIMEOUT: row(
            permanent,
            user,
            "raise scheduling_config.max_runtime_seconds, then retry from its checkpoint",
            "resume it for as long again, or submit one with more scheduling_config.max_runtime_seconds",
        ),
        Reason.NOT_READY: row(permanent, user, "check the readiness path, the port and the log of the service"),
        Reason.CREDENTIALS_REFUSED: row(permanent, user, "renew the credentials and submit again"),
        Reason.ADMISSION: row(permanent, user, "mend what the message names and submit again"),
        Reason.LAUNCH_REFUSED: row(permanent, user, "the backend refused the launch; the message says why"),
        Reason.RETRYABLE_EXIT: row(
            transient,
            user,
            "it ended with an exit code that the job lists as worth a retry",
            "it ended with an exit code that the job lists as worth another try; resume it",
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
            "resume it and send less at a time, or submit one that has more memory",
        ),
        Reason.WORKER_LOST: row(
            transient, infrastructure, "its worker died; retry from its checkpoint", "its worker died; resume it"
        ),
        Reason.NODE_LOST: row(
            transient,
            infrastructure,
            "the node went away or was rebooted; retry from its checkpoint",
            "the node went away or was rebooted; resume it",
        ),
        Reason.STALLED: row(transient, user, "it made no step for too long; its stacks are in the events"),
        Reason.DISK_FULL: row(
            transient,
            infrastructure,
            "free space on the disk that the message names, then retry",
            "free space on the disk that the message names, then resume it",
        ),
        Reason.STORAGE_UNAVAILABLE: row(
            transient,
            infrastructure,
            "the storage did not answer; retry when it does",
            "the storage did not answer; resume it when it does",
        ),
        Reason.ENGINE_UNAVAILABLE: row(
            transient,
            infrastructure,
            "the backend's engine did not answer; retry when it does",
            "the backend's engine did not answer; resume it when it does",
        ),
        Reason.NEVER_STARTED: row(
            Outcome.NOT_STARTED,
            Fault.PLATFORM,
            "it is placed again by itself; where it has failed, look for the cause in the server's log, then retry",
            "it is placed again by itself; where it has failed, look for the cause in the server's log, then resume it",
        ),
    }


CONSEQUENCES: Mapping[Reason, Consequence] = MappingProxyType(_rows())
"""One row for every reason; a test sees to it."""

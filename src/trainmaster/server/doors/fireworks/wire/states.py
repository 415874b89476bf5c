"""JOB_STATE: a job's state in the words of the Fireworks clients. One table, read off the job; it decides nothing.

Their waiters accept JOB_STATE_RUNNING and nothing else, resume what is FAILED, CANCELLED, PAUSED or COMPLETED, and
wait in any other state.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainmaster.server.core.job import Job
from trainmaster.server.core.reasons import CONSEQUENCES, Fault
from trainmaster.server.core.states import ACTIVE, RUNNING, Desired, JobStatus

STATES: Mapping[JobStatus, str] = {
    JobStatus.PENDING: "JOB_STATE_PENDING",
    JobStatus.QUEUED: "JOB_STATE_PENDING",
    JobStatus.SCHEDULING: "JOB_STATE_CREATING",
    JobStatus.PREPARING: "JOB_STATE_CREATING",
    JobStatus.TRAINING: "JOB_STATE_RUNNING",
    JobStatus.CHECKPOINTING: "JOB_STATE_RUNNING",
    JobStatus.EVALUATING: "JOB_STATE_RUNNING",
    JobStatus.EXPORTING: "JOB_STATE_RUNNING",
    JobStatus.PAUSED: "JOB_STATE_PAUSED",
    JobStatus.COMPLETED: "JOB_STATE_COMPLETED",
    JobStatus.FAILED: "JOB_STATE_FAILED",
    JobStatus.CANCELLED: "JOB_STATE_CANCELLED",
    JobStatus.PREEMPTED: "JOB_STATE_FAILED",
}
"""While nothing else is wanted of the job."""
STOPPING: Mapping[Desired, str] = {
    Desired.STOP: "JOB_STATE_CANCELLING",
    Desired.DELETE: "JOB_STATE_DELETING",
}
"""While it is being stopped for good."""
DELETED = "JOB_STATE_DELETED"
IDLE = "JOB_STATE_IDLE"
SAVING = "JOB_STATE_WRITING_RESULTS"
"""While it is being stopped to go on later: a pause, a preemption, want of use."""
NOT_YET = "JOB_STATE_CREATING"
RUNS = STATES[JobStatus.TRAINING]

IDLE_AFTER_S = 60.0
"""Without use. Clients that hold a session say every ten seconds that they are there."""

_CODES: Mapping[Fault, str] = {
    Fault.NONE: "ABORTED",  # preempted
    Fault.USER: "FAILED_PRECONDITION",
    Fault.INFRASTRUCTURE: "UNAVAILABLE",
    Fault.PLATFORM: "INTERNAL",
}


def state_of(job: Job, *, idle: bool = False, answers: bool = True) -> str:
    """The state of a trainer.

    Args:
        job: whose it is.
        idle: nobody used it for a while; only lists tell that.
        answers: it does, as far as is known.
    """
    if job.deleted_at is not None:
        return DELETED
    if job.status in ACTIVE and job.attempt is not None:
        if job.desired in STOPPING:
            return STOPPING[job.desired]
        if job.attempt.stop is not None:
            return SAVING
    if job.status in RUNNING and (job.endpoint is None or not answers):
        return NOT_YET
    return IDLE if idle and job.status in RUNNING else STATES[job.status]


def code_of(job: Job) -> str:
    """The gRPC code of a trainer's status."""
    if STATES[job.status] != STATES[JobStatus.FAILED] or job.deleted_at is not None:
        return "OK"
    return _CODES[CONSEQUENCES[job.reason].fault] if job.reason is not None else "UNKNOWN"

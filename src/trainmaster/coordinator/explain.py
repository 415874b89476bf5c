"""Why a job waits, for whoever asks: read from the store, answered by the pure scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection

from trainmaster.core.job import Job
from trainmaster.core.states import JobStatus
from trainmaster.scheduling.explain import pending_reason
from trainmaster.scheduling.view import ClusterView
from trainmaster.store import jobs, nodes
from trainmaster.store.scope import Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What is known of a job's wait."""

    queue_position: int | None = None
    """1 is next; None when it is not queued."""
    pending_reason: str | None = None
    estimated_wait_s: float | None = None


def explain(connection: Connection, scope: Scope, job: Job, *, now: float) -> Waiting:
    """A job's place in its queue, and what it waits for."""
    if job.status is JobStatus.PENDING:
        return Waiting(pending_reason="is being admitted")
    if job.status is not JobStatus.QUEUED:
        return Waiting()
    position = jobs.queue_position(connection, scope, job)
    # What others hold is told as amounts; other accounts' jobs are not named.
    everything = Scope.everything()
    view = ClusterView().with_nodes(nodes.all(connection, everything)).with_jobs(jobs.active(connection, everything))
    return Waiting(
        queue_position=position,
        pending_reason=pending_reason(view, job, now=now, position=position, visible=scope.admits),
    )

"""Why jobs wait, for whoever asks: read from the store in bounded pieces, answered by the pure scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from trainmaster.core.job import Job
from trainmaster.core.states import WAITING
from trainmaster.scheduling import explain as scheduling
from trainmaster.scheduling.explain import Explanation, PendingCode
from trainmaster.scheduling.forecast import estimated_waits
from trainmaster.scheduling.obstacles import Situation
from trainmaster.scheduling.view import ClusterView
from trainmaster.store import nodes, queues, waiting
from trainmaster.store.scope import Scope

FAR = 500
"""So many of the jobs that come first are looked at; behind more, nobody could say when a job starts."""
PATIENCE_S = 0.2
"""For what is in the way, and for an estimate: what is not found out by then is left open."""

_EVERYTHING = Scope.everything()
_NO_TELLING = frozenset({PendingCode.ADMITTING, PendingCode.IMPOSSIBLE, PendingCode.UNAVAILABLE})
"""What only people can change; nobody knows when."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What is known of a job's wait."""

    queue_position: int | None = None
    """1 is next; None when it is not queued."""
    explanation: Explanation | None = None
    estimated_wait_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEntry:
    """A job that waits in a queue."""

    job: Job
    position: int
    reason: str | None
    estimated_wait_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEntries:
    """A part of a queue, in the order of the scheduler."""

    entries: Sequence[QueueEntry]
    next_page_token: str | None


def explain(connection: Connection, scope: Scope, job: Job, *, now: float) -> Waiting:
    """A job's place in its queue, what it waits for, and for how long. Jobs out of scope are not named."""
    if job.status not in WAITING:
        return Waiting()
    first = waiting.first(connection, _EVERYTHING, FAR)
    position = waiting.position(connection, scope, job, first if len(first) < FAR else None)
    view = _view(connection, first, [job])
    told = scheduling.explain(Situation(view, now), job, visible=scope.admits, patience=_patience())
    estimates = {} if told is None or told.code in _NO_TELLING else _estimates(view, {job.job_id: position}, now)
    return Waiting(queue_position=position, explanation=told, estimated_wait_s=estimates.get(job.job_id))


def look_into(
    connection: Connection, scope: Scope, queue: str, *, now: float, page_size: int, page_token: str | None
) -> QueueEntries:
    """A part of a queue: who waits there, for how long, and why as far as the scope may know.

    Raises:
        SpecError: the token is not one of such a list.
    """
    page = waiting.page(connection, _EVERYTHING, queue, page_size=page_size, page_token=page_token)
    view = _view(connection, waiting.first(connection, _EVERYTHING, FAR), page.jobs)
    positions = {job.job_id: position for position, job in enumerate(page.jobs, page.first_position)}
    estimates = _estimates(view, positions, now)
    situation = Situation(view, now)
    entries = []
    for job in page.jobs:
        told = None
        if scope.admits(job.account_id):
            told = scheduling.explain(situation, job, visible=scope.admits, thorough=False)
        entries.append(
            QueueEntry(
                job=job,
                position=positions[job.job_id],
                reason=told.message if told else None,
                estimated_wait_s=estimates.get(job.job_id),
            )
        )
    return QueueEntries(entries=entries, next_page_token=page.next_page_token)


def _estimates(view: ClusterView, positions: Mapping[str, int | None], now: float) -> dict[str, float]:
    near = [job_id for job_id, position in positions.items() if position is not None and position <= FAR]
    return estimated_waits(view, near, now=now, patience=_patience()) if near else {}


def _patience() -> Callable[[], bool]:
    over = time.monotonic() + PATIENCE_S
    return lambda: time.monotonic() < over


def _view(connection: Connection, first: Sequence[Job], jobs: Sequence[Job]) -> ClusterView:
    """The cluster as far as it matters to jobs of one queue: what runs, and what comes before them.

    Fewer than `FAR` first jobs are all that wait; of more, those before the jobs in their queue are read, too.
    """
    before = first
    if jobs and len(first) >= FAR:
        before = (*first, *waiting.ahead(connection, _EVERYTHING, jobs[0], FAR))
    return (
        ClusterView()
        .with_nodes(nodes.all(connection, _EVERYTHING))
        .with_queues(queues.all(connection, _EVERYTHING))
        .with_jobs((*waiting.holding(connection, _EVERYTHING), *before, *jobs))
    )

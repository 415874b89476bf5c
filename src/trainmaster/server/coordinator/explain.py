"""Explains why jobs wait: reads bounded pieces of the store, and asks the scheduler."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from sqlalchemy import Connection

from trainmaster.server.core.job import Job
from trainmaster.server.core.reports import EngineOutage
from trainmaster.server.core.states import WAITING, PendingCode
from trainmaster.server.scheduling import explain as scheduling
from trainmaster.server.scheduling.explain import Explanation
from trainmaster.server.scheduling.obstacles import Situation, estimated_waits
from trainmaster.server.scheduling.view import ClusterView
from trainmaster.server.store import nodes, queues
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

FAR = 500
"""How many of the first jobs are read; behind more, no estimate would be useful."""
PATIENCE_S = 0.2
"""The time for an explanation, and for an estimate; what is not found by then is left out."""

_EVERYTHING = Scope.everything()
_NO_ESTIMATE = frozenset({PendingCode.ADMITTING, PendingCode.IMPOSSIBLE, PendingCode.UNAVAILABLE})
"""Waits without an estimate: only people can end them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    queue_position: int | None = None
    """1 is next; None when it is not queued."""
    explanation: Explanation | None = None
    estimated_wait_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEntry:
    job: Job
    position: int
    reason: str | None
    estimated_wait_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cluster:
    asked_at: float
    """By the monotonic clock; everything committed until then is in it."""
    data_version: int
    view: ClusterView
    queues: Mapping[str, Sequence[Job]]
    """The jobs that wait, in order."""
    complete: bool
    """Whether these are all that wait; otherwise they are the first `FAR`."""


class Explainer:
    """Explains why jobs wait, with what it read of the cluster since the database was last written to. Any thread may
    use it, except one that holds a connection, as it may need one itself."""

    def __init__(
        self, database: Database, outages: Callable[[], Mapping[str, EngineOutage]] = lambda: MappingProxyType({})
    ) -> None:
        """`outages` tells which clusters do not answer, by name, as far as this server knows."""
        self._database = database
        self._outages = outages
        self._lock = threading.Lock()
        self._kept: _Cluster | None = None

    def explain(self, scope: Scope, job: Job, *, now: float) -> Waiting:
        """A job's position in its queue, what it waits for, and for how long. Jobs out of scope are not named."""
        scope.require(job.account_id)
        if job.status not in WAITING:
            return Waiting()
        cluster = self._cluster()
        if cluster.complete:
            position = queues.position_among(cluster.queues.get(job.queue, ()), job)
            ahead: Sequence[Job] = ()
        else:
            with self._database.read() as connection:
                position = queues.position(connection, scope, job)
                ahead = queues.ahead(connection, _EVERYTHING, job, FAR)
        view = _with(cluster.view, (*ahead, job))
        situation = Situation(view, now, self._outages())
        why = scheduling.explain(situation, job, visible=scope.admits, patience=_patience())
        estimates = {} if why is None or why.code in _NO_ESTIMATE else _estimates(view, {job.job_id: position}, now)
        return Waiting(queue_position=position, explanation=why, estimated_wait_s=estimates.get(job.job_id))

    def look_into(
        self, scope: Scope, queue: str, *, now: float, page_size: int, page_token: str | None
    ) -> tuple[list[QueueEntry], str | None]:
        """A page of a queue and the token of the next page; an entry says why its job waits if that is in scope."""
        cluster = self._cluster()
        with self._database.read() as connection:
            page = queues.page(connection, _EVERYTHING, queue, page_size=page_size, page_token=page_token)
            ahead: Sequence[Job] = ()
            if page.jobs and not cluster.complete:
                ahead = queues.ahead(connection, _EVERYTHING, page.jobs[0], FAR)
        view = _with(cluster.view, (*ahead, *page.jobs))
        positions = {job.job_id: position for position, job in enumerate(page.jobs, page.first_position)}
        estimates = _estimates(view, positions, now)
        situation = Situation(view, now, self._outages())
        entries = []
        for job in page.jobs:
            why = None
            if scope.admits(job.account_id):
                why = scheduling.explain(situation, job, visible=scope.admits, thorough=False)
            entries.append(
                QueueEntry(
                    job=job,
                    position=positions[job.job_id],
                    reason=why.message if why else None,
                    estimated_wait_s=estimates.get(job.job_id),
                )
            )
        return entries, page.next_page_token

    def _cluster(self) -> _Cluster:
        """The cluster with all that was committed before this call; threads that wait for a read share the next."""
        called_at = time.monotonic()
        with self._lock:
            kept = self._kept
            if kept is None or kept.asked_at < called_at:
                asked_at = time.monotonic()
                # Before anything is read: what is committed after this makes the number another one.
                data_version = self._database.data_version()
                if kept is not None and kept.data_version == data_version:
                    kept = replace(kept, asked_at=asked_at)
                else:
                    with self._database.read() as connection:
                        kept = _read(connection, asked_at, data_version)
                self._kept = kept
            return kept


def _read(connection: Connection, asked_at: float, data_version: int) -> _Cluster:
    first = queues.first(connection, _EVERYTHING, FAR)
    view = (
        ClusterView()
        .with_nodes(nodes.all(connection, _EVERYTHING))
        .with_queues(queues.all(connection, _EVERYTHING))
        .with_jobs((*queues.holding(connection, _EVERYTHING), *first))
    )
    by_queue: dict[str, list[Job]] = {}
    for job in first:
        by_queue.setdefault(job.queue, []).append(job)
    return _Cluster(asked_at=asked_at, data_version=data_version, view=view, queues=by_queue, complete=len(first) < FAR)


def _with(view: ClusterView, jobs: Sequence[Job]) -> ClusterView:
    """The view with those of the jobs that it does not have in this version."""
    known = view.jobs
    return view.with_jobs(
        job for job in jobs if (before := known.get(job.job_id)) is None or before.version != job.version
    )


def _estimates(view: ClusterView, positions: Mapping[str, int | None], now: float) -> dict[str, float]:
    near = [job_id for job_id, position in positions.items() if position is not None and position <= FAR]
    return estimated_waits(view, near, now=now, patience=_patience()) if near else {}


def _patience() -> Callable[[], bool]:
    over = time.monotonic() + PATIENCE_S
    return lambda: time.monotonic() < over

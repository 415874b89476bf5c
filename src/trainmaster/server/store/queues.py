"""Queues of the cluster, and the jobs that wait in them or run, in the order of the scheduler. `default` is always
there. Jobs come without what only people and workers read: their spec, labels and streams."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, bindparam, delete, insert, select, update

from trainmaster.server.core.errors import ConflictError
from trainmaster.server.core.job import Attempt, Job
from trainmaster.server.core.resources import ClusterEvent, JobQueue
from trainmaster.server.core.states import ACTIVE, UNFINISHED, JobStatus
from trainmaster.server.store import events, schema
from trainmaster.server.store.page_tokens import position_of, token_after
from trainmaster.server.store.records import PreparedStatement, Records
from trainmaster.server.store.scope import Scope

DEFAULT = "default"

_queues, _jobs, _attempts, _gpus = schema.queues, schema.jobs, schema.attempts, schema.allocated_gpus

_QUEUES = Records(JobQueue, _queues)
_NAMED = PreparedStatement(select(_queues.c.name).where(_queues.c.name == bindparam("wanted")))


def all(connection: Connection, scope: Scope) -> list[JobQueue]:  # noqa: A001 - read as `queues.all`
    return _QUEUES.find(connection, scope, order_by=[_queues.c.name])


def get(connection: Connection, scope: Scope, name: str) -> JobQueue:
    return _QUEUES.get(connection, scope, _queues.c.name == name, missing=f"there is no queue {name}")


def exists(connection: Connection, scope: Scope, name: str) -> bool:  # noqa: ARG001 - queues are everybody's
    return bool(_NAMED.rows(connection, {"wanted": name}))


def touch(connection: Connection, scope: Scope) -> None:
    """Write the default queue as it is, to see whether the database accepts writes."""
    scope.require_everything()
    connection.execute(update(_queues).where(_queues.c.name == DEFAULT).values(name=_queues.c.name))


def put(connection: Connection, scope: Scope, queue: JobQueue, now: float) -> None:
    """Create a queue, or change its weight and quota; nothing is written where nothing changes."""
    scope.require_everything()
    values = {"weight": queue.weight, "quota_gpus": queue.quota_gpus}
    if exists(connection, scope, queue.name):
        before = get(connection, scope, queue.name)
        if (before.weight, before.quota_gpus) == (queue.weight, queue.quota_gpus):
            return
        connection.execute(update(_queues).where(_queues.c.name == queue.name).values(values))
    else:
        connection.execute(insert(_queues), {"name": queue.name, "created_at": now, **values})
    quota = "no quota" if queue.quota_gpus is None else f"a quota of {queue.quota_gpus} GPUs"
    message = f"queue {queue.name} has weight {queue.weight:g} and {quota}"
    event = ClusterEvent(at=now, type="queue_changed", subject=f"queue/{queue.name}", message=message, data=values)
    events.append_to_cluster(connection, scope, [event])


def remove(connection: Connection, scope: Scope, name: str, now: float) -> None:
    scope.require_everything()
    get(connection, scope, name)
    if name == DEFAULT:
        raise ConflictError("the default queue is always there; give it a quota of 0 to hold its GPU jobs back")
    query = select(_jobs.c.job_id).where(_jobs.c.queue == name, _jobs.c.status.in_(sorted(UNFINISHED))).limit(1)
    if connection.execute(query).first() is not None:
        raise ConflictError(f"jobs that have not ended are in queue {name}; move them with `trainmaster edit --queue`")
    connection.execute(delete(_queues).where(_queues.c.name == name))
    event = ClusterEvent(at=now, type="queue_removed", subject=f"queue/{name}", message=f"queue {name} was removed")
    events.append_to_cluster(connection, scope, [event])


# The jobs of queues. The scheduler treats all accounts as one, so these functions need the scope of everything.

_ORDER = "scheduler"
"""The order that page tokens of a queue name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCounts:
    depth: int = 0
    running: int = 0
    paused: int = 0
    gpus_held: int = 0
    oldest_queued_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingJobs:
    """A page of the jobs that wait in a queue, in the order of the scheduler."""

    jobs: Sequence[Job]
    first_position: int
    next_page_token: str | None


def holding(connection: Connection, scope: Scope) -> list[Job]:
    return _find(_HOLDING, connection, scope)


def first(connection: Connection, scope: Scope, limit: int) -> list[Job]:
    """The jobs that the scheduler comes to first, of all queues, in its order."""
    found = _find(_FIRST, connection, scope, most=limit)
    return _in_order({job.job_id: job for job in (*_find(_WITH_ROOM, connection, scope), *found)}.values())


def ahead(connection: Connection, scope: Scope, job: Job, limit: int) -> list[Job]:
    """The first of the jobs that wait in a job's queue before it."""
    return _find(_AHEAD, connection, scope, most=limit, **_place(job))


def position(connection: Connection, scope: Scope, job: Job) -> int | None:
    """A job's place in its queue, from 1, among the jobs of all accounts; None when it does not wait there."""
    scope.require(job.account_id)
    if job.status is not JobStatus.QUEUED:
        return None
    rooms = [other for other in _find(_WITH_ROOM, connection, Scope.everything()) if other.queue == job.queue]
    if job.room_at is not None:
        return 1 + sum(_key(other) < _key(job) for other in rooms)
    before: int = connection.execute(_COUNT_BEFORE, _place(job)).scalar_one()
    return 1 + before + sum(_key(other)[1:] > _key(job)[1:] for other in rooms)


def position_among(waiting: Sequence[Job], job: Job) -> int | None:
    """The same as `position`, computed from all jobs that wait in the queue, in order."""
    return 1 + bisect_left(waiting, _key(job), key=_key) if job.status is JobStatus.QUEUED else None


def page(connection: Connection, scope: Scope, queue: str, *, page_size: int, page_token: str | None) -> WaitingJobs:
    query = _IN_QUEUE.where(_jobs.c.room_at.is_(None))
    rooms: list[Job] = []
    values: dict[str, Any] = {"in_queue": queue}
    if page_token is None:
        rooms = _in_order(job for job in _find(_WITH_ROOM, connection, scope) if job.queue == queue)
    else:
        key, job_id = position_of(page_token, _ORDER, float)
        query = query.where(sa.tuple_(_jobs.c.order_key, _jobs.c.job_id) > _THERE)
        values |= {"key": key, "id": job_id}
    rest = [_job_from_row(row) for row in connection.execute(query.limit(page_size + 1), values)]
    jobs = [*rooms, *rest[:page_size]]
    last = rest[page_size - 1] if len(rest) > page_size else None
    return WaitingJobs(
        jobs=jobs,
        first_position=(position(connection, scope, jobs[0]) or 1) if jobs else 1,
        next_page_token=token_after(_ORDER, last.order_key, last.job_id) if last else None,
    )


def counts(connection: Connection, scope: Scope, queue: str | None = None) -> dict[str, QueueCounts]:
    """Counts of each queue that has unfinished jobs, or of one queue."""
    scope.require_everything()

    def ask(query: sa.Select[Any]) -> Iterable[Any]:
        return connection.execute(query if queue is None else query.where(_jobs.c.queue == queue))

    found: dict[str, dict[str, Any]] = {}
    for name, status, count in ask(_COUNT):
        values = found.setdefault(name, {})
        counted = "running" if status in ACTIVE else {"QUEUED": "depth", "PAUSED": "paused"}.get(status)
        if counted is not None:
            values[counted] = values.get(counted, 0) + count
    for name, gpus in ask(_GPUS_HELD):
        found.setdefault(name, {})["gpus_held"] = gpus
    for name, oldest in ask(_OLDEST):
        found.setdefault(name, {})["oldest_queued_at"] = oldest
    return {name: QueueCounts(**values) for name, values in found.items()}


def by_status(connection: Connection, scope: Scope) -> dict[JobStatus, int]:
    scope.require_everything()
    found: Counter[JobStatus] = Counter()
    for _, status, count in connection.execute(_COUNT):
        found[JobStatus(status)] += count
    return found


def count_jobs(connection: Connection, scope: Scope) -> dict[tuple[str, str], int]:
    """Jobs by status and queue, deleted ones included. Cheap, because an index serves it: metrics read it often."""
    scope.require_everything()
    return {(status, queue): count for status, queue, count in connection.execute(_BY_STATUS_AND_QUEUE)}


def oldest_waiting(connection: Connection, scope: Scope) -> dict[str, float]:
    """When the job that waits longest in each queue was queued."""
    scope.require_everything()
    return {queue: since for queue, since in connection.execute(_OLDEST) if since is not None}


def _key(job: Job) -> tuple[float, float, str]:
    """The order of the scheduler within a queue: first the jobs that room is being made for."""
    return (math.inf if job.room_at is None else job.room_at, job.order_key, job.job_id)


def _in_order(jobs: Iterable[Job]) -> list[Job]:
    return sorted(jobs, key=_key)


def _place(job: Job) -> dict[str, Any]:
    return {"in_queue": job.queue, "key": job.order_key, "id": job.job_id}


def _find(query: PreparedStatement, connection: Connection, scope: Scope, **values: Any) -> list[Job]:
    scope.require_everything()
    return [_job_from_row(row) for row in query.rows(connection, values)]


def _job_from_row(row: Sequence[Any]) -> Job:
    of_job, of_attempt = row[: len(_JOBS.fields)], row[len(_JOBS.fields) :]
    backend = of_job[_JOBS.fields.index("backend")]
    attempt = None if of_attempt[0] is None else _ATTEMPTS.from_row(of_attempt, token="", backend=backend)
    return _JOBS.from_row(of_job, spec={}, attempt=attempt)


_JOBS = Records(
    Job,
    _jobs,
    only=(
        *("account_id", "job_id", "handle", "name", "created_at", "root_job_id", "spec_version", "workload_kind"),
        *("backend", "queue", "priority", "max_retries", "preemptible", "max_runtime_s", "message", "version"),
        *("can_save", "retries_used", "preemptions_used", "queued_at", "not_before", "room_at", "started_at"),
        *("updated_at", "status_at", "runtime_s", "last_save_s", "attempt_count", "needs", "lifetime", "status"),
        *("desired", "progress"),
    ),
)
_ATTEMPTS = Records(
    Attempt,
    _attempts,
    only=("number", "shares", "created_at", "stop", "stop_save", "stop_grace_s", "stop_at", "started_at"),
)

_SELECT: sa.Select[Any] = sa.select(
    *_JOBS.columns, *(column.label(f"attempt_{column.name}") for column in _ATTEMPTS.columns)
).select_from(_jobs.outerjoin(_attempts, schema.is_current_attempt))
_QUEUED = _jobs.c.status == JobStatus.QUEUED.value
_THERE = sa.tuple_(bindparam("key"), bindparam("id"))
_BEFORE = sa.tuple_(_jobs.c.order_key, _jobs.c.job_id) < _THERE
_IN_QUEUE = _SELECT.where(_QUEUED, _jobs.c.queue == bindparam("in_queue")).order_by(_jobs.c.order_key, _jobs.c.job_id)
_HOLDING = PreparedStatement(_SELECT.where(_jobs.c.status.in_([sa.literal(status.value) for status in sorted(ACTIVE)])))
_WITH_ROOM = PreparedStatement(_SELECT.where(_QUEUED, _jobs.c.room_at.is_not(None)))
_FIRST = PreparedStatement(
    _SELECT.where(
        # The ids alone are sorted: with very many jobs, whole rows would take long.
        _jobs.c.job_id.in_(
            sa.select(_jobs.c.job_id)
            .where(_QUEUED)
            .order_by(_jobs.c.order_key, _jobs.c.job_id)
            .limit(bindparam("most"))
        )
    )
)
_AHEAD = PreparedStatement(_IN_QUEUE.where(_BEFORE).limit(bindparam("most")))
_COUNT_BEFORE = sa.select(sa.func.count()).where(_QUEUED, _jobs.c.queue == bindparam("in_queue"), _BEFORE)
_COUNT = (
    sa.select(_jobs.c.queue, _jobs.c.status, sa.func.count())
    .where(_jobs.c.status.in_(sorted(UNFINISHED)))
    .group_by(_jobs.c.queue, _jobs.c.status)
)
_GPUS_HELD = (
    sa.select(_jobs.c.queue, sa.func.count())
    .select_from(_gpus.join(_jobs, sa.and_(_jobs.c.job_id == _gpus.c.job_id, _jobs.c.account_id == _gpus.c.account_id)))
    .group_by(_jobs.c.queue)
)
_OLDEST = sa.select(_jobs.c.queue, sa.func.min(_jobs.c.queued_at)).where(_QUEUED).group_by(_jobs.c.queue)
_BY_STATUS_AND_QUEUE = sa.select(_jobs.c.status, _jobs.c.queue, sa.func.count()).group_by(_jobs.c.status, _jobs.c.queue)

"""Queues: where jobs wait. They belong to the cluster; `default` is always there."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, bindparam, delete, insert, select, update

from trainmaster.protocol.launch import Lifetime
from trainmaster.protocol.reasons import StopCause
from trainmaster.server.core.errors import ConflictError, NotFoundError
from trainmaster.server.core.job import Attempt, Job, Progress
from trainmaster.server.core.resources import ClusterEvent, Queue, share_from_json
from trainmaster.server.core.states import ACTIVE, TERMINAL, Desired, JobStatus
from trainmaster.server.store import events, schema
from trainmaster.server.store.page_tokens import position_of, token_after
from trainmaster.server.store.records import Prepared, needs_of, prepared_by_scope
from trainmaster.server.store.scope import Scope

DEFAULT = "default"

_queues = schema.queues

_QUEUES = select(*(_queues.c[name] for name in Queue.__dataclass_fields__))
_NAMED = Prepared(select(_queues.c.name).where(_queues.c.name == bindparam("wanted")))


def all(connection: Connection, scope: Scope) -> list[Queue]:  # noqa: A001, ARG001 - `queues.all`; they are everybody's
    """Every queue, by name."""
    return [Queue(**row._mapping) for row in connection.execute(_QUEUES.order_by(_queues.c.name))]


def get(connection: Connection, scope: Scope, name: str) -> Queue:  # noqa: ARG001 - queues are everybody's
    """One queue.

    Raises:
        NotFoundError: there is none of that name.
    """
    row = connection.execute(_QUEUES.where(_queues.c.name == name)).first()
    if row is None:
        raise NotFoundError(f"there is no queue {name}")
    return Queue(**row._mapping)


def exists(connection: Connection, scope: Scope, name: str) -> bool:  # noqa: ARG001 - queues are everybody's
    """Whether there is such a queue."""
    return bool(_NAMED.rows(connection, {"wanted": name}))


def touch(connection: Connection, scope: Scope) -> None:
    """Write the default queue as it is, to see whether the database takes anything."""
    scope.require_everything()
    connection.execute(update(_queues).where(_queues.c.name == DEFAULT).values(name=_queues.c.name))


def put(connection: Connection, scope: Scope, queue: Queue, now: float) -> None:
    """Make a queue, or change its weight and quota; nothing is written where nothing changes."""
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
    """Take a queue away.

    Raises:
        NotFoundError: there is none of that name.
        ConflictError: it is the default queue, or jobs that have not ended are in it.
    """
    scope.require_everything()
    get(connection, scope, name)
    if name == DEFAULT:
        raise ConflictError("the default queue is always there; give it a quota of 0 to hold its GPU jobs back")
    live = sorted(frozenset(JobStatus) - TERMINAL)
    query = select(schema.jobs.c.job_id).where(schema.jobs.c.queue == name, schema.jobs.c.status.in_(live)).limit(1)
    if connection.execute(query).first() is not None:
        raise ConflictError(f"jobs that have not ended are in queue {name}; move them with `trainmaster edit --queue`")
    connection.execute(delete(_queues).where(_queues.c.name == name))
    event = ClusterEvent(at=now, type="queue_removed", subject=f"queue/{name}", message=f"queue {name} was removed")
    events.append_to_cluster(connection, scope, [event])


# What waits and what runs, as the scheduler sees it: read in bounded pieces, to answer questions about queues.
#
# Jobs come without what only people and workers read: their spec, labels and streams.

_EVERYTHING = Scope.everything()
_ORDER = "scheduler"
"""What page tokens of a queue say that it is ordered by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCounts:
    """How much is in a queue, over all accounts."""

    depth: int = 0
    running: int = 0
    paused: int = 0
    gpus_held: int = 0
    oldest_queued_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePage:
    """A part of a queue, in the order of the scheduler."""

    jobs: Sequence[Job]
    first_position: int
    next_page_token: str | None


def holding(connection: Connection, scope: Scope) -> list[Job]:
    """Every job that has a current attempt."""
    return _found(_HOLDING, connection, scope)


def first(connection: Connection, scope: Scope, limit: int) -> list[Job]:
    """The jobs that the scheduler comes to first, of all queues, in its order."""
    found = _found(_FIRST, connection, scope, most=limit)
    return _in_order({job.job_id: job for job in (*_found(_WITH_ROOM, connection, scope), *found)}.values())


def ahead(connection: Connection, scope: Scope, job: Job, limit: int) -> list[Job]:
    """The first of the jobs that wait in a job's queue before it; of whatever account, where the scope allows."""
    return _found(_AHEAD, connection, scope, most=limit, **_place(job))


def position(connection: Connection, scope: Scope, job: Job) -> int | None:
    """A job's place in its queue, from 1, among the jobs of all accounts; None when it does not wait there."""
    scope.require(job.account_id)
    if job.status is not JobStatus.QUEUED:
        return None
    rooms = [other for other in _found(_WITH_ROOM, connection, _EVERYTHING) if other.queue == job.queue]
    if job.room_at is not None:
        return 1 + sum(_key(other) < _key(job) for other in rooms)
    before: int = connection.execute(_COUNT_BEFORE, _place(job)).scalar_one()
    return 1 + before + sum(_key(other)[1:] > _key(job)[1:] for other in rooms)


def position_among(waiting: Sequence[Job], job: Job) -> int | None:
    """The same among all jobs that wait in its queue, in order."""
    return 1 + bisect_left(waiting, _key(job), key=_key) if job.status is JobStatus.QUEUED else None


def page(connection: Connection, scope: Scope, queue: str, *, page_size: int, page_token: str | None) -> QueuePage:
    """A part of a queue, in the order of the scheduler.

    Raises:
        SpecError: the token is not one of such a list.
    """
    query = scope.limit(_IN_QUEUE.where(_jobs.c.room_at.is_(None)), _jobs.c.account_id)
    rooms: list[Job] = []
    values: dict[str, Any] = {"in_queue": queue}
    if page_token is None:
        rooms = _in_order(job for job in _found(_WITH_ROOM, connection, scope) if job.queue == queue)
    else:
        key, job_id = position_of(page_token, _ORDER, float)
        query = query.where(_AFTER)
        values |= {"key": key, "id": job_id}
    rest = [_job_from_row(row) for row in connection.execute(query.limit(page_size + 1), values)]
    jobs = [*rooms, *rest[:page_size]]
    last = rest[page_size - 1] if len(rest) > page_size else None
    return QueuePage(
        jobs=jobs,
        first_position=(position(connection, _EVERYTHING, jobs[0]) or 1) if jobs else 1,
        next_page_token=token_after(_ORDER, last.order_key, last.job_id) if last else None,
    )


def counts(connection: Connection, scope: Scope, queue: str | None = None) -> dict[str, QueueCounts]:
    """How much is in each queue that has any job that has not ended, or in one of them."""

    def ask(query: sa.Select[Any]) -> Iterable[Any]:
        query = scope.limit(query, _jobs.c.account_id)
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
    """How many jobs that have not ended are in each state."""
    found: dict[JobStatus, int] = {}
    for _, status, count in connection.execute(scope.limit(_COUNT, _jobs.c.account_id)):
        found[JobStatus(status)] = found.get(JobStatus(status), 0) + count
    return found


def _key(job: Job) -> tuple[float, float, str]:
    """The order of the scheduler within a queue: first those that room is being made for."""
    return (math.inf if job.room_at is None else job.room_at, job.order_key, job.job_id)


def _in_order(jobs: Iterable[Job]) -> list[Job]:
    return sorted(jobs, key=_key)


def _place(job: Job) -> dict[str, Any]:
    return {"in_queue": job.queue, "key": job.order_key, "id": job.job_id}


def _found(query: Mapping[bool, Prepared], connection: Connection, scope: Scope, **values: Any) -> list[Job]:
    rows = query[scope.account_id is None].rows(connection, {**values, "account": scope.account_id})
    return [_job_from_row(row) for row in rows]


def _job_from_row(row: Sequence[Any]) -> Job:
    values = dict(zip(_OF_JOB, row, strict=False))
    values["needs"] = needs_of(values["needs"])
    values["lifetime"] = Lifetime(values["lifetime"])
    values["status"] = JobStatus(values["status"])
    values["desired"] = Desired(values["desired"])
    values["preemptible"] = bool(values["preemptible"])
    values["can_save"] = bool(values["can_save"])
    values["progress"] = _NO_PROGRESS if values["progress"] == "{}" else _progress(json.loads(values["progress"]))
    attempt = row[len(_OF_JOB) :]
    return Job(**values, spec={}, attempt=None if attempt[0] is None else _attempt_from_row(values["backend"], attempt))


def _progress(document: Mapping[str, Any]) -> Progress:
    return Progress(**{name: document[name] for name in _PROGRESS if name in document})


def _attempt_from_row(backend: str, row: Sequence[Any]) -> Attempt:
    values = dict(zip(_OF_ATTEMPT, row, strict=True))
    values["shares"] = tuple(share_from_json(share) for share in json.loads(values["shares"]))
    values["stop"] = None if values["stop"] is None else StopCause(values["stop"])
    values["stop_save"] = bool(values["stop_save"])
    return Attempt(**values, token="", backend=backend)


_jobs, _attempts, _gpus = schema.jobs, schema.attempts, schema.allocated_gpus

_OF_JOB = (
    *("account_id", "job_id", "handle", "name", "created_at", "root_job_id", "spec_version", "workload_kind"),
    *("backend", "queue", "priority", "max_retries", "preemptible", "max_runtime_s", "message", "version", "can_save"),
    *("retries_used", "preemptions_used", "queued_at", "not_before", "room_at", "started_at", "updated_at"),
    *("status_at", "runtime_s", "last_save_s", "attempt_count", "needs", "lifetime", "status", "desired"),
    "progress",
)
_NO_PROGRESS = Progress()
_PROGRESS = ("step", "total_steps", "percent", "eta_s", "step_at", "first_step", "first_at")
_OF_ATTEMPT = ("number", "shares", "created_at", "stop", "stop_save", "stop_grace_s", "stop_at", "started_at")

_SELECT: sa.Select[Any] = sa.select(
    *(_jobs.c[name] for name in _OF_JOB),
    *(_attempts.c[name].label(f"attempt_{name}") for name in _OF_ATTEMPT),
).select_from(
    _jobs.outerjoin(
        _attempts,
        sa.and_(
            _attempts.c.job_id == _jobs.c.job_id,
            _attempts.c.number == _jobs.c.attempt_number,
            _attempts.c.account_id == _jobs.c.account_id,
        ),
    )
)
_QUEUED = _jobs.c.status == JobStatus.QUEUED.value
_THERE = sa.tuple_(bindparam("key"), bindparam("id"))
_BEFORE = sa.tuple_(_jobs.c.order_key, _jobs.c.job_id) < _THERE
_AFTER = sa.tuple_(_jobs.c.order_key, _jobs.c.job_id) > _THERE
_IN_QUEUE = _SELECT.where(_QUEUED, _jobs.c.queue == bindparam("in_queue")).order_by(_jobs.c.order_key, _jobs.c.job_id)
_HOLDING = prepared_by_scope(
    _SELECT.where(_jobs.c.status.in_([sa.literal(status.value) for status in sorted(ACTIVE)])), _jobs.c.account_id
)
_WITH_ROOM = prepared_by_scope(_SELECT.where(_QUEUED, _jobs.c.room_at.is_not(None)), _jobs.c.account_id)
_FIRST_IDS = (
    sa.select(_jobs.c.job_id).where(_QUEUED).order_by(_jobs.c.order_key, _jobs.c.job_id).limit(bindparam("most"))
)
_FIRST = {
    True: Prepared(_SELECT.where(_jobs.c.job_id.in_(_FIRST_IDS))),
    False: Prepared(_SELECT.where(_jobs.c.job_id.in_(_FIRST_IDS.where(_jobs.c.account_id == bindparam("account"))))),
}
"""The ids alone are sorted: with very many jobs, whole rows would take long."""
_AHEAD = prepared_by_scope(_IN_QUEUE.where(_BEFORE).limit(bindparam("most")), _jobs.c.account_id)
_COUNT_BEFORE = sa.select(sa.func.count()).where(_QUEUED, _jobs.c.queue == bindparam("in_queue"), _BEFORE)
_COUNT = (
    sa.select(_jobs.c.queue, _jobs.c.status, sa.func.count())
    .where(_jobs.c.status.in_(sorted(frozenset(JobStatus) - TERMINAL)))
    .group_by(_jobs.c.queue, _jobs.c.status)
)
_GPUS_HELD = (
    sa.select(_jobs.c.queue, sa.func.count())
    .select_from(_gpus.join(_jobs, sa.and_(_jobs.c.job_id == _gpus.c.job_id, _jobs.c.account_id == _gpus.c.account_id)))
    .group_by(_jobs.c.queue)
)
_OLDEST = sa.select(_jobs.c.queue, sa.func.min(_jobs.c.queued_at)).where(_QUEUED).group_by(_jobs.c.queue)
_BY_STATUS_AND_QUEUE = sa.select(_jobs.c.status, _jobs.c.queue, sa.func.count()).group_by(_jobs.c.status, _jobs.c.queue)


def count_jobs(connection: Connection, scope: Scope) -> dict[tuple[str, str], int]:
    """Jobs by status and queue, deleted ones included. Cheap, because an index serves it: metrics read it often."""
    rows = connection.execute(scope.limit(_BY_STATUS_AND_QUEUE, _jobs.c.account_id))
    return {(status, queue): count for status, queue, count in rows}


def oldest_waiting(connection: Connection, scope: Scope) -> dict[str, float]:
    """When the oldest waiting job of each queue was queued."""
    rows = connection.execute(scope.limit(_OLDEST, _jobs.c.account_id))
    return {queue: since for queue, since in rows if since is not None}

"""What waits and what runs, as the scheduler sees it: read in bounded pieces, to answer questions about queues.

Jobs come without what only people and workers read: their spec, labels and streams.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, bindparam

from trainmaster.core.job import Attempt, Job, Progress
from trainmaster.core.resources import needs_from_json, share_from_json
from trainmaster.core.states import ACTIVE, TERMINAL, Desired, JobStatus
from trainmaster.protocol.launch import Lifetime
from trainmaster.protocol.reasons import StopCause
from trainmaster.store import schema
from trainmaster.store.paging import position_of, token_after
from trainmaster.store.scope import Scope

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
    return _read(connection.execute(scope.limit(_HOLDING, _jobs.c.account_id)))


def first(connection: Connection, scope: Scope, limit: int) -> list[Job]:
    """The jobs that the scheduler comes to first, of all queues."""
    ids = scope.limit(_QUEUED_IDS, _jobs.c.account_id).limit(limit)
    found = _read(connection.execute(_SELECT.where(_jobs.c.job_id.in_(ids))))
    made_room_for = _read(connection.execute(scope.limit(_WITH_ROOM, _jobs.c.account_id)))
    return _in_order({job.job_id: job for job in (*made_room_for, *found)}.values())


def ahead(connection: Connection, scope: Scope, job: Job, limit: int) -> list[Job]:
    """The first of the jobs that wait in a job's queue before it; of whatever account, where the scope allows."""
    query = scope.limit(_IN_QUEUE.where(_BEFORE), _jobs.c.account_id).limit(limit)
    return _read(connection.execute(query, _place(job)))


def position(connection: Connection, scope: Scope, job: Job, everything: Sequence[Job] | None = None) -> int | None:
    """A job's place in its queue, from 1, among the jobs of all accounts; None when it does not wait there.

    Args:
        connection: to the database.
        scope: of whoever asks.
        job: which one.
        everything: all jobs that wait, where they were read already.
    """
    scope.require(job.account_id)
    if job.status is not JobStatus.QUEUED:
        return None
    if everything is not None:
        return 1 + sum(other.queue == job.queue and _key(other) < _key(job) for other in everything)
    rooms = [other for other in _read(connection.execute(_WITH_ROOM)) if other.queue == job.queue]
    if job.room_at is not None:
        return 1 + sum(_key(other) < _key(job) for other in rooms)
    before: int = connection.execute(_COUNT_BEFORE, _place(job)).scalar_one()
    return 1 + before + sum(_key(other)[1:] > _key(job)[1:] for other in rooms)


def page(connection: Connection, scope: Scope, queue: str, *, page_size: int, page_token: str | None) -> QueuePage:
    """A part of a queue, in the order of the scheduler.

    Raises:
        SpecError: the token is not one of such a list.
    """
    query = scope.limit(_IN_QUEUE.where(_jobs.c.room_at.is_(None)), _jobs.c.account_id)
    rooms: list[Job] = []
    values: dict[str, Any] = {"in_queue": queue}
    if page_token is None:
        found = _read(connection.execute(scope.limit(_WITH_ROOM, _jobs.c.account_id)))
        rooms = _in_order(job for job in found if job.queue == queue)
    else:
        key, job_id = position_of(page_token, _ORDER, float)
        query = query.where(_AFTER)
        values |= {"key": key, "id": job_id}
    rest = _read(connection.execute(query.limit(page_size + 1), values))
    jobs = [*rooms, *rest[:page_size]]
    last = rest[page_size - 1] if len(rest) > page_size else None
    return QueuePage(
        jobs=jobs,
        first_position=(position(connection, Scope.everything(), jobs[0]) or 1) if jobs else 1,
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


def _read(rows: Iterable[Any]) -> list[Job]:
    return [_job_from_row(row._mapping) for row in rows]


def _job_from_row(row: Mapping[Any, Any]) -> Job:
    values = {name: row[name] for name in _PLAIN}
    progress = json.loads(row["progress"])
    return Job(
        **values,
        spec={},
        needs=needs_from_json(json.loads(row["needs"])),
        lifetime=Lifetime(row["lifetime"]),
        status=JobStatus(row["status"]),
        desired=Desired(row["desired"]),
        progress=Progress(**{name: progress[name] for name in _PROGRESS if name in progress}),
        attempt=None if row["attempt_shares"] is None else _attempt_from_row(row),
    )


def _attempt_from_row(row: Mapping[Any, Any]) -> Attempt:
    values = {name: row[f"attempt_{name}"] for name in _OF_ATTEMPT}
    stop = values.pop("stop")
    shares = tuple(share_from_json(share) for share in json.loads(values.pop("shares")))
    return Attempt(
        **values, token="", backend=row["backend"], shares=shares, stop=None if stop is None else StopCause(stop)
    )


_jobs, _attempts, _gpus = schema.jobs, schema.attempts, schema.allocated_gpus

_PLAIN = (
    *("account_id", "job_id", "handle", "name", "created_at", "root_job_id", "spec_version", "workload_kind"),
    *("backend", "queue", "priority", "max_retries", "preemptible", "max_runtime_s", "message", "version", "can_save"),
    *("retries_used", "preemptions_used", "queued_at", "not_before", "room_at", "started_at", "updated_at"),
    *("status_at", "runtime_s", "last_save_s", "attempt_count"),
)
_PROGRESS = ("step", "total_steps", "percent", "eta_s", "step_at", "first_step", "first_at")
_OF_ATTEMPT = ("number", "shares", "created_at", "stop", "stop_save", "stop_grace_s", "stop_at", "started_at")

_SELECT: sa.Select[Any] = sa.select(
    *(_jobs.c[name] for name in (*_PLAIN, "needs", "lifetime", "status", "desired", "progress")),
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
_HOLDING = _SELECT.where(_jobs.c.status.in_(sorted(ACTIVE)))
_WITH_ROOM = _SELECT.where(_QUEUED, _jobs.c.room_at.is_not(None))
_QUEUED_IDS = sa.select(_jobs.c.job_id).where(_QUEUED).order_by(_jobs.c.order_key, _jobs.c.job_id)
_IN_QUEUE = _SELECT.where(_QUEUED, _jobs.c.queue == bindparam("in_queue")).order_by(_jobs.c.order_key, _jobs.c.job_id)
_THERE = sa.tuple_(bindparam("key"), bindparam("id"))
_BEFORE = sa.tuple_(_jobs.c.order_key, _jobs.c.job_id) < _THERE
_AFTER = sa.tuple_(_jobs.c.order_key, _jobs.c.job_id) > _THERE
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

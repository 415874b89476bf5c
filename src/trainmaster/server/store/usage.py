"""Usage: what each attempt held, from when its ranks ran to its end, or until now. Written once, with that end."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from trainmaster.server.core.job import Attempt, Job
from trainmaster.server.core.states import ACTIVE
from trainmaster.server.store import schema
from trainmaster.server.store.records import PreparedStatement, dumps
from trainmaster.server.store.scope import Scope

LABEL = "label:"
"""In front of a label's key, where usage is grouped by its value."""
GROUPS = ("job", "attempt", "queue", "account", "day")
"""What usage can be grouped by, beside a label. Days are those of UTC."""

_DAY_S = 86_400

_usage, _jobs, _attempts = schema.usage, schema.jobs, schema.attempts
_INSERT = PreparedStatement(sa.insert(_usage))


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    key: str
    """The group; empty for jobs that lack the label."""
    jobs: int
    attempts: int
    gpu_seconds: float
    cpu_seconds: float
    """Of allocated cores, however busy they were."""
    wall_seconds: float


def record(connection: Connection, scope: Scope, job: Job, attempt: Attempt) -> None:
    """Record what an attempt that ended has used; one that never started used nothing."""
    scope.require(job.account_id)
    if attempt.started_at is None or attempt.ended_at is None:
        return
    row = {"account_id": job.account_id, "job_id": job.job_id, "attempt": attempt.number, "queue": job.queue}
    held = {
        "gpus": sum(len(share.gpus) for share in attempt.shares),
        "cpu_cores": sum(share.cpu_cores for share in attempt.shares),
    }
    times = {"started_at": attempt.started_at, "ended_at": attempt.ended_at}
    _INSERT.execute(connection, {**row, **held, **times, "labels": dumps(dict(job.labels))})


def total(connection: Connection, scope: Scope, *, since: float, until: float, now: float) -> Used:
    held = _held(scope, since, until, now)
    row = connection.execute(sa.select(*_sums(held, _seconds(held.c.begin, held.c.end)))).one()
    return Used(key="", **row._mapping)


def by_group(
    connection: Connection, scope: Scope, group: str, *, since: float, until: float, now: float, limit: int
) -> list[Used]:
    """What each group of attempts used in an interval: days in order, other groups by usage."""
    held: sa.FromClause = _held(scope, since, until, now)
    seconds = _seconds(held.c.begin, held.c.end)
    key: sa.ColumnElement[Any]
    match group:
        case "job" | "account":
            key = held.c[f"{group}_id"]
        case "queue":
            key = held.c.queue
        case "attempt":
            key = held.c.job_id + "." + sa.cast(held.c.attempt, sa.Text)
        case "day":
            held = _by_day(held, connection.dialect.name)
            key = held.c.day
            first, last = held.c.day * _DAY_S, (held.c.day + 1) * _DAY_S
            seconds = _seconds(_greater(held.c.begin, first), _lesser(held.c.end, last))
        case _ if group.startswith(LABEL):
            key = _label(held.c.labels, group.removeprefix(LABEL), connection.dialect.name)
        case _:
            raise ValueError(f"usage cannot be grouped by {group!r}")
    query = sa.select(key.label("key"), *_sums(held, seconds)).group_by("key").limit(limit)
    if group == "day":
        query = query.order_by("key")
    else:
        query = query.order_by(sa.desc("gpu_seconds"), sa.desc("cpu_seconds"), sa.desc("wall_seconds"), "key")
    return [Used(**{**row._mapping, "key": _shown(group, row.key)}) for row in connection.execute(query)]


def _held(scope: Scope, since: float, until: float, now: float) -> sa.Subquery:
    """What attempts held in an interval, cut to the interval."""
    ended = sa.select(
        *(_usage.c[name] for name in ("account_id", "job_id", "attempt", "queue", "labels")),
        _greater(_usage.c.started_at, sa.literal(since)).label("begin"),
        _lesser(_usage.c.ended_at, sa.literal(until)).label("end"),
        *(_usage.c[name] for name in ("gpus", "cpu_cores")),
    ).where(_usage.c.ended_at > since, _usage.c.started_at < until)
    gpus, shares = schema.allocated_gpus, schema.allocations
    cores = sa.func.coalesce(sa.func.sum(shares.c.cpu_cores), 0)
    until_now = min(until, now)
    running = (
        sa.select(
            *(_jobs.c.account_id, _jobs.c.job_id, _attempts.c.number, _jobs.c.queue, _jobs.c.labels),
            _greater(_attempts.c.started_at, sa.literal(since)),
            sa.literal(until_now, sa.Double),
            sa.select(sa.func.count()).where(_held_by_job(gpus)).scalar_subquery(),
            sa.select(cores).where(_held_by_job(shares)).scalar_subquery(),
        )
        .select_from(_jobs.join(_attempts, schema.is_current_attempt))
        .where(_jobs.c.status.in_(sorted(ACTIVE)), _attempts.c.started_at < until_now, sa.literal(since) < until_now)
    )
    return sa.union_all(scope.limit(ended, _usage.c.account_id), scope.limit(running, _jobs.c.account_id)).subquery(
        "held"
    )


def _held_by_job(table: sa.Table) -> sa.ColumnElement[bool]:
    """Only the current attempt of a job holds anything."""
    return sa.and_(table.c.job_id == _jobs.c.job_id, table.c.account_id == _jobs.c.account_id)


def _by_day(held: sa.FromClause, dialect: str) -> sa.CTE:
    """The same, with a row for each day that an attempt touches."""
    day = held.c.begin / _DAY_S
    # To an integer SQLite cuts a number off, and PostgreSQL rounds it.
    whole = sa.cast(day if dialect == "sqlite" else sa.func.floor(day), sa.BigInteger)
    days = sa.select(held, whole.label("day")).cte("days", recursive=True)
    others = [column for column in days.c if column.name != "day"]
    return days.union_all(sa.select(*others, days.c.day + 1).where((days.c.day + 1) * _DAY_S < days.c.end))


def _sums(held: sa.FromClause, seconds: sa.ColumnElement[float]) -> tuple[sa.ColumnElement[Any], ...]:
    return (
        sa.func.count(sa.distinct(held.c.job_id)).label("jobs"),
        sa.func.count().label("attempts"),
        sa.cast(sa.func.coalesce(sa.func.sum(held.c.gpus * seconds), 0), sa.Double).label("gpu_seconds"),
        sa.cast(sa.func.coalesce(sa.func.sum(held.c.cpu_cores * seconds), 0), sa.Double).label("cpu_seconds"),
        sa.cast(sa.func.coalesce(sa.func.sum(seconds), 0), sa.Double).label("wall_seconds"),
    )


def _seconds(begin: sa.ColumnElement[float], end: sa.ColumnElement[float]) -> sa.ColumnElement[float]:
    return _greater(end - begin, sa.literal(0.0))


def _greater(one: sa.ColumnElement[float], other: sa.ColumnElement[float]) -> sa.ColumnElement[float]:
    return sa.case((one > other, one), else_=other)


def _lesser(one: sa.ColumnElement[float], other: sa.ColumnElement[float]) -> sa.ColumnElement[float]:
    return sa.case((one < other, one), else_=other)


def _label(labels: sa.ColumnElement[str], key: str, dialect: str) -> sa.ColumnElement[str]:
    if dialect == "sqlite":
        return sa.func.coalesce(sa.func.json_extract(labels, f'$."{key}"'), "")
    return sa.func.coalesce(sa.cast(labels, sa.JSON)[key].as_string(), "")


def _shown(group: str, key: Any) -> str:
    return datetime.fromtimestamp(key * _DAY_S, UTC).date().isoformat() if group == "day" else str(key)

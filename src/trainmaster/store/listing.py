"""Lists of jobs: filtered, ordered, a page at a time, and as fast for the millionth job as for the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from trainmaster.core.errors import Problem, SpecError
from trainmaster.core.job import Job
from trainmaster.core.states import JobStatus
from trainmaster.store import jobs, schema
from trainmaster.store.paging import position_of, token_after
from trainmaster.store.records import label_mark
from trainmaster.store.scope import Scope

MAX_PAGE_SIZE = 100
MAX_TOTAL_COUNT = 10_001
"""Counting goes no further: nobody pages through more, and a list must stay fast."""

_jobs, _labels = schema.jobs, schema.job_labels

_ORDERS: Mapping[str, type[str] | type[float]] = {
    "created_at": float,
    "updated_at": float,
    "priority": float,
    "name": str,
    "handle": str,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobQuery:
    """Which jobs to list, and how. What is empty or None does not filter."""

    statuses: tuple[JobStatus, ...] = ()
    """Any of these."""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Every key, with any of its values."""
    queue: str | None = None
    kinds: tuple[str, ...] = ()
    """Any of these kinds of workload."""
    name: str | None = None
    parent_job_id: str | None = None
    order_by: str = "-created_at"
    """`created_at`, `updated_at`, `priority`, `name` or `handle`, in whose place a job without one has its id; with a
    `-` in front, the greatest first."""
    page_size: int = 20
    page_token: str | None = None

    def token_after(self, job: Job) -> str:
        """The token of a page that goes on after a job of this list."""
        name = self.order_by.removeprefix("-")
        value = job.handle or job.job_id if name == "handle" else getattr(job, name)
        return token_after(self.order_by, value, job.job_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    """One page of a list of jobs."""

    jobs: tuple[Job, ...]
    next_page_token: str | None
    total_count: int
    """Over all pages; at most `MAX_TOTAL_COUNT`, which means: more than one less than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Where the ids of a list are read from, and which of the rows there count."""

    source: sa.FromClause
    order: sa.ColumnElement[Any]
    job_id: sa.ColumnElement[str]
    conditions: Sequence[sa.ColumnElement[bool]]


def page(connection: Connection, scope: Scope, query: JobQuery) -> JobPage:
    """One page of the jobs that a query asks for; deleted ones are never listed.

    Raises:
        SpecError: the order or the page's size is not possible, or the token is not one of such a list.
    """
    if not 1 <= query.page_size <= MAX_PAGE_SIZE:
        raise SpecError([Problem(field="page_size", message=f"must be from 1 to {MAX_PAGE_SIZE}")])
    name = query.order_by.removeprefix("-")
    if name not in _ORDERS:
        raise SpecError(
            [Problem(field="order_by", message=f"must be one of {', '.join(_ORDERS)}, or that after a '-'")]
        )
    rows = _labelled(connection, scope, query, name) if query.labels else _unlabelled(scope, query, name)
    found = _ids(connection, rows, query, name)
    loaded = {job.job_id: job for job in jobs.load(connection, scope, found[: query.page_size])}
    listed = tuple(loaded[job_id] for job_id in found[: query.page_size] if job_id in loaded)
    more = len(found) > query.page_size
    return JobPage(
        jobs=listed,
        next_page_token=query.token_after(listed[-1]) if more else None,
        total_count=_count(connection, rows) if more or query.page_token is not None else len(found),
    )


def _column(name: str) -> sa.ColumnElement[Any]:
    return sa.func.coalesce(_jobs.c.handle, _jobs.c.job_id) if name == "handle" else _jobs.c[name]


def _ids(connection: Connection, rows: _Rows, query: JobQuery, name: str) -> list[str]:
    """The ids of the page, and one more where the list goes on."""
    descending = query.order_by.startswith("-")
    conditions = list(rows.conditions)
    if query.page_token is not None:
        place, last = sa.tuple_(rows.order, rows.job_id), position_of(query.page_token, query.order_by, _ORDERS[name])
        conditions.append(place < sa.tuple_(*last) if descending else place > sa.tuple_(*last))
    order = (rows.order.desc(), rows.job_id.desc()) if descending else (rows.order, rows.job_id)
    statement = sa.select(rows.job_id).select_from(rows.source).where(*conditions).order_by(*order)
    return list(connection.execute(statement.limit(query.page_size + 1)).scalars())


def _count(connection: Connection, rows: _Rows) -> int:
    matching = sa.select(sa.literal(1)).select_from(rows.source).where(*rows.conditions).limit(MAX_TOTAL_COUNT)
    return connection.execute(sa.select(sa.func.count()).select_from(matching.subquery())).scalar_one()


def _unlabelled(scope: Scope, query: JobQuery, name: str) -> _Rows:
    conditions = [_jobs.c.deleted_at.is_(None), *_of_jobs(query)]
    if scope.account_id is not None:
        conditions.append(_jobs.c.account_id == scope.account_id)
    return _Rows(source=_jobs, order=_column(name), job_id=_jobs.c.job_id, conditions=conditions)


def _labelled(connection: Connection, scope: Scope, query: JobQuery, name: str) -> _Rows:
    """Read off the index of the rarest label; its rows say which other labels their job has.

    So nothing else is looked at, unless the query asks for more than labels. Deleted jobs have no labels there.
    """
    among = [] if scope.account_id is None else [_labels.c.account_id == scope.account_id]
    wanted = {key: [*among, *_having(key, values)] for key, values in query.labels.items()}
    rarest = min(wanted, key=lambda key: _size(connection, wanted[key])) if len(wanted) > 1 else next(iter(wanted))
    conditions = wanted[rarest]
    for key, values in query.labels.items():
        if key != rarest:
            conditions.append(sa.or_(*(_labels.c.marks.contains(label_mark(key, value)) for value in values)))
    of_jobs = _of_jobs(query)
    if name == "created_at" and not of_jobs:
        return _Rows(source=_labels, order=_labels.c.created_at, job_id=_labels.c.job_id, conditions=conditions)
    same = sa.and_(_jobs.c.job_id == _labels.c.job_id, _jobs.c.account_id == _labels.c.account_id)
    order = _labels.c.created_at if name == "created_at" else _column(name)
    return _Rows(
        source=_labels.join(_jobs, same), order=order, job_id=_labels.c.job_id, conditions=[*conditions, *of_jobs]
    )


def _having(key: str, values: tuple[str, ...]) -> list[sa.ColumnElement[bool]]:
    return [_labels.c.key == key, _labels.c.value == values[0] if len(values) == 1 else _labels.c.value.in_(values)]


def _size(connection: Connection, conditions: Sequence[sa.ColumnElement[bool]]) -> int:
    """How many jobs have a label, as far as that is quick to tell."""
    found = sa.select(sa.literal(1)).select_from(_labels).where(*conditions).limit(MAX_TOTAL_COUNT).subquery()
    return connection.execute(sa.select(sa.func.count()).select_from(found)).scalar_one()


def _of_jobs(query: JobQuery) -> list[sa.ColumnElement[bool]]:
    conditions: list[sa.ColumnElement[bool]] = []
    if query.statuses:
        conditions.append(_jobs.c.status.in_(query.statuses))
    if query.kinds:
        conditions.append(_jobs.c.workload_kind.in_(query.kinds))
    for name in ("queue", "name", "parent_job_id"):
        value = getattr(query, name)
        if value is not None:
            conditions.append(_jobs.c[name] == value)
    return conditions

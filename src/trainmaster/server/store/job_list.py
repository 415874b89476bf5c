"""Lists of jobs: filtered, ordered, a page at a time, and as fast for the millionth job as for the first."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, bindparam

from trainmaster.server.core.errors import Problem, SpecError
from trainmaster.server.core.job import Job
from trainmaster.server.core.states import JobStatus
from trainmaster.server.store import jobs, schema
from trainmaster.server.store.page_tokens import MAX_TOTAL_COUNT, position_of, token_after
from trainmaster.server.store.records import PreparedStatement, label_mark
from trainmaster.server.store.scope import Scope

MAX_PAGE_SIZE = 100
_EQUAL = ("queue", "name")
"""The columns that a query compares with one value."""
_MOST_SHAPES = 256

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
    """Which jobs to list, and how. Empty fields and None do not filter."""

    statuses: tuple[JobStatus, ...] = ()
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Every key, with any of its values."""
    queue: str | None = None
    kinds: tuple[str, ...] = ()
    name: str | None = None
    order_by: str = "-created_at"
    """`created_at`, `updated_at`, `priority`, `name` or `handle` (jobs without one by their id); with a `-` in front,
    the greatest first."""
    page_size: int = 20
    page_token: str | None = None

    def token_after(self, job: Job) -> str:
        name = self.order_by.removeprefix("-")
        value = job.handle or job.job_id if name == "handle" else getattr(job, name)
        return token_after(self.order_by, value, job.job_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    jobs: tuple[Job, ...]
    next_page_token: str | None
    total_count: int
    """Over all pages; `MAX_TOTAL_COUNT` means at least that many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIndex:
    """A page of a list of jobs, without the jobs themselves."""

    versions: Mapping[str, int]
    """By id, in the order of the list. A job with the same version is the same."""
    next_page_token: str | None
    total_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What decides on the SQL of a query; the rest are values."""

    order_by: str
    statuses: int
    kinds: int
    equal: tuple[str, ...]
    scoped: bool
    goes_on: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Where a list is read from, and which of the rows there count."""

    source: sa.FromClause
    order: sa.ColumnElement[Any]
    job_id: sa.ColumnElement[str]
    conditions: Sequence[sa.ColumnElement[bool]]


def page(connection: Connection, scope: Scope, query: JobQuery) -> JobPage:
    """One page of the jobs that a query asks for; deleted ones are never listed."""
    found = index(connection, scope, query)
    loaded = {job.job_id: job for job in jobs.load(connection, scope, list(found.versions))}
    return JobPage(
        jobs=tuple(loaded[job_id] for job_id in found.versions if job_id in loaded),
        next_page_token=found.next_page_token,
        total_count=found.total_count,
    )


def index(connection: Connection, scope: Scope, query: JobQuery) -> JobIndex:
    """The ids and versions of a page; SpecError when the order, the page size or the token is not valid."""
    if not 1 <= query.page_size <= MAX_PAGE_SIZE:
        raise SpecError([Problem(field="page_size", message=f"must be from 1 to {MAX_PAGE_SIZE}")])
    name = query.order_by.removeprefix("-")
    if name not in _ORDERS:
        message = f"must be one of {', '.join(_ORDERS)}, or that after a '-'"
        raise SpecError([Problem(field="order_by", message=message)])
    shape, values = _shape_of(scope, query)
    labelled = _labelled(connection, query, shape, values) if query.labels else None
    if labelled is None:
        listed = _page_statement(shape).rows(connection, values)
    else:
        found = connection.execute(_page_of(labelled, shape), values).all()
        versions = jobs.versions(connection, scope, [job_id for job_id, _ in found])
        listed = [(job_id, value, versions[job_id]) for job_id, value in found if job_id in versions]
    shown, more = listed[: query.page_size], len(listed) > query.page_size
    total_count = len(listed)
    if more or query.page_token is not None:
        if labelled is None:
            ((total_count,),) = _count_statement(shape).rows(connection, values)
        else:
            total_count = connection.execute(_count_of(labelled.source, labelled.conditions), values).scalar_one()
    return JobIndex(
        versions={job_id: version for job_id, _, version in shown},
        next_page_token=token_after(query.order_by, shown[-1][1], shown[-1][0]) if more else None,
        total_count=total_count,
    )


def _column(name: str) -> sa.ColumnElement[Any]:
    return sa.func.coalesce(_jobs.c.handle, _jobs.c.job_id) if name == "handle" else _jobs.c[name]


def _shape_of(scope: Scope, query: JobQuery) -> tuple[_Shape, dict[str, Any]]:
    equal = tuple(name for name in _EQUAL if getattr(query, name) is not None)
    shape = _Shape(
        order_by=query.order_by,
        statuses=len(query.statuses),
        kinds=len(query.kinds),
        equal=equal,
        scoped=scope.account_id is not None,
        goes_on=query.page_token is not None,
    )
    values: dict[str, Any] = {name: getattr(query, name) for name in equal}
    values |= {f"status_{number}": status.value for number, status in enumerate(query.statuses)}
    values |= {f"kind_{number}": kind for number, kind in enumerate(query.kinds)}
    values |= {"account": scope.account_id, "most": query.page_size + 1, "count_to": MAX_TOTAL_COUNT}
    if query.page_token is not None:
        kind = _ORDERS[query.order_by.removeprefix("-")]
        values["after"], values["after_id"] = position_of(query.page_token, query.order_by, kind)
    return shape, values


def _of_jobs(shape: _Shape) -> list[sa.ColumnElement[bool]]:
    conditions = [_jobs.c[name] == bindparam(name) for name in shape.equal]
    if shape.statuses:
        conditions.append(_jobs.c.status.in_([bindparam(f"status_{number}") for number in range(shape.statuses)]))
    if shape.kinds:
        conditions.append(_jobs.c.workload_kind.in_([bindparam(f"kind_{number}") for number in range(shape.kinds)]))
    return conditions


def _unlabelled(shape: _Shape) -> _Rows:
    conditions = [_jobs.c.deleted_at.is_(None), *_of_jobs(shape)]
    if shape.scoped:
        conditions.append(_jobs.c.account_id == bindparam("account"))
    order = _column(shape.order_by.removeprefix("-"))
    return _Rows(source=_jobs, order=order, job_id=_jobs.c.job_id, conditions=conditions)


def _page_of(rows: _Rows, shape: _Shape) -> sa.Select[Any]:
    """The ids of the page with the values of its order, and one more where the list goes on."""
    descending = shape.order_by.startswith("-")
    conditions = list(rows.conditions)
    if shape.goes_on:
        place, last = sa.tuple_(rows.order, rows.job_id), sa.tuple_(bindparam("after"), bindparam("after_id"))
        conditions.append(place < last if descending else place > last)
    order = (rows.order.desc(), rows.job_id.desc()) if descending else (rows.order, rows.job_id)
    page = sa.select(rows.job_id, rows.order).select_from(rows.source).where(*conditions).order_by(*order)
    return page.limit(bindparam("most"))


def _count_of(source: sa.FromClause, conditions: Sequence[sa.ColumnElement[bool]]) -> sa.Select[Any]:
    """How many rows match, up to `MAX_TOTAL_COUNT`."""
    matching: sa.Select[Any] = sa.select(sa.literal_column("1")).select_from(source).where(*conditions)
    return sa.select(sa.func.count()).select_from(matching.limit(bindparam("count_to")).subquery())


@functools.lru_cache(_MOST_SHAPES)
def _page_statement(shape: _Shape) -> PreparedStatement:
    return PreparedStatement(_page_of(_unlabelled(shape), shape).add_columns(_jobs.c.version))


@functools.lru_cache(_MOST_SHAPES)
def _count_statement(shape: _Shape) -> PreparedStatement:
    return PreparedStatement(_count_of(_jobs, _unlabelled(shape).conditions))


def _labelled(connection: Connection, query: JobQuery, shape: _Shape, values: Mapping[str, Any]) -> _Rows:
    """Read the index of the rarest label, whose rows hold the other labels of their job; deleted jobs have none there.
    No other table is read unless the query asks for more than labels."""
    among = [_labels.c.account_id == bindparam("account")] if shape.scoped else []
    wanted = {key: [*among, *_having(key, allowed)] for key, allowed in query.labels.items()}

    def size(key: str) -> int:
        return int(connection.execute(_count_of(_labels, wanted[key]), values).scalar_one())

    rarest = min(wanted, key=size) if len(wanted) > 1 else next(iter(wanted))
    conditions = wanted[rarest]
    for key, allowed in query.labels.items():
        if key != rarest:
            conditions.append(sa.or_(*(_labels.c.marks.contains(label_mark(key, value)) for value in allowed)))
    of_jobs, by_age = _of_jobs(shape), shape.order_by.removeprefix("-") == "created_at"
    order = _labels.c.created_at if by_age else _column(shape.order_by.removeprefix("-"))
    source: sa.FromClause = _labels
    if of_jobs or not by_age:
        same = sa.and_(_jobs.c.job_id == _labels.c.job_id, _jobs.c.account_id == _labels.c.account_id)
        source = _labels.join(_jobs, same)
    return _Rows(source=source, order=order, job_id=_labels.c.job_id, conditions=[*conditions, *of_jobs])


def _having(key: str, values: tuple[str, ...]) -> list[sa.ColumnElement[bool]]:
    return [_labels.c.key == key, _labels.c.value == values[0] if len(values) == 1 else _labels.c.value.in_(values)]

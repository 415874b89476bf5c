"""Jobs: submit, list, show, edit, delete."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import Future
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Literal, get_args
from urllib.parse import parse_qsl

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from trainmaster.schema.jobs import JobList, JobResource
from trainmaster.server.coordinator.commands import CommandOutcome
from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.fields import Model, Name
from trainmaster.server.core.job import Job
from trainmaster.server.core.spec.configs import Priority
from trainmaster.server.core.spec.submit import MAX_LABELS, Labels
from trainmaster.server.core.states import JobStatus
from trainmaster.server.core.workloads import kinds
from trainmaster.server.http.artifact_files import has_output
from trainmaster.server.http.auth import Manager, Principal, Viewer, require
from trainmaster.server.http.context import ApiContext, Context, context_of
from trainmaster.server.http.envelope import encoded, ok_json
from trainmaster.server.http.errors import wrong
from trainmaster.server.http.job_json import JobView, Summary, job_json, summary_of
from trainmaster.server.http.requests import PREFIX, REPLAYED, idempotency_of, read_command
from trainmaster.server.http.router import MAX_JOB_ID, JobId, PageToken, PlainText, StrictRoute, answers
from trainmaster.server.store import attempts, checkpoints, job_list, jobs
from trainmaster.server.store.job_list import JobQuery
from trainmaster.server.store.scope import Scope

_MOST_KEPT = 4096
_LONGEST_KEPT = 8 << 10
_LONGEST_QUERY = 1024
Order = Literal["created_at", "-created_at", "updated_at", "-updated_at", "priority", "-priority", "name", "-name"]


class Summaries:
    """Pages of job lists as JSON, with the JSON of unchanged jobs kept. Thread-safe."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], Summary] = {}

    def page(self, connection: Connection, scope: Scope, query: JobQuery, now: float) -> bytes:
        """One page of a list, as JSON: a `JobList`."""
        index = job_list.index(connection, scope, query)
        found = {key: self._kept.get(key) for key in index.versions.items()}
        missing = [job_id for (job_id, _), summary in found.items() if summary is None]
        if missing:
            loaded = {(job.job_id, job.version): summary_of(job) for job in jobs.load(connection, scope, missing)}
            self._keep(loaded)
            found |= loaded
        entries = b",".join([b"{%b}" % summary.members(now) for summary in found.values() if summary is not None])
        rest = encoded({"next_page_token": index.next_page_token, "total_count": index.total_count})
        return b'{"jobs":[%b],%b' % (entries, rest[1:])

    def _keep(self, summaries: dict[tuple[str, int], Summary]) -> None:
        if len(self._kept) + len(summaries) > _MOST_KEPT:
            self._kept.clear()
        for key, summary in summaries.items():
            if len(summary.head) <= _LONGEST_KEPT:
                self._kept[key] = summary


@functools.lru_cache(1024)
def plain_query(text: bytes, kinds: tuple[str, ...]) -> JobQuery | None:
    """The query of a simple query string; None leaves it to the route, with its checks and messages."""
    if len(text) > _LONGEST_QUERY:
        return None
    try:
        pairs = parse_qsl(text.decode("ascii"), keep_blank_values=True, strict_parsing=bool(text))
    except ValueError:
        return None
    wanted: dict[str, str] = {}
    statuses: list[JobStatus] = []
    for name, value in pairs:
        if name == "status" and value in JobStatus.__members__:
            statuses.append(JobStatus[value])
        elif name in wanted or name not in ("page_size", "page_token", "order_by") or not value.isprintable():
            return None
        else:
            wanted[name] = value
    size, order_by = wanted.get("page_size", "20"), wanted.get("order_by", "-created_at")
    if len(size) > 3 or not (size.isascii() and size.isdecimal()) or not 1 <= int(size) <= job_list.MAX_PAGE_SIZE:
        return None
    if order_by not in get_args(Order):
        return None
    return JobQuery(
        statuses=tuple(statuses),
        kinds=kinds,
        order_by=order_by,
        page_size=int(size),
        page_token=wanted.get("page_token") or None,
    )


LABEL_PREFIX = "labels."
EVALUATION = "evaluation"
"""The kind of workload that lists leave out by default."""


_LABELS_PARAMETER: dict[str, Any] = {
    "name": "labels",
    "in": "query",
    "required": False,
    "style": "form",
    "explode": True,
    "description": "`labels.team=vision`: only jobs with this label. Several labels must all fit; of several values "
    "of one label, any.",
    "schema": {
        "type": "object",
        "propertyNames": {"pattern": r"^labels\.[A-Za-z0-9._/-]{1,63}$"},
        "additionalProperties": {"type": "string", "maxLength": 256},
    },
}


class EditBody(Model):
    """What to change about a job that has not ended; what is left out stays."""

    priority: Priority | None = None
    queue: Name | None = None
    labels: Labels | None = Field(default=None, description="Replaces all labels.")


class _ListRoute(StrictRoute):
    prefixes: ClassVar[tuple[str, ...]] = (LABEL_PREFIX,)


listing = APIRouter(prefix=PREFIX, route_class=_ListRoute, tags=["jobs"])
router = APIRouter(prefix=PREFIX, route_class=StrictRoute, tags=["jobs"])


@listing.get("/jobs", **answers(JobList, parameters=[_LABELS_PARAMETER]))
async def list_jobs(
    request: Request,
    principal: Viewer,
    context: Context,
    status: Annotated[list[JobStatus] | None, Query(description="Any of these.")] = None,
    queue: Annotated[PlainText | None, Query()] = None,
    kind: Annotated[list[PlainText] | None, Query(description="Kinds of workload; any of these.")] = None,
    name: Annotated[PlainText | None, Query(description="Only jobs with exactly this name.")] = None,
    page_size: Annotated[int, Query(ge=1, le=100)] = 20,
    page_token: PageToken = None,
    order_by: Annotated[Order, Query(description="With a `-`, the greatest first.")] = "-created_at",
) -> Response:
    """List jobs."""
    query = JobQuery(
        statuses=tuple(status or ()),
        labels=_labels(request),
        queue=queue,
        kinds=tuple(kind or _listed_kinds()),
        name=name,
        order_by=order_by,
        page_size=page_size,
        page_token=page_token or None,
    )
    return await _listed(request, principal, context, query)


async def list_quickly(request: Request) -> Response | None:
    """`list_jobs` without the framework, for simple queries; None leaves the request to the route."""
    if (query := plain_query(request.scope["query_string"], _listed_kinds())) is None:
        return None
    return await _listed(request, require(request, KeyScope.VIEW), context_of(request), query)


async def _listed(request: Request, principal: Principal, context: ApiContext, query: JobQuery) -> Response:
    summaries: Summaries = request.app.state.summaries
    scope, now = principal.scope, context.clock()
    return ok_json(await context.read(summaries.page, scope, query, now))


@router.get("/jobs/{job_id}", **answers(JobResource, 404))
async def show_job(principal: Viewer, context: Context, job_id: JobId) -> Response:
    """Show a job, whole: its configs, attempts, progress, checkpoints, and why it waits or failed."""
    scope = principal.scope

    def show() -> bytes:
        return job_json(_view(context, scope, lambda connection: jobs.get(connection, scope, job_id)))

    return ok_json(await run_in_threadpool(show))


async def show_quickly(request: Request) -> Response | None:
    """`show_job` without the framework; None leaves a request with parameters to check to the route."""
    job_id: str = request.path_params["job_id"]
    if request.scope["query_string"] or len(job_id) > MAX_JOB_ID:
        return None
    return await show_job(require(request, KeyScope.VIEW), context_of(request), job_id)


@router.patch("/jobs/{job_id}", **answers(JobResource, 404, 409, body=EditBody, keyed=True))
async def edit_job(request: Request, principal: Manager, context: Context, job_id: JobId) -> Response:
    """Change priority, queue or labels of a job that has not ended."""
    wanted, idempotency = await read_command(request, EditBody)
    edit = context.commands.edit(
        principal.scope,
        job_id,
        priority=wanted.priority,
        queue=wanted.queue,
        labels=wanted.labels,
        idempotency=idempotency,
    )
    return await answer(context, principal.scope, edit)


@router.delete("/jobs/{job_id}", **answers(JobResource, 404, 409, keyed=True))
async def delete_job(
    request: Request,
    principal: Manager,
    context: Context,
    job_id: JobId,
    purge: Annotated[bool, Query(description="Remove its checkpoints and files too.")] = False,
) -> Response:
    """Delete a job; one that runs is stopped first. Committed checkpoints stay unless it is purged.

    A purge also finds one that was deleted before; by a handle, where no job has it now, the last that had it.
    """
    deletion = context.commands.delete(principal.scope, job_id, purge=purge, idempotency=idempotency_of(request, b""))
    return await answer(context, principal.scope, deletion)


async def answer(
    context: ApiContext,
    scope: Scope,
    command: Future[CommandOutcome],
    status: HTTPStatus = HTTPStatus.OK,
    *,
    shown_as: Callable[[JobView], bytes] = job_json,
) -> Response:
    """The job after a command, once the command is on disk."""
    outcome = await asyncio.wrap_future(command)
    data = await run_in_threadpool(lambda: shown_as(_view(context, scope, lambda _connection: outcome.job)))
    return ok_json(data, status, REPLAYED if outcome.replayed else None)


def _view(context: ApiContext, scope: Scope, find: Callable[[Connection], Job]) -> JobView:
    """A job with what its JSON shows beside it. Blocks on the database: call it in a thread."""
    now = context.clock()
    with context.database.read() as connection:
        job = find(connection)
        tries = attempts.of_job(connection, scope, job.job_id)
        saved = checkpoints.newest_of_job(connection, scope, job.job_id)
        used_at = jobs.last_use(connection, scope, job.job_id) if job.is_service else None
    return JobView(
        job=job,
        attempts=tries,
        checkpoints=saved,
        waiting=context.explainer.explain(scope, job, now=now),
        used_at=used_at,
        has_output=job.status is JobStatus.COMPLETED and has_output(context.roots, job),
        now=now,
    )


def _labels(request: Request) -> dict[str, tuple[str, ...]]:
    wanted: dict[str, tuple[str, ...]] = {}
    for name, value in request.query_params.multi_items():
        if name.startswith(LABEL_PREFIX):
            key = name.removeprefix(LABEL_PREFIX)
            if not key or "\0" in key or "\0" in value:
                raise wrong(LABEL_PREFIX, "write labels.KEY=VALUE")
            wanted[key] = (*wanted.get(key, ()), value)
    if len(wanted) > MAX_LABELS:
        raise wrong(LABEL_PREFIX, f"no job has more than {MAX_LABELS} labels")
    return wanted


def _listed_kinds() -> tuple[str, ...]:
    return tuple(kind for kind in kinds() if kind != EVALUATION) if EVALUATION in kinds() else ()

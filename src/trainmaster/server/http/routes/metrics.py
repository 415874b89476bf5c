"""Metrics: series, or a stream of reports."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from trainmaster.server.core.job import Checkpoint, Job
from trainmaster.server.http.auth import Viewer
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import Ok, ok
from trainmaster.server.http.followers import followers_of
from trainmaster.server.http.logs.reader import removal_notice
from trainmaster.server.http.metrics import START, MetricsSource, decode_cursor, series
from trainmaster.server.http.params import MAX_OFFSET, JobId, PlainText
from trainmaster.server.http.router import StrictRoute, errors, stream_too
from trainmaster.server.http.sse import EventStream
from trainmaster.server.http.wire.checkpoints import checkpoint_resources
from trainmaster.server.http.wire.metrics import JobMetrics
from trainmaster.server.http.wire.reported import number, numbers
from trainmaster.server.store import checkpoints, jobs

router = APIRouter(route_class=StrictRoute, tags=["metrics"])

Names = Annotated[list[PlainText] | None, Query(description="Only these metrics; repeated, or parted by commas.")]
SinceStep = Annotated[int | None, Query(ge=0, le=MAX_OFFSET, description="Only from this step on.")]


@router.get("/jobs/{job_id}/metrics", response_model=Ok[JobMetrics], responses=errors(HTTPStatus.NOT_FOUND))
async def metrics(
    principal: Viewer,
    context: Context,
    job_id: JobId,
    names: Names = None,
    since_step: SinceStep = None,
    limit: Annotated[int, Query(ge=1, le=100_000, description="The newest points of each metric.")] = 1000,
) -> Response:
    """Read a job's metrics: the latest values and how they developed, over all attempts."""

    def find(connection: Connection) -> tuple[Job, list[Checkpoint]]:
        job = jobs.get(connection, principal.scope, job_id)
        return job, checkpoints.newest_of_job(connection, principal.scope, job.job_id)

    job, committed = await context.read(find)
    found = await run_in_threadpool(
        series, context.roots, job, names=_parted(names), since_step=since_step, limit=limit
    )
    return ok(
        JobMetrics(
            job_id=job.job_id,
            status=job.status,
            step=job.progress.step,
            epoch=number(job.progress.epoch),
            latest=numbers(dict(job.progress.metrics)),
            series=found,
            checkpoints=checkpoint_resources(job, committed),
            best_checkpoint_id=job.best_checkpoint_id,
            notice=await run_in_threadpool(removal_notice, context.roots, job),
        )
    )


@router.get(
    "/jobs/{job_id}/metrics/stream",
    responses={**errors(HTTPStatus.NOT_FOUND), **stream_too()},
    response_class=Response,
)
async def stream(
    request: Request,
    principal: Viewer,
    context: Context,
    job_id: JobId,
    names: Names = None,
    since_step: SinceStep = None,
    cursor: Annotated[PlainText | None, Query(description="An event's id: begin after it.")] = None,
    last_event_id: Annotated[str | None, Header(alias="Last-Event-ID", description="The same as `cursor`.")] = None,
) -> Response:
    """Follow a job's metrics: every report is an `event: metrics`; `event: end` tells that there will be no more."""
    start = last_event_id or cursor or START
    decode_cursor(start)
    job = await context.read(lambda connection: jobs.get(connection, principal.scope, job_id))
    source = MetricsSource(
        job_id=job.job_id, names=frozenset(_parted(names)), since_step=since_step, roots=context.roots
    )
    return EventStream(followers_of(request).follow(source, start))


def _parted(names: list[str] | None) -> list[str]:
    return [name for text in names or () for name in text.split(",") if name]

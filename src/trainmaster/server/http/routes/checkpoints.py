"""Checkpoints of a job, also of a deleted one: list, pin, unpin, delete."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from sqlalchemy import Connection

from trainmaster.schema.jobs import JobCheckpoints
from trainmaster.server.coordinator import checkpoints as commands
from trainmaster.server.coordinator.commands import CommandOutcome
from trainmaster.server.core.job import Job
from trainmaster.server.http.auth import Manager, Viewer
from trainmaster.server.http.context import ApiContext, Context
from trainmaster.server.http.envelope import Ok, instant, ok
from trainmaster.server.http.job_json import checkpoint_resource
from trainmaster.server.http.requests import REPLAYED, idempotency_of, read_body
from trainmaster.server.http.router import IDEMPOTENCY_PARAMETER, JobId, PlainText, StrictRoute, errors
from trainmaster.server.store import checkpoints, jobs
from trainmaster.server.store.checkpoints import CheckpointPage
from trainmaster.server.store.scope import Scope

router = APIRouter(prefix="/jobs/{job_id}/checkpoints", route_class=StrictRoute, tags=["checkpoints"])

PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
CheckpointId = Annotated[str, Path(min_length=1, max_length=1024)]
_PINNING = errors(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
_KEYED = {"parameters": [IDEMPOTENCY_PARAMETER]}


@router.get("", response_model=Ok[JobCheckpoints], responses=errors(HTTPStatus.NOT_FOUND))
async def list_checkpoints(
    principal: Viewer,
    context: Context,
    job_id: JobId,
    checkpoint_id: Annotated[PlainText | None, Query(description="Only this one.")] = None,
    page_size: Annotated[int, Query(ge=1, le=MAX_PAGE_SIZE)] = PAGE_SIZE,
    page_token: Annotated[PlainText | None, Query(description="From the page before.")] = None,
) -> Response:
    """List the committed checkpoints of a job, the oldest first; also of a deleted one that was not purged."""

    def find(connection: Connection) -> JobCheckpoints:
        job = jobs.get(connection, principal.scope, job_id, deleted=True)
        if checkpoint_id is None:
            return _page(connection, principal.scope, job, page_size=page_size, page_token=page_token or None)
        found = tuple(checkpoints.named(connection, principal.scope, job.job_id, [checkpoint_id]))
        return _shown(job, CheckpointPage(checkpoints=found, next_page_token=None, total_count=len(found)))

    return ok(await context.read(find))


@router.post("/{checkpoint_id}/pin", response_model=Ok[JobCheckpoints], responses=_PINNING, openapi_extra=_KEYED)
async def pin(
    request: Request, principal: Manager, context: Context, job_id: JobId, checkpoint_id: CheckpointId
) -> Response:
    """Keep a checkpoint until it is unpinned, whatever the limits say."""
    return await _pin(request, context, principal.scope, job_id, checkpoint_id, pinned=True)


@router.post("/{checkpoint_id}/unpin", response_model=Ok[JobCheckpoints], responses=_PINNING, openapi_extra=_KEYED)
async def unpin(
    request: Request, principal: Manager, context: Context, job_id: JobId, checkpoint_id: CheckpointId
) -> Response:
    """Treat a checkpoint like all others again."""
    return await _pin(request, context, principal.scope, job_id, checkpoint_id, pinned=False)


@router.delete(
    "/{checkpoint_id}",
    response_model=Ok[JobCheckpoints],
    responses=errors(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
    openapi_extra=_KEYED,
)
async def delete(
    request: Request, principal: Manager, context: Context, job_id: JobId, checkpoint_id: CheckpointId
) -> Response:
    """Delete a checkpoint that is not pinned and that no job needs; `latest` and `best` move to what is left."""
    command = commands.delete(
        context.commands,
        principal.scope,
        job_id,
        checkpoint_id,
        now=context.clock(),
        idempotency=idempotency_of(request, b""),
    )
    return await _answer(context, principal.scope, command)


async def _pin(
    request: Request, context: ApiContext, scope: Scope, job_id: str, checkpoint_id: str, *, pinned: bool
) -> Response:
    key = idempotency_of(request, await read_body(request))
    command = commands.edit(
        context.commands, scope, job_id, checkpoint_id, "pinned", pinned, now=context.clock(), idempotency=key
    )
    return await _answer(context, scope, command)


async def _answer(context: ApiContext, scope: Scope, command: Future[CommandOutcome]) -> Response:
    outcome = await asyncio.wrap_future(command)
    found = await context.read(lambda connection: _page(connection, scope, outcome.job))
    return ok(found, headers=REPLAYED if outcome.replayed else None)


def _page(
    connection: Connection, scope: Scope, job: Job, *, page_size: int = PAGE_SIZE, page_token: str | None = None
) -> JobCheckpoints:
    return _shown(job, checkpoints.page(connection, scope, job.job_id, page_size=page_size, page_token=page_token))


def _shown(job: Job, page: CheckpointPage) -> JobCheckpoints:
    return JobCheckpoints(
        job_id=job.job_id,
        deleted_at=instant(job.deleted_at),
        checkpoints=[checkpoint_resource(job, each) for each in page.checkpoints],
        next_page_token=page.next_page_token,
        total_count=page.total_count,
        latest_checkpoint_id=job.latest_checkpoint_id,
        best_checkpoint_id=job.best_checkpoint_id,
    )

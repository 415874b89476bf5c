"""What is left of jobs: their checkpoints, deleted jobs with files, and the removal of what is not kept any longer."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from trainmaster.schema.jobs import JobCheckpoints, TombstonePage, TombstoneResource
from trainmaster.schema.reports import CollectedKind, Collection
from trainmaster.server.coordinator import checkpoints as commands
from trainmaster.server.coordinator.commands import CommandOutcome
from trainmaster.server.coordinator.retention import FAILED, Collected, Collector
from trainmaster.server.coordinator.tombstones import tombstones
from trainmaster.server.core.job import Job
from trainmaster.server.http.auth import ADMINS_ONLY, Manager, Viewer
from trainmaster.server.http.context import ApiContext, Context
from trainmaster.server.http.envelope import instant, ok, resource
from trainmaster.server.http.job_json import checkpoint_resource
from trainmaster.server.http.requests import PREFIX, REPLAYED, idempotency_of, read_body, read_model
from trainmaster.server.http.router import JobId, PageToken, PlainText, StrictRoute, answers
from trainmaster.server.store import checkpoints, jobs
from trainmaster.server.store.checkpoints import CheckpointPage
from trainmaster.server.store.scope import Scope

router = APIRouter(prefix=f"{PREFIX}/jobs/{{job_id}}/checkpoints", route_class=StrictRoute, tags=["checkpoints"])

PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
CheckpointId = Annotated[str, Path(min_length=1, max_length=1024)]


@router.get("", **answers(JobCheckpoints, 404))
async def list_checkpoints(
    principal: Viewer,
    context: Context,
    job_id: JobId,
    checkpoint_id: Annotated[PlainText | None, Query(description="Only this one.")] = None,
    page_size: Annotated[int, Query(ge=1, le=MAX_PAGE_SIZE)] = PAGE_SIZE,
    page_token: PageToken = None,
) -> Response:
    """List the committed checkpoints of a job, the oldest first; also of a deleted one that was not purged."""

    def find(connection: Connection) -> JobCheckpoints:
        job = jobs.get(connection, principal.scope, job_id, deleted=True)
        if checkpoint_id is None:
            return _page(connection, principal.scope, job, page_size=page_size, page_token=page_token or None)
        found = tuple(checkpoints.named(connection, principal.scope, job.job_id, [checkpoint_id]))
        return _shown(job, CheckpointPage(checkpoints=found, next_page_token=None, total_count=len(found)))

    return ok(await context.read(find))


@router.post("/{checkpoint_id}/pin", **answers(JobCheckpoints, 404, 409, 413, keyed=True))
async def pin(
    request: Request, principal: Manager, context: Context, job_id: JobId, checkpoint_id: CheckpointId
) -> Response:
    """Keep a checkpoint until it is unpinned, whatever the limits say."""
    return await _pin(request, context, principal.scope, job_id, checkpoint_id, pinned=True)


@router.post("/{checkpoint_id}/unpin", **answers(JobCheckpoints, 404, 409, 413, keyed=True))
async def unpin(
    request: Request, principal: Manager, context: Context, job_id: JobId, checkpoint_id: CheckpointId
) -> Response:
    """Treat a checkpoint like all others again."""
    return await _pin(request, context, principal.scope, job_id, checkpoint_id, pinned=False)


@router.delete("/{checkpoint_id}", **answers(JobCheckpoints, 404, 409, keyed=True))
async def delete(
    request: Request, principal: Manager, context: Context, job_id: JobId, checkpoint_id: CheckpointId
) -> Response:
    """Delete a checkpoint that is not pinned and that no job needs; `latest` and `best` move to what is left."""
    key, now = idempotency_of(request, b""), context.clock()
    command = commands.delete(context.commands, principal.scope, job_id, checkpoint_id, now=now, idempotency=key)
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
    return ok(await context.read(_page, scope, outcome.job), headers=REPLAYED if outcome.replayed else None)


def _page(
    connection: Connection, scope: Scope, job: Job, *, page_size: int = PAGE_SIZE, page_token: str | None = None
) -> JobCheckpoints:
    return _shown(job, checkpoints.page(connection, scope, job.job_id, page_size=page_size, page_token=page_token))


def _shown(job: Job, page: CheckpointPage) -> JobCheckpoints:
    return resource(
        JobCheckpoints,
        job,
        checkpoints=[checkpoint_resource(job, each) for each in page.checkpoints],
        next_page_token=page.next_page_token,
        total_count=page.total_count,
    )


# Retention: remove what the settings no longer keep, and list deleted jobs whose files remain.


class CollectBody(BaseModel):
    """What to collect."""

    model_config = ConfigDict(extra="forbid", strict=True)

    dry_run: bool = Field(default=False, description="Only tell what would go.")
    orphans: bool = Field(default=False, description="Also directories of jobs that nobody knows, after a day.")


retention_router = APIRouter(prefix=PREFIX, route_class=StrictRoute)

_log = logging.getLogger(__name__)
_NAMES = 100


@retention_router.post("/gc", tags=["retention"], dependencies=ADMINS_ONLY, **answers(Collection, body=CollectBody))
async def collect(request: Request, context: Context) -> Response:
    """Remove what the settings do not keep any longer, or tell what would go. The leader does so by itself."""
    return ok(await run_in_threadpool(_collect, context, await read_model(request, CollectBody)))


def _collect(context: ApiContext, wanted: CollectBody) -> Collection:
    collector = context.collector
    now = context.clock()
    gone = list(collector.collect(now, dry_run=wanted.dry_run))
    take_orphans = wanted.orphans and not wanted.dry_run
    orphans = list(collector.orphans(now, dry_run=not take_orphans))
    if not wanted.dry_run:
        # Removing terabytes takes long, and the answer does not wait for it.
        threading.Thread(target=_sweep, args=(collector,), name="sweep", daemon=True).start()
    found = [each for each in gone if each.what != FAILED]
    kinds = [_kind(what, found, not wanted.dry_run) for what in dict.fromkeys(each.what for each in found)]
    kinds.append(_kind("orphan", orphans, take_orphans))
    kinds.append(_kind(FAILED, [*gone, *orphans], removed=False))
    return Collection(dry_run=wanted.dry_run, kinds=[kind for kind in kinds if kind["count"]])


def _sweep(collector: Collector) -> None:
    try:
        collector.sweep()
    except Exception:
        _log.exception("some of what was collected could not be removed; the leader tries again")


def _kind(what: str, found: list[Collected], removed: bool) -> CollectedKind:
    same = [each for each in found if each.what == what]
    return CollectedKind(
        what=what,
        count=len(same),
        size_bytes=sum(each.size_bytes for each in same),
        names=[each.name for each in same[:_NAMES]],
        removed=removed,
    )


@retention_router.get("/tombstones", tags=["jobs"], **answers(TombstonePage))
async def list_tombstones(
    principal: Viewer,
    context: Context,
    job: Annotated[PlainText | None, Query(description="Only those with this handle, or whose id begins so.")] = None,
    page_size: Annotated[int, Query(ge=1, le=100)] = 20,
    page_token: PageToken = None,
) -> Response:
    """List deleted jobs whose files are still there, the last deleted first. A page may be short."""

    def take_snapshot() -> TombstonePage:
        found, following = tombstones(
            context.database,
            context.roots,
            principal.scope,
            name=job or None,
            page_size=page_size,
            page_token=page_token or None,
        )
        resources = [
            resource(
                TombstoneResource,
                each.job,
                kind=each.job.workload_kind,
                deleted_at=instant(each.deleted_at),
                size_bytes=each.size_bytes,
            )
            for each in found
        ]
        return TombstonePage(tombstones=resources, next_page_token=following)

    return ok(await run_in_threadpool(take_snapshot))

"""Retention: remove what the settings no longer keep, and list deleted jobs whose files remain."""

from __future__ import annotations

import logging
import threading
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from trainmaster.schema.jobs import TombstonePage, TombstoneResource
from trainmaster.schema.reports import CollectedKind, Collection
from trainmaster.server.coordinator.retention import FAILED, Collected, Collector, Tombstone, tombstones
from trainmaster.server.http.auth import ADMINS_ONLY, Viewer
from trainmaster.server.http.context import ApiContext, Context
from trainmaster.server.http.envelope import Ok, instant, ok
from trainmaster.server.http.requests import read_model
from trainmaster.server.http.router import PlainText, StrictRoute, body, errors


class CollectBody(BaseModel):
    """What to collect."""

    model_config = ConfigDict(extra="forbid", strict=True)

    dry_run: bool = Field(default=False, description="Only tell what would go.")
    orphans: bool = Field(default=False, description="Also directories of jobs that nobody knows, after a day.")


router = APIRouter(route_class=StrictRoute)

_log = logging.getLogger(__name__)
_NAMES = 100


@router.post(
    "/gc",
    tags=["retention"],
    response_model=Ok[Collection],
    responses=errors(HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    openapi_extra=body(CollectBody),
    dependencies=ADMINS_ONLY,
)
async def collect(request: Request, context: Context) -> Response:
    """Remove what the settings do not keep any longer, or tell what would go. The leader does so by itself."""
    wanted = await read_model(request, CollectBody)
    return ok(await run_in_threadpool(_collect, context, wanted))


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
        _log.exception("what was collected is not all removed; the leader goes on with it")


def _kind(what: str, found: list[Collected], removed: bool) -> CollectedKind:
    same = [each for each in found if each.what == what]
    return CollectedKind(
        what=what,
        count=len(same),
        size_bytes=sum(each.size_bytes for each in same),
        names=[each.name for each in same[:_NAMES]],
        removed=removed,
    )


def tombstone_resource(tombstone: Tombstone) -> TombstoneResource:
    job = tombstone.job
    return TombstoneResource(
        job_id=job.job_id,
        handle=job.handle,
        name=job.name,
        kind=job.workload_kind,
        status=job.status,
        deleted_at=instant(tombstone.deleted_at),
        size_bytes=tombstone.size_bytes,
    )


@router.get("/tombstones", tags=["jobs"], response_model=Ok[TombstonePage], responses=errors())
async def list_tombstones(
    principal: Viewer,
    context: Context,
    job: Annotated[PlainText | None, Query(description="Only those with this handle, or whose id begins so.")] = None,
    page_size: Annotated[int, Query(ge=1, le=100)] = 20,
    page_token: Annotated[PlainText | None, Query(description="From the page before.")] = None,
) -> Response:
    """List deleted jobs whose files are still there, the last deleted first. A page may be short."""

    def look() -> TombstonePage:
        found, following = tombstones(
            context.database,
            context.roots,
            principal.scope,
            name=job or None,
            page_size=page_size,
            page_token=page_token or None,
        )
        return TombstonePage(tombstones=[tombstone_resource(each) for each in found], next_page_token=following)

    return ok(await run_in_threadpool(look))

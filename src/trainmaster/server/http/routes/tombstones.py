"""Deleted jobs whose files are still there."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from starlette.concurrency import run_in_threadpool

from trainmaster.server.coordinator.tombstones import Tombstones
from trainmaster.server.http.auth import Viewer
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import Ok, ok
from trainmaster.server.http.params import PlainText
from trainmaster.server.http.router import StrictRoute, errors
from trainmaster.server.http.wire.tombstones import TombstonePage, tombstone_resource

router = APIRouter(route_class=StrictRoute, tags=["jobs"])


@router.get("/tombstones", response_model=Ok[TombstonePage], responses=errors())
async def list_tombstones(
    principal: Viewer,
    context: Context,
    job: Annotated[PlainText | None, Query(description="Only those with this handle, or whose id begins so.")] = None,
    page_size: Annotated[int, Query(ge=1, le=100)] = 20,
    page_token: Annotated[PlainText | None, Query(description="From the page before.")] = None,
) -> Response:
    """List deleted jobs whose files are still there, the last deleted first. A page may be short."""
    tombstones = Tombstones(context.database, context.roots)

    def look() -> TombstonePage:
        found, following = tombstones.page(
            principal.scope, name=job or None, page_size=page_size, page_token=page_token or None
        )
        return TombstonePage(tombstones=[tombstone_resource(each) for each in found], next_page_token=following)

    return ok(await run_in_threadpool(look))

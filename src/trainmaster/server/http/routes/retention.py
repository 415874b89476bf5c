"""Collecting what has outlived its job."""

from __future__ import annotations

import logging
import threading
from http import HTTPStatus

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from trainmaster.server.coordinator.retention import FAILED, Collected, Collector
from trainmaster.server.http.auth import Admin
from trainmaster.server.http.context import ApiContext, Context
from trainmaster.server.http.envelope import Ok, ok
from trainmaster.server.http.requests import parse_optional, read_body
from trainmaster.server.http.router import StrictRoute, body, errors
from trainmaster.server.http.wire.retention import CollectBody, CollectedKind, Collection

router = APIRouter(route_class=StrictRoute, tags=["retention"])

_log = logging.getLogger(__name__)
_NAMES = 100


@router.post(
    "/gc",
    response_model=Ok[Collection],
    responses=errors(HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    openapi_extra=body(CollectBody),
)
async def collect(request: Request, principal: Admin, context: Context) -> Response:  # noqa: ARG001 - it may
    """Remove what the settings do not keep any longer, or tell what would go. The leader does so by itself."""
    wanted = parse_optional(CollectBody, await read_body(request))
    return ok(await run_in_threadpool(_collect, context, wanted))


def _collect(context: ApiContext, wanted: CollectBody) -> Collection:
    collector = context.collector
    now = context.clock()
    gone = list(collector.collect(now, dry_run=wanted.dry_run))
    take_orphans = wanted.orphans and not wanted.dry_run
    orphans = list(collector.orphans(now, dry_run=not take_orphans))
    if not wanted.dry_run:
        # What is out of sight may be terabytes: nobody has to wait for the disk.
        threading.Thread(target=_sweep, args=(collector,), name="sweep", daemon=True).start()
    found = [each for each in gone if each.what != FAILED]
    kinds = [_kind(what, found, not wanted.dry_run) for what in dict.fromkeys(each.what for each in found)]
    kinds.append(_kind("orphan", orphans, take_orphans))
    kinds.append(_kind(FAILED, [*gone, *orphans], removed=False))
    return Collection(dry_run=wanted.dry_run, kinds=[kind for kind in kinds if kind.count])


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

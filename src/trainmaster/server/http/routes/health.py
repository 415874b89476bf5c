"""Health checks: whether the server answers, and whether it can work."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Literal

from fastapi import APIRouter, Response
from starlette.concurrency import run_in_threadpool

from trainmaster.protocol.documents import disk_is_full
from trainmaster.server.core.errors import StoreUnavailableError
from trainmaster.server.http.context import ApiContext, Context
from trainmaster.server.http.envelope import ErrorEnvelope, Ok, Wire, ok
from trainmaster.server.http.errors import UnhealthyError
from trainmaster.server.http.router import OPEN


class Alive(Wire):
    """The server answers."""

    alive: Literal[True] = True
    version: str


class Ready(Wire):
    """The server can do its work."""

    ready: Literal[True] = True
    version: str


router = APIRouter(tags=["health"])

_log = logging.getLogger(__name__)

PROBE_PATIENCE_S = 10.0


@router.get("/healthz", response_model=Ok[Alive], openapi_extra=OPEN)
async def alive(context: Context) -> Response:
    """Whether the server answers at all."""
    return ok(Alive(version=context.version))


@router.get(
    "/readyz",
    response_model=Ok[Ready],
    openapi_extra=OPEN,
    responses={
        HTTPStatus.SERVICE_UNAVAILABLE: {
            "model": ErrorEnvelope,
            "description": "The server cannot do its work; the message says why.",
        }
    },
)
async def ready(context: Context) -> Response:
    """Whether the server can do its work: the part that runs jobs does, disks have space, the database takes writes."""
    if (problem := context.healthy()) is not None:
        raise UnhealthyError(problem)
    if full := await run_in_threadpool(_full_disks, context):
        raise UnhealthyError(f"there is no space left for {' and '.join(full)}")
    try:
        await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(context.database.probe())), PROBE_PATIENCE_S)
    except (StoreUnavailableError, TimeoutError) as error:
        # Anybody may ask; what the database says is for those who run it.
        _log.warning("not ready: %s", str(error) or "a write was not committed in time")
        raise StoreUnavailableError("the database takes no writes; try again") from None
    return ok(Ready(version=context.version))


def _full_disks(context: ApiContext) -> list[str]:
    return [what for what, path in context.disks.items() if disk_is_full(path)]

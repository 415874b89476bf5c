"""Numbers for Prometheus. They are about the whole cluster and name no account."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.http.auth import guard, require
from trainmaster.server.http.context import Context
from trainmaster.server.http.requests import METRICS_PATH
from trainmaster.server.http.router import StrictRoute, errors
from trainmaster.server.settings.telemetry import METERS

router = APIRouter(route_class=StrictRoute, tags=["metrics"])

_PLAIN = "text/plain"
_MEDIA_TYPE = f"{_PLAIN}; version=0.0.4; charset=utf-8"
_TEXT: dict[int | str, dict[str, Any]] = {
    HTTPStatus.OK: {
        "description": "The text format of Prometheus.",
        "content": {_PLAIN: {"schema": {"type": "string"}}},
    }
}
_LAG_SAMPLE_S = 0.02


@router.get(METRICS_PATH, response_class=Response, responses={**errors(), **_TEXT})
@guard
async def show_metrics(request: Request, context: Context) -> Response:
    """Show the server's numbers, in the text format of Prometheus."""
    if not context.open_metrics:
        require(request, KeyScope.VIEW)
    # Imported by the first who asks: most servers on a laptop never are.
    from trainmaster.server.http.exposition import exposition, take

    lag_s = await _lag_s()
    snapshot = await context.read(take)
    body = await run_in_threadpool(
        exposition,
        snapshot,
        METERS,
        now=context.clock(),
        version=context.version,
        leads=context.leads(),
        lag_s=lag_s,
    )
    return Response(body, media_type=_MEDIA_TYPE)


async def _lag_s() -> float:
    """How much later than it should a short sleep ends."""
    clock = asyncio.get_running_loop().time
    began = clock()
    await asyncio.sleep(_LAG_SAMPLE_S)
    return max(0.0, clock() - began - _LAG_SAMPLE_S)

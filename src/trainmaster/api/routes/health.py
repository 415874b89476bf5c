"""Is the server alive, and can it work?"""

from __future__ import annotations

import logging
from http import HTTPStatus

from fastapi import APIRouter, Response

from trainmaster.api.context import Context
from trainmaster.api.envelope import ErrorEnvelope, Ok, ok
from trainmaster.api.errors import UnhealthyError
from trainmaster.api.openapi import OPEN
from trainmaster.api.wire.health import Alive, Ready
from trainmaster.core.errors import StoreUnavailableError
from trainmaster.store import queues
from trainmaster.store.scope import Scope

router = APIRouter(tags=["health"])

_log = logging.getLogger(__name__)


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
    """Whether the server can do its work: the database answers, and so does the part that runs jobs."""
    if (problem := context.healthy()) is not None:
        raise UnhealthyError(problem)
    try:
        await context.read(lambda connection: queues.exists(connection, Scope.everything(), queues.DEFAULT))
    except StoreUnavailableError as error:
        # Anybody may ask; what the database says is for those who run it.
        _log.warning("not ready: %s", error.message)
        raise StoreUnavailableError("the database does not answer; try again") from None
    return ok(Ready(version=context.version))

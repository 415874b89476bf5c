"""Deployments, which there are none of here: answers that public clients do not retry, each with the reason.

A client asks for a deployment while its new trainer starts, and does not stop that trainer when there is none. So the
trainer is cancelled here, unless somebody has used it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response
from sqlalchemy import Connection

from trainmaster.server.core.errors import InvalidTransitionError, NotFoundError, RefusedError
from trainmaster.server.core.job import Job
from trainmaster.server.doors.fireworks.routes.absent import DEPLOYED
from trainmaster.server.doors.fireworks.routes.resources import AccountPath, answer, own, trainer_job
from trainmaster.server.http.auth import Manager, Viewer
from trainmaster.server.http.context import ApiContext, Context
from trainmaster.server.http.errors import UnknownRouteError
from trainmaster.server.http.requests import parse_json, read_body
from trainmaster.server.store import jobs
from trainmaster.server.store.scope import Scope

router = APIRouter(include_in_schema=False, tags=["fireworks"])


@router.get("/v1/accounts/{account_id}/deployments")
async def list_deployments(principal: Viewer, account_id: AccountPath) -> Response:
    """Not found, as one of them is not: clients ask for a deployment before they make it."""
    own(principal, account_id)
    raise UnknownRouteError(DEPLOYED)


@router.post("/v1/accounts/{account_id}/deployments")
async def create(request: Request, principal: Manager, context: Context, account_id: AccountPath) -> Response:
    """Refuse a deployment, and cancel the trainer that was made for it."""
    scope = own(principal, account_id)
    document = parse_json(await read_body(request))
    name = document.get("hotLoadTrainerJob") if isinstance(document, dict) else None
    cancelled = await _cancel_unused(context, scope, name.rpartition("/")[2]) if isinstance(name, str) else None
    raise RefusedError(DEPLOYED + (f"; trainer {cancelled}, which nobody used, is cancelled" if cancelled else ""))


@router.get("/hot_load/v1/models/hot_load")
async def hot_load_status(principal: Viewer) -> Response:  # noqa: ARG001
    """One replica that has failed. Clients poll for five minutes while this is an error, or lists no replica."""
    replica: dict[str, Any] = {
        "readiness": False,
        "current_snapshot_identity": None,
        "loading_state": {"stage": "error", "message": DEPLOYED},
        "loaded_adapters": [],
    }
    return answer({"replicas": [replica]})


@router.post("/hot_load/v1/models/hot_load")
async def hot_load(principal: Manager) -> Response:  # noqa: ARG001
    """Refuse to load weights into a deployment."""
    raise RefusedError(DEPLOYED)


async def _cancel_unused(context: ApiContext, scope: Scope, name: str) -> str | None:
    """The name of the trainer, if it was cancelled."""

    def find(connection: Connection) -> Job | None:
        job = trainer_job(connection, scope, name)
        used = jobs.last_use(connection, scope, job.job_id) is not None
        return None if used or job.deleted_at is not None else job

    try:
        job = await context.read(find)
        if job is None:
            return None
        await asyncio.wrap_future(context.commands.cancel(scope, job.job_id, message=DEPLOYED))
    except (NotFoundError, InvalidTransitionError):
        return None
    return job.handle or job.job_id

"""Checkpoints of trainers: list and promote them, whether or not their trainer runs, or is there at all."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from trainmaster.server.coordinator.promotion import SAMPLER, Promotion
from trainmaster.server.core.errors import NotFoundError, RefusedError
from trainmaster.server.core.job import Checkpoint, Job
from trainmaster.server.core.spec import parse
from trainmaster.server.doors.fireworks.routes.resources import (
    AccountPath,
    Filter,
    PageSize,
    PageToken,
    ResourcePath,
    answer,
    listing,
    own,
    page_size,
    trainer_job,
    unknown_token,
)
from trainmaster.server.doors.fireworks.wire.list_filter import read_filter
from trainmaster.server.doors.fireworks.wire.models import (
    CHECKPOINT_MEMBERS,
    PromoteBody,
    checkpoint_document,
    checkpoint_id,
    operation_document,
    promoted_document,
)
from trainmaster.server.http.auth import Manager, Viewer
from trainmaster.server.http.context import ApiContext, Context
from trainmaster.server.http.requests import parse_json, read_body
from trainmaster.server.http.router import StrictRoute
from trainmaster.server.store import checkpoints, jobs
from trainmaster.server.store.promoted import Operation, PromotedModel
from trainmaster.server.store.scope import Scope

router = APIRouter(
    prefix="/v1/accounts/{account_id}", route_class=StrictRoute, include_in_schema=False, tags=["fireworks"]
)

LOOK_EVERY_S = 0.5
"""At a promotion whose client waits for its end."""


@router.get("/rlorTrainerJobs/{job_id}/checkpoints")
async def list_checkpoints(
    principal: Viewer,
    context: Context,
    account_id: AccountPath,
    job_id: ResourcePath,
    filter: Filter = "",  # noqa: A002 - the protocol's name
    asked: PageSize = 0,
    token: PageToken = "",
) -> Response:
    """List what a trainer saved, the oldest first."""
    scope = own(principal, account_id)
    conditions = read_filter(filter, CHECKPOINT_MEMBERS)

    size = page_size(asked)

    def find(connection: Connection) -> tuple[list[dict[str, Any]], str | None]:
        job = trainer_job(connection, scope, job_id)
        entries: list[tuple[str, dict[str, Any]]] = []
        following = _after(connection, scope, job, token) if token else None
        while True:
            page = checkpoints.page(connection, scope, job.job_id, page_size=size + 1, page_token=following)
            for each in page.checkpoints:
                document = checkpoint_document(job, each)
                if each.kind and all(condition.holds(document) for condition in conditions):
                    entries.append((each.checkpoint_id, document))
            following = page.next_page_token
            if following is None or len(entries) > size:
                shown = [document for _, document in entries[:size]]
                return shown, entries[size - 1][0] if len(entries) > size else None

    return listing("checkpoints", *await context.read(find))


def _after(connection: Connection, scope: Scope, job: Job, token: str) -> str:
    found = checkpoints.named(connection, scope, job.job_id, [token])
    if not found:
        raise unknown_token()
    return checkpoints.page_token_after(found[0])


@router.post("/checkpoints/{checkpoint}:promote")
async def promote(
    request: Request, principal: Manager, context: Context, account_id: AccountPath, checkpoint: ResourcePath
) -> Response:
    """Make a model of a checkpoint that was saved for sampling."""
    scope = own(principal, account_id)
    body = parse(PromoteBody, parse_json(await read_body(request)))
    for name in (body.output_model, body.trainer_job_id):
        own(principal, name.split("/")[1])

    def find(connection: Connection) -> Promotion:
        job = trainer_job(connection, scope, body.trainer_job_id.rpartition("/")[2])
        found = _named(checkpoints.called(connection, scope, job.job_id, checkpoint), checkpoint)
        return Promotion(
            job_id=job.job_id,
            checkpoint_id=found.checkpoint_id,
            model_id=body.output_model.rpartition("/")[2],
            base_model=body.base_model,
        )

    wanted = await context.read(find)
    operation = await run_in_threadpool(context.promotions.start, scope, wanted)
    if not body.async_promotion:
        while not operation.done:
            await asyncio.sleep(LOOK_EVERY_S)
            operation, _ = await run_in_threadpool(context.promotions.poll, scope, operation.operation_id)
    document = await _operation(context, scope, operation.operation_id)
    if not body.async_promotion:
        if "error" in document:
            raise RefusedError(document["error"]["message"])
        return answer({"model": _without_type(document["response"])})
    made = {"model": _without_type(document["response"])} if "response" in document else {}
    return answer({"operation": document, **made})


@router.get("/operations/{operation_id}")
async def show_operation(
    principal: Viewer, context: Context, account_id: AccountPath, operation_id: ResourcePath
) -> Response:
    """Show how far an operation is."""
    return answer(await _operation(context, own(principal, account_id), operation_id))


async def _operation(context: ApiContext, scope: Scope, operation_id: str) -> dict[str, Any]:
    def find() -> tuple[Operation, dict[str, Any] | None]:
        operation, model = context.promotions.poll(scope, operation_id)
        return operation, None if model is None else _model(context, scope, model)

    return operation_document(*await run_in_threadpool(find))


def _model(context: ApiContext, scope: Scope, model: PromotedModel) -> dict[str, Any]:
    with context.database.read() as connection:
        return promoted_document(model, jobs.get(connection, scope, model.job_id, deleted=True))


def _named(found: list[Checkpoint], name: str) -> Checkpoint:
    """What a client means by a name: first what was saved for sampling, and of several the latest."""
    named = [each for each in found if each.kind and name in (checkpoint_id(each), each.checkpoint_id)]
    if not named:
        raise NotFoundError(f"the trainer has no checkpoint {name}")
    return max(named, key=lambda each: (each.kind == SAMPLER, each.created_at))


def _without_type(model: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in model.items() if name != "@type"}

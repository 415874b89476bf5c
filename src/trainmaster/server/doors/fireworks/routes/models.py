"""Models: what the account promoted, and the base models that the operator named."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.doors.fireworks.routes.resources import (
    AccountPath,
    Filter,
    PageSize,
    PageToken,
    ReadMask,
    ResourcePath,
    answer,
    filtered,
    own,
)
from trainmaster.server.doors.fireworks.wire.models import MODEL_MEMBERS, base_model_document, promoted_document
from trainmaster.server.http.auth import Manager, Viewer
from trainmaster.server.http.context import Context
from trainmaster.server.http.router import StrictRoute
from trainmaster.server.store import jobs, promoted

router = APIRouter(
    prefix="/v1/accounts/{account_id}/models", route_class=StrictRoute, include_in_schema=False, tags=["fireworks"]
)


@router.get("")
async def list_models(
    principal: Viewer,
    context: Context,
    account_id: AccountPath,
    filter: Filter = "",  # noqa: A002 - the protocol's name
    asked: PageSize = 0,
    token: PageToken = "",
    read_mask: ReadMask = "",
) -> Response:
    """List the models of an account: its own with what it promoted, another one with what the operator named there."""

    def find(connection: Connection) -> list[dict[str, Any]]:
        found = [base_model_document(model) for model in context.models.of_account(account_id)]
        if account_id == principal.account_id:
            for model in promoted.all(connection, principal.scope):
                job = jobs.get(connection, principal.scope, model.job_id, deleted=True)
                found.append(promoted_document(model, job))
        return found

    documents = sorted(await context.read(find), key=lambda each: str(each["name"]))
    if not documents:
        own(principal, account_id)
    named = [(str(each["name"]), each) for each in documents]
    return filtered("models", named, members=MODEL_MEMBERS, condition=filter, asked=asked, token=token, mask=read_mask)


@router.get("/{model_id}")
async def show_model(principal: Viewer, context: Context, account_id: AccountPath, model_id: ResourcePath) -> Response:
    """Show a model."""
    name = f"accounts/{account_id}/models/{model_id}"

    def find(connection: Connection) -> dict[str, Any]:
        for model in context.models.of_account(account_id):
            if model.name == name:
                return base_model_document(model)
        if account_id != principal.account_id:
            raise NotFoundError(f"there is no model {name}")
        found = promoted.get(connection, principal.scope, model_id)
        return promoted_document(found, jobs.get(connection, principal.scope, found.job_id, deleted=True))

    return answer(await context.read(find))


@router.delete("/{model_id}")
async def remove_model(
    principal: Manager, context: Context, account_id: AccountPath, model_id: ResourcePath
) -> Response:
    """Remove a promoted model with its files."""
    await run_in_threadpool(context.promotions.remove, own(principal, account_id), model_id)
    return answer({})

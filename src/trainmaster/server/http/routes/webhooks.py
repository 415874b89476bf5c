"""Webhooks: where an account wants to be told of its jobs."""

from __future__ import annotations

import asyncio
import secrets
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from trainmaster.server.coordinator.webhook_delivery import DeliveryError, headers_of, trial
from trainmaster.server.http.auth import Manager
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import Nothing, Ok, ok
from trainmaster.server.http.requests import parse_optional, read_body
from trainmaster.server.http.router import StrictRoute, body, errors
from trainmaster.server.http.webhook_test_delivery import trials_of
from trainmaster.server.http.wire.webhooks import (
    ChangeWebhookBody,
    CreatedWebhook,
    CreateWebhookBody,
    Trial,
    WebhookList,
    WebhookResource,
    created_webhook,
    webhook_resource,
)
from trainmaster.server.store import webhooks

router = APIRouter(route_class=StrictRoute, tags=["webhooks"])

WebhookId = Annotated[str, Path(description="The webhook's id.", min_length=1, max_length=256)]

_TOO_LARGE = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


@router.get("/webhooks", response_model=Ok[WebhookList], responses=errors())
async def list_webhooks(principal: Manager, context: Context) -> Response:
    """List the account's webhooks, and how each of them does."""
    found = await context.read(lambda connection: webhooks.all(connection, principal.scope))
    return ok(WebhookList(webhooks=[webhook_resource(webhook) for webhook in found]))


@router.post(
    "/webhooks",
    status_code=HTTPStatus.CREATED,
    response_model=Ok[CreatedWebhook],
    responses={
        int(HTTPStatus.OK): {"model": Ok[CreatedWebhook], "description": "There was the very same one already."},
        **errors(HTTPStatus.CONFLICT, _TOO_LARGE),
    },
    openapi_extra=body(CreateWebhookBody, required=True),
)
async def create_webhook(request: Request, principal: Manager, context: Context) -> Response:
    """Make a webhook. It is told of what happens from now on; its secret is shown this once."""
    wanted = parse_optional(CreateWebhookBody, await read_body(request))
    made = await asyncio.wrap_future(
        context.subscriptions.create(principal.scope, url=wanted.url, statuses=wanted.statuses, secret=wanted.secret)
    )
    status = HTTPStatus.CREATED if made.made else HTTPStatus.OK
    return ok(created_webhook(made.webhook, made.secret), status)


@router.get("/webhooks/{webhook_id}", response_model=Ok[WebhookResource], responses=errors(HTTPStatus.NOT_FOUND))
async def show_webhook(principal: Manager, context: Context, webhook_id: WebhookId) -> Response:
    """Show one webhook."""
    found = await context.read(lambda connection: webhooks.get(connection, principal.scope, webhook_id))
    return ok(webhook_resource(found))


@router.patch(
    "/webhooks/{webhook_id}",
    response_model=Ok[WebhookResource],
    responses=errors(HTTPStatus.NOT_FOUND, _TOO_LARGE),
    openapi_extra=body(ChangeWebhookBody),
)
async def change_webhook(request: Request, principal: Manager, context: Context, webhook_id: WebhookId) -> Response:
    """Change a webhook; it goes on with the event that is next, at once."""
    wanted = parse_optional(ChangeWebhookBody, await read_body(request))
    changed = context.subscriptions.change(
        principal.scope, webhook_id, url=wanted.url, statuses=wanted.statuses, secret=wanted.secret
    )
    return ok(webhook_resource(await asyncio.wrap_future(changed)))


@router.delete("/webhooks/{webhook_id}", response_model=Ok[Nothing], responses=errors(HTTPStatus.NOT_FOUND))
async def remove_webhook(principal: Manager, context: Context, webhook_id: WebhookId) -> Response:
    """Take a webhook away."""
    await asyncio.wrap_future(context.subscriptions.remove(principal.scope, webhook_id))
    return ok(Nothing())


@router.post("/webhooks/{webhook_id}/test", response_model=Ok[Trial], responses=errors(HTTPStatus.NOT_FOUND))
async def try_webhook(request: Request, principal: Manager, context: Context, webhook_id: WebhookId) -> Response:
    """Send a webhook an event of the type `test`, once, and say how that went."""
    found = await context.read(lambda connection: webhooks.get(connection, principal.scope, webhook_id))
    now = context.clock()
    message = trial(f"test-{secrets.token_hex(6)}", principal.account_id, now)
    headers = headers_of(message, context.subscriptions.secret_of(found), now)
    status, problem = None, ""
    try:
        status = await trials_of(request).post(principal.account_id, found.url, message, headers)
    except DeliveryError as error:
        problem = str(error)
    return ok(Trial(event_id=message.event_id, delivered=not problem, status_code=status, problem=problem))

"""Webhooks: subscriptions of an account to the events of its jobs, and test deliveries."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from pydantic import Field, StringConstraints

from trainmaster.schema.accounts import CreatedWebhook, Trial, WebhookList, WebhookResource
from trainmaster.server.coordinator.webhook_delivery import (
    MAX_URL_LENGTH,
    TIMEOUT_S,
    DeliveryError,
    Message,
    headers_of,
    trial,
)
from trainmaster.server.coordinator.webhook_subscriptions import LONGEST_SECRET, SHORTEST_SECRET, Subscriptions
from trainmaster.server.core.fields import Model
from trainmaster.server.core.states import JobStatus
from trainmaster.server.http.auth import ConcurrencyLimit, Manager
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import Nothing, Ok, instant, ok
from trainmaster.server.http.errors import RateLimitedError
from trainmaster.server.http.requests import read_model
from trainmaster.server.http.router import StrictRoute, body, errors
from trainmaster.server.store import webhooks
from trainmaster.server.store.webhooks import Webhook

AT_ONCE_OF_AN_ACCOUNT = 4
"""Limits test deliveries that wait for slow receivers."""


class TrialDeliveries:
    """Sends test deliveries. Belongs to one event loop."""

    def __init__(self, subscriptions: Subscriptions) -> None:
        self._poster = subscriptions.poster()
        self._limit = ConcurrencyLimit(AT_ONCE_OF_AN_ACCOUNT)

    async def post(self, account_id: str, url: str, message: Message, headers: Mapping[str, str]) -> int:
        """Send a message and return the status of the answer, a success.

        Raises:
            DeliveryError: the message did not arrive, or the receiver refused it.
            RateLimitedError: too many tests of the account are under way.
        """
        message_of_limit = "other tests of your account's webhooks are under way; wait for them"
        with self._limit.count(account_id, RateLimitedError(message_of_limit, TIMEOUT_S)):
            return await self._poster.post(url, message, headers)


Url = Annotated[str, StringConstraints(min_length=1, max_length=MAX_URL_LENGTH)]
Secret = Annotated[str, StringConstraints(min_length=SHORTEST_SECRET, max_length=LONGEST_SECRET)]
Statuses = Annotated[tuple[JobStatus, ...], Field(max_length=len(JobStatus))]


class CreateWebhookBody(Model):
    """A new webhook."""

    url: Url = Field(description="Where events are sent, by POST; http or https.")
    statuses: Statuses = Field(default=(), description="Of which statuses it tells; empty means all.")
    secret: Secret | None = Field(default=None, description="What deliveries are signed with; made when left out.")


class ChangeWebhookBody(Model):
    """What to change about a webhook; what is left out stays."""

    url: Url | None = None
    statuses: Statuses | None = None
    secret: Secret | None = None


def webhook_resource(webhook: Webhook) -> WebhookResource:
    return WebhookResource(
        webhook_id=webhook.webhook_id,
        url=webhook.url,
        statuses=list(webhook.statuses),
        created_at=instant(webhook.created_at),
        cursor=webhook.cursor,
        failures=webhook.failures,
        next_try_at=instant(webhook.not_before) if webhook.failures else None,
        delivered_at=instant(webhook.delivered_at),
        problem=webhook.problem,
        given_up=webhook.given_up,
    )


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
    wanted = await read_model(request, CreateWebhookBody)
    made = await asyncio.wrap_future(
        context.subscriptions.create(principal.scope, url=wanted.url, statuses=wanted.statuses, secret=wanted.secret)
    )
    status = HTTPStatus.CREATED if made.made else HTTPStatus.OK
    created: CreatedWebhook = {**webhook_resource(made.webhook), "secret": made.secret}
    return ok(created, status)


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
    wanted = await read_model(request, ChangeWebhookBody)
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
    deliveries: TrialDeliveries = request.app.state.trial_deliveries
    status, problem = None, ""
    try:
        status = await deliveries.post(principal.account_id, found.url, message, headers)
    except DeliveryError as error:
        problem = str(error)
    return ok(Trial(event_id=message.event_id, delivered=not problem, status_code=status, problem=problem))

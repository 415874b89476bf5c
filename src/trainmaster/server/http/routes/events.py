"""Events of one job, and the feed of all jobs of an account: pages, a stream, or webhooks."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Request, Response
from pydantic import Field, StringConstraints
from sqlalchemy import Connection

from trainmaster.schema.accounts import CreatedWebhook, Trial, WebhookList, WebhookResource
from trainmaster.schema.reports import EventPage, EventResource, FeedEvent, FeedPage
from trainmaster.server.coordinator.webhook_delivery import MAX_URL_LENGTH, TIMEOUT_S, DeliveryError, headers_of, trial
from trainmaster.server.coordinator.webhook_subscriptions import LONGEST_SECRET, SHORTEST_SECRET
from trainmaster.server.core.fields import Model
from trainmaster.server.core.job import JobEvent
from trainmaster.server.core.states import TERMINAL, JobStatus
from trainmaster.server.http.auth import ConcurrencyLimit, Manager, Viewer
from trainmaster.server.http.context import ApiContext, Context
from trainmaster.server.http.envelope import Nothing, Ok, clean, encoded, instant, ok, resource
from trainmaster.server.http.errors import RateLimitedError
from trainmaster.server.http.followers import EventStream, StreamPiece, followers_of, sse_end, sse_event, wants_events
from trainmaster.server.http.requests import PREFIX, read_model
from trainmaster.server.http.router import MAX_OFFSET, STREAM_TOO, JobId, StrictRoute, answers
from trainmaster.server.store import events, jobs, webhooks
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope
from trainmaster.server.store.webhooks import Webhook


def event_resource(event: JobEvent) -> EventResource:
    return {
        "job_id": event.job_id,
        "seq": event.seq,
        "ts": instant(event.at),
        "type": event.type,
        "from": event.from_status,
        "to": event.to_status,
        "actor": event.actor,
        "reason": event.reason,
        "attempt": event.attempt,
        "message": clean(event.message),
        "data": clean(dict(event.data)),
    }


def numbered_events(
    connection: Connection, scope: Scope, job_id: str | None, after: int, limit: int
) -> list[tuple[int, EventResource]]:
    """Events after a cursor: of a job, by their `seq`, or of all jobs, by their `id` in the feed."""
    if job_id is not None:
        found = events.page(connection, scope, job_id, after_seq=after, limit=limit)
        return [(event.seq, event_resource(event)) for event in found]
    return [
        (number, FeedEvent(**event_resource(event), id=number))
        for number, event in events.feed(connection, scope, after, limit)
    ]


router = APIRouter(prefix=PREFIX, route_class=StrictRoute, tags=["events"])

EventNumber = Annotated[str, StringConstraints(pattern=r"^[0-9]{0,18}$")]
After = Annotated[int | None, Query(ge=0, le=MAX_OFFSET, description="Only events after this cursor.")]
Limit = Annotated[int, Query(ge=1, le=1000, description="Events on a page.")]
LastEventId = Annotated[
    EventNumber | None, Header(alias="Last-Event-ID", description="The same as `after`, for streams.")
]


@router.get("/jobs/{job_id}/events", **answers(EventPage, 404, also=STREAM_TOO))
async def job_events(
    request: Request,
    principal: Viewer,
    context: Context,
    job_id: JobId,
    after: After = None,
    limit: Limit = 100,
    last_event_id: LastEventId = None,
) -> Response:
    """Read what happened to a job, or follow it with `Accept: text/event-stream`; the cursor is `seq`."""
    job = await context.read(jobs.get, principal.scope, job_id)
    return await _events(request, principal.scope, context, job.job_id, int(last_event_id or after or 0), limit)


@router.get("/events", **answers(FeedPage, also=STREAM_TOO))
async def feed(
    request: Request,
    principal: Viewer,
    context: Context,
    after: After = None,
    limit: Limit = 100,
    last_event_id: LastEventId = None,
) -> Response:
    """Read what happened to all jobs, or follow it with `Accept: text/event-stream`; the cursor is `id`.

    Pages begin with the first event there is; a stream without a cursor begins now.
    """
    start = int(last_event_id) if last_event_id else after
    if start is None and wants_events(request):
        start = await context.read(events.last_id, principal.scope)
    return await _events(request, principal.scope, context, None, start or 0, limit)


async def _events(
    request: Request, scope: Scope, context: ApiContext, job_id: str | None, start: int, limit: int
) -> Response:
    if wants_events(request):
        source = EventSource(scope=scope, job_id=job_id, database=context.database)
        return EventStream(followers_of(request).follow(source, str(start)))
    found = await context.read(numbered_events, scope, job_id, start, limit)
    return ok({"events": [event for _, event in found], "next_cursor": found[-1][0] if found else start})


PIECE_EVENTS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class _EventSnapshot:
    last: int
    status: JobStatus | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSource:
    """The events of one job until its end, or of an account, without end; the cursor is the last `seq` or `id`."""

    scope: Scope
    job_id: str | None = None
    database: Database = field(compare=False, repr=False)

    def take_snapshot(self, connection: Connection, before: _EventSnapshot | None, *, changed: bool) -> _EventSnapshot:
        if before is not None and not changed:
            return before
        if self.job_id is None:
            return _EventSnapshot(last=events.last_id(connection, self.scope))
        job = jobs.get(connection, self.scope, self.job_id, deleted=True)
        return _EventSnapshot(last=job.event_count, status=job.status)

    def read(self, snapshot: _EventSnapshot, cursor: str) -> StreamPiece:
        after = int(cursor)
        pieces: list[bytes] = []
        if after < snapshot.last:
            with self.database.read() as connection:
                found = numbered_events(connection, self.scope, self.job_id, after, PIECE_EVENTS)
            pieces = [sse_event("event", encoded(event).decode(), number) for number, event in found]
            # Skip the feed's events of other accounts for good.
            after = found[-1][0] if found else snapshot.last
        ended = snapshot.status in TERMINAL and after >= snapshot.last
        if ended:
            pieces.append(sse_end(str(snapshot.status)))
        return StreamPiece(data=b"".join(pieces), cursor=str(after), end=ended)


# Webhooks: subscriptions of an account to the events of its jobs, and test deliveries.

AT_ONCE_OF_AN_ACCOUNT = 4
"""Limits test deliveries that wait for slow receivers."""


Url = Annotated[str, StringConstraints(min_length=1, max_length=MAX_URL_LENGTH)]
Secret = Annotated[str, StringConstraints(min_length=SHORTEST_SECRET, max_length=LONGEST_SECRET)]
Statuses = Annotated[tuple[JobStatus, ...], Field(max_length=len(JobStatus))]


class CreateWebhookBody(Model):
    """A new webhook."""

    url: Url = Field(description="Where events are sent, by POST; http or https.")
    statuses: Statuses = Field(default=(), description="The statuses that it reports; empty means all.")
    secret: Secret | None = Field(default=None, description="What deliveries are signed with; made when left out.")


class ChangeWebhookBody(Model):
    """What to change about a webhook; what is left out stays."""

    url: Url | None = None
    statuses: Statuses | None = None
    secret: Secret | None = None


def webhook_resource(webhook: Webhook) -> WebhookResource:
    return resource(WebhookResource, webhook, next_try_at=instant(webhook.not_before) if webhook.failures else None)


webhooks_router = APIRouter(prefix=PREFIX, route_class=StrictRoute, tags=["webhooks"])

WebhookId = Annotated[str, Path(description="The webhook's id.", min_length=1, max_length=256)]


@webhooks_router.get("/webhooks", **answers(WebhookList))
async def list_webhooks(principal: Manager, context: Context) -> Response:
    """List the account's webhooks, and how each of them does."""
    found = await context.read(webhooks.all, principal.scope)
    return ok(WebhookList(webhooks=[webhook_resource(webhook) for webhook in found]))


@webhooks_router.post(
    "/webhooks",
    status_code=HTTPStatus.CREATED,
    **answers(
        CreatedWebhook,
        409,
        body=CreateWebhookBody,
        required=True,
        also={int(HTTPStatus.OK): {"model": Ok[CreatedWebhook], "description": "There was the very same one already."}},
    ),
)
async def create_webhook(request: Request, principal: Manager, context: Context) -> Response:
    """Make a webhook. It receives events from now on; its secret is shown this once."""
    wanted = await read_model(request, CreateWebhookBody)
    made = await asyncio.wrap_future(
        context.subscriptions.create(principal.scope, url=wanted.url, statuses=wanted.statuses, secret=wanted.secret)
    )
    status = HTTPStatus.CREATED if made.made else HTTPStatus.OK
    created: CreatedWebhook = {**webhook_resource(made.webhook), "secret": made.secret}
    return ok(created, status)


@webhooks_router.get("/webhooks/{webhook_id}", **answers(WebhookResource, 404))
async def show_webhook(principal: Manager, context: Context, webhook_id: WebhookId) -> Response:
    """Show one webhook."""
    return ok(webhook_resource(await context.read(webhooks.get, principal.scope, webhook_id)))


@webhooks_router.patch("/webhooks/{webhook_id}", **answers(WebhookResource, 404, body=ChangeWebhookBody))
async def change_webhook(request: Request, principal: Manager, context: Context, webhook_id: WebhookId) -> Response:
    """Change a webhook. Delivery continues at once with the next event."""
    wanted = await read_model(request, ChangeWebhookBody)
    changed = context.subscriptions.change(
        principal.scope, webhook_id, url=wanted.url, statuses=wanted.statuses, secret=wanted.secret
    )
    return ok(webhook_resource(await asyncio.wrap_future(changed)))


@webhooks_router.delete("/webhooks/{webhook_id}", **answers(Nothing, 404))
async def remove_webhook(principal: Manager, context: Context, webhook_id: WebhookId) -> Response:
    """Take a webhook away."""
    await asyncio.wrap_future(context.subscriptions.remove(principal.scope, webhook_id))
    return ok(Nothing())


@webhooks_router.post("/webhooks/{webhook_id}/test", **answers(Trial, 404))
async def try_webhook(request: Request, principal: Manager, context: Context, webhook_id: WebhookId) -> Response:
    """Send a webhook an event of the type `test`, once, and say how that went."""
    found = await context.read(webhooks.get, principal.scope, webhook_id)
    now = context.clock()
    message = trial(f"test-{secrets.token_hex(6)}", principal.account_id, now)
    headers = headers_of(message, context.subscriptions.secret_of(found), now)
    limit: ConcurrencyLimit = request.app.state.trial_deliveries
    status, problem = None, ""
    too_many = RateLimitedError("other tests of your account's webhooks are under way; wait for them", TIMEOUT_S)
    try:
        with limit.count(principal.account_id, too_many):
            status = await context.subscriptions.poster.post(found.url, message, headers)
    except DeliveryError as error:
        problem = str(error)
    return ok(Trial(event_id=message.event_id, delivered=not problem, status_code=status, problem=problem))

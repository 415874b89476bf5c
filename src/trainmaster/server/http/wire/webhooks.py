"""Webhooks, and what is asked of them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field, StringConstraints

from trainmaster.server.coordinator.webhook_delivery import MAX_URL_LENGTH
from trainmaster.server.coordinator.webhook_subscriptions import LONGEST_SECRET, SHORTEST_SECRET
from trainmaster.server.core.fields import Model
from trainmaster.server.core.states import JobStatus
from trainmaster.server.http.envelope import Wire
from trainmaster.server.http.wire.reported import instant
from trainmaster.server.store.webhooks import Webhook

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


class WebhookResource(Wire):
    """A webhook, without its secret."""

    webhook_id: str
    url: str
    statuses: list[str] = Field(description="Of which statuses it tells; empty means all.")
    created_at: datetime
    cursor: int = Field(description="The last event of the feed that is dealt with.")
    failures: int = Field(description="How often the next event was sent in vain.")
    next_try_at: datetime | None = Field(description="When it is sent again; null when it is not waited for.")
    delivered_at: datetime | None = Field(description="When the last delivery was taken.")
    problem: str = Field(description="Why the last delivery failed; empty after one that did not.")
    given_up: int = Field(description="How many events could not be delivered within a day.")


class CreatedWebhook(WebhookResource):
    """A webhook that was just made."""

    secret: str = Field(description="What deliveries are signed with; shown this once.")


class WebhookList(Wire):
    """All webhooks of an account."""

    webhooks: list[WebhookResource]


class Trial(Wire):
    """How a test delivery went."""

    event_id: str
    delivered: bool
    status_code: int | None = Field(description="Of the answer, if it was a good one.")
    problem: str


def webhook_resource(webhook: Webhook) -> WebhookResource:
    """A webhook as it is shown."""
    return WebhookResource(
        webhook_id=webhook.webhook_id,
        url=webhook.url,
        statuses=list(webhook.statuses),
        created_at=instant(webhook.created_at),
        cursor=webhook.cursor,
        failures=webhook.failures,
        next_try_at=instant(webhook.not_before) if webhook.failures else None,
        delivered_at=None if webhook.delivered_at is None else instant(webhook.delivered_at),
        problem=webhook.problem,
        given_up=webhook.given_up,
    )


def created_webhook(webhook: Webhook, secret: str) -> CreatedWebhook:
    """A new webhook as it is shown once."""
    return CreatedWebhook(**webhook_resource(webhook).model_dump(), secret=secret)

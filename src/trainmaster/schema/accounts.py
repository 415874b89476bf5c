"""Accounts, API keys and webhooks."""

from __future__ import annotations

from typing import Annotated

from typing_extensions import TypedDict

from trainmaster.schema import Doc, OneOf, Timestamp
from trainmaster.server.core.accounts import KeyScope


class AccountResource(TypedDict):
    """An account of the cluster."""

    account_id: str
    uid: int | None
    created_at: Timestamp


class AccountList(TypedDict):
    """Accounts, by name."""

    accounts: list[AccountResource]


class KeyResource(TypedDict):
    """An API key, without its secret."""

    key_id: str
    account_id: str
    name: str
    scopes: list[Annotated[str, OneOf(KeyScope)]]
    created_at: Timestamp
    created_by: Annotated[str, Doc("The id of the key that made it; empty for the first one of a server.")]
    revoked_at: Timestamp | None


class NewKey(KeyResource):
    """An API key that was just made."""

    key: Annotated[str, Doc("The secret; it is never shown again.")]


class KeyList(TypedDict):
    """Keys, the oldest first."""

    keys: list[KeyResource]


class WebhookResource(TypedDict):
    """A webhook, without its secret."""

    webhook_id: str
    url: str
    statuses: Annotated[list[str], Doc("The statuses that it reports; empty means all.")]
    created_at: Timestamp
    cursor: Annotated[int, Doc("The last event of the feed that was delivered or skipped.")]
    failures: Annotated[int, Doc("Failed deliveries of the next event.")]
    next_try_at: Annotated[Timestamp | None, Doc("When the next event is sent again; null: no retry is pending.")]
    delivered_at: Annotated[Timestamp | None, Doc("When the last delivery was accepted.")]
    problem: Annotated[str, Doc("Why the last delivery failed; empty if it succeeded.")]
    given_up: Annotated[int, Doc("Events that could not be delivered within a day.")]


class CreatedWebhook(WebhookResource):
    """A webhook that was just made."""

    secret: Annotated[str, Doc("Signs deliveries; it is never shown again.")]


class WebhookList(TypedDict):
    """All webhooks of an account."""

    webhooks: list[WebhookResource]


class Trial(TypedDict):
    """The result of a test delivery."""

    event_id: str
    delivered: bool
    status_code: Annotated[int | None, Doc("Of the answer, if it was a good one.")]
    problem: str

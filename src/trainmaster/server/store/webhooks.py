"""Webhooks: where the events of an account are sent, and which event is next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, delete, update

from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.store import schema
from trainmaster.server.store.records import Records, dumps
from trainmaster.server.store.scope import Scope

_webhooks = schema.webhooks


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """A cursor over the feed of an account, and where its events are sent."""

    webhook_id: str
    account_id: str
    url: str
    statuses: tuple[str, ...] = ()
    """The statuses that are sent; empty means all."""
    sealed: str = field(repr=False)
    """The encrypted secret that signs deliveries."""
    created_at: float
    cursor: int
    """The last event of the feed that was delivered or given up."""
    failures: int = 0
    """How often the next event was sent in vain."""
    not_before: float = 0.0
    """When it is sent again."""
    delivered_at: float | None = None
    problem: str = ""
    """Why the last delivery failed; empty after one that did not."""
    given_up: int = 0
    """How many events could not be delivered in all the time that they were given."""


_RECORDS = Records(Webhook, _webhooks)
_PROGRESS = ("cursor", "failures", "not_before", "delivered_at", "problem", "given_up")


def create(connection: Connection, scope: Scope, webhook: Webhook) -> None:
    scope.require(webhook.account_id)
    _RECORDS.insert(connection, webhook)


def all(connection: Connection, scope: Scope) -> list[Webhook]:  # noqa: A001 - read as `webhooks.all`
    return _RECORDS.find(connection, scope, order_by=[_webhooks.c.created_at, _webhooks.c.webhook_id])


def get(connection: Connection, scope: Scope, webhook_id: str) -> Webhook:
    this, missing = _webhooks.c.webhook_id == webhook_id, f"there is no webhook {webhook_id}"
    return _RECORDS.get(connection, Scope(scope.account), this, missing=missing)


def change(connection: Connection, scope: Scope, webhook: Webhook) -> None:
    """Store another url, other statuses or another secret; undelivered events are retried at once."""
    scope.require(webhook.account_id)
    wanted = {"url": webhook.url, "statuses": dumps(webhook.statuses), "sealed": webhook.sealed}
    values = {**wanted, "failures": 0, "not_before": 0.0}
    if connection.execute(update(_webhooks).where(*_is(webhook)).values(values)).rowcount == 0:
        raise NotFoundError(f"there is no webhook {webhook.webhook_id}")


def advance(connection: Connection, scope: Scope, before: Webhook, after: Webhook) -> bool:
    """Store the progress of a webhook, unless somebody else changed it meanwhile: then False."""
    scope.require(before.account_id)
    unchanged = (_webhooks.c.cursor == before.cursor, _webhooks.c.failures == before.failures)
    moved = update(_webhooks).where(*_is(before), *unchanged)
    return connection.execute(moved.values({name: getattr(after, name) for name in _PROGRESS})).rowcount > 0


def remove(connection: Connection, scope: Scope, webhook_id: str) -> None:
    gone = delete(_webhooks).where(_webhooks.c.webhook_id == webhook_id, _webhooks.c.account_id == scope.account)
    if connection.execute(gone).rowcount == 0:
        raise NotFoundError(f"there is no webhook {webhook_id}")


def _is(webhook: Webhook) -> tuple[Any, ...]:
    return (_webhooks.c.webhook_id == webhook.webhook_id, _webhooks.c.account_id == webhook.account_id)

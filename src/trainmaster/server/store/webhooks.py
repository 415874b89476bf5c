"""Webhooks: where an account wants to be told of its jobs, and how far each has been told."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update

from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.store import schema
from trainmaster.server.store.records import dumps
from trainmaster.server.store.scope import Scope

_webhooks = schema.webhooks


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """A cursor over the feed of an account, and where what it passes is sent."""

    webhook_id: str
    account_id: str
    url: str
    statuses: tuple[str, ...] = ()
    """Of which statuses it tells; empty means all."""
    sealed: str = field(repr=False)
    """What deliveries are signed with, sealed."""
    created_at: float
    cursor: int
    """The last event of the feed that is dealt with."""
    failures: int = 0
    """How often the next event was sent in vain."""
    not_before: float = 0.0
    """When it is sent again."""
    delivered_at: float | None = None
    problem: str = ""
    """Why the last delivery failed; empty after one that did not."""
    given_up: int = 0
    """How many events could not be delivered in all the time that they were given."""


_SELECT = select(*(_webhooks.c[name] for name in Webhook.__dataclass_fields__))
_PROGRESS = ("cursor", "failures", "not_before", "delivered_at", "problem", "given_up")


def create(connection: Connection, scope: Scope, webhook: Webhook) -> None:
    """Add a webhook to an account that exists."""
    scope.require(webhook.account_id)
    row = {name: getattr(webhook, name) for name in Webhook.__dataclass_fields__}
    connection.execute(insert(_webhooks), {**row, "statuses": dumps(webhook.statuses)})


def all(connection: Connection, scope: Scope) -> list[Webhook]:  # noqa: A001 - read as `webhooks.all`
    """Every webhook in scope, the oldest first."""
    query = _SELECT.order_by(_webhooks.c.created_at, _webhooks.c.webhook_id)
    return [_webhook(row) for row in connection.execute(scope.limit(query, _webhooks.c.account_id))]


def get(connection: Connection, scope: Scope, webhook_id: str) -> Webhook:
    """A webhook of one account.

    Raises:
        NotFoundError: there is no such webhook in the account.
    """
    query = _SELECT.where(_webhooks.c.webhook_id == webhook_id, _webhooks.c.account_id == scope.account)
    row = connection.execute(query).one_or_none()
    if row is None:
        raise NotFoundError(f"there is no webhook {webhook_id}")
    return _webhook(row)


def change(connection: Connection, scope: Scope, webhook: Webhook) -> None:
    """Store another url, other statuses or another secret; what could not be delivered is tried again at once.

    Raises:
        NotFoundError: there is no such webhook in the account.
    """
    scope.require(webhook.account_id)
    values = {
        "url": webhook.url,
        "statuses": dumps(webhook.statuses),
        "sealed": webhook.sealed,
        "failures": 0,
        "not_before": 0.0,
    }
    if connection.execute(update(_webhooks).where(*_is(webhook)).values(values)).rowcount == 0:
        raise NotFoundError(f"there is no webhook {webhook.webhook_id}")


def advance(connection: Connection, scope: Scope, before: Webhook, after: Webhook) -> bool:
    """Store how far a webhook has come, unless somebody else changed it meanwhile: then False."""
    scope.require(before.account_id)
    unchanged = (_webhooks.c.cursor == before.cursor, _webhooks.c.failures == before.failures)
    moved = update(_webhooks).where(*_is(before), *unchanged)
    return connection.execute(moved.values({name: getattr(after, name) for name in _PROGRESS})).rowcount > 0


def remove(connection: Connection, scope: Scope, webhook_id: str) -> None:
    """Take a webhook away; what it was not told of by now, it is never told of.

    Raises:
        NotFoundError: there is no such webhook in the account.
    """
    gone = delete(_webhooks).where(_webhooks.c.webhook_id == webhook_id, _webhooks.c.account_id == scope.account)
    if connection.execute(gone).rowcount == 0:
        raise NotFoundError(f"there is no webhook {webhook_id}")


def _is(webhook: Webhook) -> tuple[Any, ...]:
    return (_webhooks.c.webhook_id == webhook.webhook_id, _webhooks.c.account_id == webhook.account_id)


def _webhook(row: Row[Any]) -> Webhook:
    return Webhook(**{**row._mapping, "statuses": tuple(json.loads(row.statuses))})

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from store_records import ACME, EVERYTHING, OTHER

from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.store import accounts, webhooks
from trainmaster.server.store.database import Database
from trainmaster.server.store.webhooks import Webhook


def webhook(webhook_id: str, account_id: str = "acme", **fields: Any) -> Webhook:
    values: dict[str, Any] = {
        "webhook_id": webhook_id,
        "account_id": account_id,
        "url": "https://example.com",
        "statuses": ("FAILED",),
        "sealed": "v1.x.y",
        "created_at": 100.0,
        "cursor": 2**40,
    }
    return Webhook(**{**values, **fields})


@pytest.fixture
def filled(database: Database) -> Database:
    def fill(connection: sa.Connection) -> None:
        for account_id in ("acme", "other"):
            accounts.ensure(connection, EVERYTHING, account_id, 99.0)
        webhooks.create(connection, ACME, webhook("w1"))
        webhooks.create(connection, ACME, webhook("w2", created_at=101.0, statuses=()))
        webhooks.create(connection, OTHER, webhook("w1", "other", created_at=102.0))

    database.write_now(fill)
    return database


def stored(database: Database, webhook_id: str = "w1") -> Webhook:
    with database.read() as connection:
        return webhooks.get(connection, ACME, webhook_id)


def test_webhooks_come_back_as_they_were_stored(filled: Database) -> None:
    assert stored(filled) == webhook("w1")
    with filled.read() as connection:
        assert [found.webhook_id for found in webhooks.all(connection, ACME)] == ["w1", "w2"]
        assert len(webhooks.all(connection, EVERYTHING)) == 3


def test_webhook_of_another_account_is_out_of_reach(filled: Database) -> None:
    with filled.read() as connection, pytest.raises(NotFoundError):
        webhooks.get(connection, OTHER, "w2")
    for write in (
        lambda connection: webhooks.create(connection, OTHER, webhook("w9")),
        lambda connection: webhooks.change(connection, OTHER, webhook("w2")),
        lambda connection: webhooks.advance(connection, OTHER, webhook("w2"), webhook("w2")),
        lambda connection: webhooks.remove(connection, OTHER, "w2"),
    ):
        with pytest.raises(NotFoundError):
            filled.write_now(write)


def test_change_keeps_the_cursor_and_ends_the_wait(filled: Database) -> None:
    before = stored(filled)
    failing = replace(before, failures=3, not_before=900.0, problem="answered with 500")
    assert filled.write_now(lambda connection: webhooks.advance(connection, EVERYTHING, before, failing))
    assert stored(filled) == failing
    changed = replace(failing, url="https://example.com/2", statuses=(), sealed="v1.x.z")
    filled.write_now(lambda connection: webhooks.change(connection, ACME, changed))
    assert stored(filled) == replace(changed, failures=0, not_before=0.0)


def test_progress_on_what_somebody_changed_is_not_stored(filled: Database) -> None:
    before = stored(filled)
    ahead = replace(before, cursor=before.cursor + 1)
    assert filled.write_now(lambda connection: webhooks.advance(connection, EVERYTHING, before, ahead))
    late = replace(before, cursor=before.cursor + 5)
    assert not filled.write_now(lambda connection: webhooks.advance(connection, EVERYTHING, before, late))
    assert stored(filled) == ahead


def test_removed_webhook_is_gone(filled: Database) -> None:
    before = stored(filled)
    filled.write_now(lambda connection: webhooks.remove(connection, ACME, "w1"))
    with pytest.raises(NotFoundError):
        stored(filled)
    assert not filled.write_now(lambda connection: webhooks.advance(connection, EVERYTHING, before, before))
    with pytest.raises(NotFoundError):
        filled.write_now(lambda connection: webhooks.change(connection, ACME, before))
    with filled.read() as connection:
        assert webhooks.get(connection, OTHER, "w1").account_id == "other"

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from store_records import ACME, EVERYTHING, OTHER

from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.store import accounts
from trainmaster.server.store.accounts import ApiKey
from trainmaster.server.store.database import Database


def key(key_id: str, account_id: str = "acme", **fields: Any) -> ApiKey:
    values: dict[str, Any] = {
        "key_id": key_id,
        "account_id": account_id,
        "name": "laptop",
        "scopes": ("view", "manage"),
        "hash": f"hash of {key_id}",
        "created_at": 100.0,
    }
    return ApiKey(**{**values, **fields})


@pytest.fixture
def with_keys(database: Database) -> Database:
    def fill(connection: sa.Connection) -> None:
        for account_id in ("acme", "other", "acme"):
            accounts.ensure(connection, EVERYTHING, account_id, 99.0)
        accounts.create_key(connection, ACME, key("k1"))
        accounts.create_key(connection, ACME, key("k2", scopes=(), created_at=101.0))
        accounts.create_key(connection, OTHER, key("k3", "other"))

    database.write_now(fill)
    return database


def test_key_is_found_by_its_digest(with_keys: Database) -> None:
    with with_keys.read() as connection:
        assert accounts.find_key(connection, EVERYTHING, "hash of k1") == key("k1")
        assert accounts.find_key(connection, EVERYTHING, "hash of another") is None
        assert accounts.find_key(connection, OTHER, "hash of k1") is None


def test_keys_are_listed_by_account(with_keys: Database) -> None:
    with with_keys.read() as connection:
        assert [found.key_id for found in accounts.all_keys(connection, ACME)] == ["k1", "k2"]
        assert [found.key_id for found in accounts.all_keys(connection, EVERYTHING)] == ["k1", "k3", "k2"]


def test_revoked_key_is_listed_but_not_found(with_keys: Database) -> None:
    with_keys.write_now(lambda connection: accounts.revoke_key(connection, ACME, "k1", 200.0))
    with with_keys.read() as connection:
        assert accounts.find_key(connection, EVERYTHING, "hash of k1") is None
        assert accounts.all_keys(connection, ACME)[0].revoked_at == 200.0
    with pytest.raises(NotFoundError):
        with_keys.write_now(lambda connection: accounts.revoke_key(connection, ACME, "k1", 300.0))


def test_digest_belongs_to_one_key(with_keys: Database) -> None:
    with pytest.raises(sa.exc.IntegrityError):
        with_keys.write_now(
            lambda connection: accounts.create_key(connection, OTHER, key("k4", "other", hash="hash of k1"))
        )


def test_key_needs_an_account(database: Database) -> None:
    with pytest.raises(sa.exc.IntegrityError):
        database.write_now(lambda connection: accounts.create_key(connection, ACME, key("k1")))

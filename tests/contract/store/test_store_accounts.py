from __future__ import annotations

import pytest
from store_records import ACME, EVERYTHING, OTHER

from trainmaster.server.core.accounts import Account
from trainmaster.server.core.errors import ConflictError, NotFoundError
from trainmaster.server.store import accounts
from trainmaster.server.store.accounts import ApiKey
from trainmaster.server.store.database import Database


def account(account_id: str, uid: int | None = None) -> Account:
    return Account(account_id=account_id, uid=uid, created_at=100.0)


def key(key_id: str, account_id: str) -> ApiKey:
    return ApiKey(
        key_id=key_id, account_id=account_id, name="n", scopes=("view",), hash=f"hash of {key_id}", created_at=100.0
    )


@pytest.fixture
def with_accounts(database: Database) -> Database:
    for each in (account("acme", 1500), account("other")):
        database.write_now(lambda connection, each=each: accounts.create(connection, EVERYTHING, each))
    return database


def test_accounts_are_listed_by_scope(with_accounts: Database) -> None:
    with with_accounts.read() as connection:
        assert accounts.all(connection, EVERYTHING) == [account("acme", 1500), account("other")]
        assert accounts.all(connection, ACME) == [account("acme", 1500)]
        assert accounts.get(connection, ACME, "acme") == account("acme", 1500)
        with pytest.raises(NotFoundError):
            accounts.get(connection, OTHER, "acme")
        with pytest.raises(NotFoundError):
            accounts.get(connection, EVERYTHING, "nobody")


def test_account_is_made_once(with_accounts: Database) -> None:
    with pytest.raises(ConflictError):
        with_accounts.write_now(lambda connection: accounts.create(connection, EVERYTHING, account("acme")))
    with_accounts.write_now(lambda connection: accounts.ensure(connection, EVERYTHING, "acme", 200.0))
    with with_accounts.read() as connection:
        assert accounts.get(connection, EVERYTHING, "acme") == account("acme", 1500)


def test_uid_is_changed_and_taken_away(with_accounts: Database) -> None:
    for uid in (1600, None):
        with_accounts.write_now(lambda connection, uid=uid: accounts.set_uid(connection, EVERYTHING, "acme", uid))
        with with_accounts.read() as connection:
            assert accounts.get(connection, EVERYTHING, "acme").uid == uid
    with pytest.raises(NotFoundError):
        with_accounts.write_now(lambda connection: accounts.set_uid(connection, EVERYTHING, "nobody", 1))


def test_account_with_a_key_is_kept_and_goes_with_its_revoked_ones(with_accounts: Database) -> None:
    with_accounts.write_now(lambda connection: accounts.create_key(connection, ACME, key("k1", "acme")))
    with pytest.raises(ConflictError, match="keys"):
        with_accounts.write_now(lambda connection: accounts.remove(connection, EVERYTHING, "acme"))
    with_accounts.write_now(lambda connection: accounts.revoke_key(connection, ACME, "k1", 200.0))
    with_accounts.write_now(lambda connection: accounts.remove(connection, EVERYTHING, "acme"))
    with with_accounts.read() as connection:
        assert accounts.all(connection, EVERYTHING) == [account("other")]
        assert accounts.all_keys(connection, EVERYTHING) == []


def test_account_cannot_be_changed_from_within(with_accounts: Database) -> None:
    for change in (
        lambda connection: accounts.create(connection, ACME, account("new")),
        lambda connection: accounts.set_uid(connection, ACME, "acme", 1),
        lambda connection: accounts.remove(connection, ACME, "acme"),
    ):
        with pytest.raises(NotFoundError):
            with_accounts.write_now(change)


def test_default_account_is_kept(database: Database) -> None:
    database.write_now(lambda connection: accounts.ensure(connection, EVERYTHING, "default", 1.0))
    with pytest.raises(ConflictError):
        database.write_now(lambda connection: accounts.remove(connection, EVERYTHING, "default"))

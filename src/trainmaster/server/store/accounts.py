"""Accounts, whose jobs and files are kept apart, with their API keys and the idempotency keys of their requests."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from trainmaster.server.core.accounts import DEFAULT_ACCOUNT, Account
from trainmaster.server.core.errors import ConflictError, IdempotencyMismatchError, NotFoundError
from trainmaster.server.store import schema
from trainmaster.server.store.records import PreparedStatement, Records
from trainmaster.server.store.scope import Scope

_accounts, _jobs, _models = schema.accounts, schema.jobs, schema.promoted_models
_keys, _requests = schema.api_keys, schema.idempotency
_REMOVED_WITH_ACCOUNT = (
    _keys,
    schema.webhooks,
    _requests,
    schema.operations,
    schema.tinker_samplers,
    schema.tinker_runs,
    schema.tinker_sessions,
    _accounts,
)
"""In an order in which no row refers to one that is gone."""

_ACCOUNTS = Records(Account, _accounts)
_BY_ID = PreparedStatement(_ACCOUNTS.select.where(_accounts.c.account_id == bindparam("wanted")))


def all(connection: Connection, scope: Scope) -> list[Account]:  # noqa: A001 - read as `accounts.all`
    return _ACCOUNTS.find(connection, scope, order_by=[_accounts.c.account_id])


def get(connection: Connection, scope: Scope, account_id: str) -> Account:
    rows = _BY_ID.rows(connection, {"wanted": account_id}) if scope.admits(account_id) else []
    if not rows:
        raise NotFoundError(f"there is no account {account_id}")
    return _ACCOUNTS.from_row(rows[0])


def ensure(connection: Connection, scope: Scope, account_id: str, now: float) -> None:
    scope.require(account_id)
    if not _BY_ID.rows(connection, {"wanted": account_id}):
        connection.execute(insert(_accounts), {"account_id": account_id, "created_at": now})


def create(connection: Connection, scope: Scope, account: Account) -> None:
    scope.require_everything()
    if _BY_ID.rows(connection, {"wanted": account.account_id}):
        raise ConflictError(f"there is an account {account.account_id} already")
    left = select(_jobs.c.job_id).where(_jobs.c.account_id == account.account_id).limit(1)
    if connection.execute(left).first() is not None:
        # A new account of this name would get the events, usage and checkpoints of the old one.
        raise ConflictError(f"there was an account {account.account_id}, whose jobs are on record; take another name")
    _ACCOUNTS.insert(connection, account)


def set_uid(connection: Connection, scope: Scope, account_id: str, uid: int | None) -> None:
    """Set the system user that runs the jobs of an account."""
    scope.require_everything()
    changed = update(_accounts).where(_accounts.c.account_id == account_id).values(uid=uid)
    if connection.execute(changed).rowcount == 0:
        raise NotFoundError(f"there is no account {account_id}")


def remove(connection: Connection, scope: Scope, account_id: str) -> None:
    """Remove an account that has no jobs, keys or models left, with its webhooks, operations and sessions."""
    scope.require_everything()
    get(connection, scope, account_id)
    if account_id == DEFAULT_ACCOUNT:
        raise ConflictError("the account default is always there: the key of the first start belongs to it")
    for held, condition, message in (
        (_jobs, _jobs.c.deleted_at.is_(None), "has jobs; delete them first"),
        (_keys, _keys.c.revoked_at.is_(None), "has keys; revoke them first"),
        (_models, None, "has promoted models; delete them first"),
    ):
        query = select(held.c.account_id).where(held.c.account_id == account_id).limit(1)
        if connection.execute(query if condition is None else query.where(condition)).first() is not None:
            raise ConflictError(f"account {account_id} {message}")
    for table in _REMOVED_WITH_ACCOUNT:
        connection.execute(delete(table).where(table.c.account_id == account_id))


# API keys, of which only the digest is stored.


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key of an account, without the key."""

    key_id: str
    account_id: str
    name: str
    scopes: tuple[str, ...]
    hash: str
    """SHA-256 of the key, in hexadecimal."""
    created_at: float
    created_by: str = ""
    """The id of the key that made it; empty for the first one."""
    revoked_at: float | None = None


_API_KEYS = Records(ApiKey, _keys)


def create_key(connection: Connection, scope: Scope, key: ApiKey) -> None:
    scope.require(key.account_id)
    _API_KEYS.insert(connection, key)


def find_key(connection: Connection, scope: Scope, digest: str) -> ApiKey | None:
    """The key with this digest, unless it was revoked."""
    return _API_KEYS.first(connection, scope, _keys.c.hash == digest, _keys.c.revoked_at.is_(None))


def all_keys(connection: Connection, scope: Scope) -> list[ApiKey]:
    """Every key, also revoked ones, the oldest first."""
    return _API_KEYS.find(connection, scope, order_by=[_keys.c.created_at, _keys.c.key_id])


def get_key(connection: Connection, scope: Scope, key_id: str) -> ApiKey:
    """One key, also a revoked one."""
    return _API_KEYS.get(connection, scope, _keys.c.key_id == key_id, missing=f"there is no key {key_id}")


def key_was_known(connection: Connection, scope: Scope, digest: str) -> bool:
    return _API_KEYS.first(connection, scope, _keys.c.hash == digest) is not None


def revoke_key(connection: Connection, scope: Scope, key_id: str, now: float) -> None:
    revoked = update(_keys).where(_keys.c.key_id == key_id, _keys.c.revoked_at.is_(None)).values(revoked_at=now)
    if connection.execute(scope.limit(revoked, _keys.c.account_id)).rowcount == 0:
        raise NotFoundError(f"there is no key {key_id}")


# Idempotency keys: which job the first request with a key created or changed.


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotencyRecord:
    key: str
    fingerprint: str
    """Of the request: its route and its body."""
    job_id: str
    created_at: float


_REQUESTS = Records(IdempotencyRecord, _requests)
_REQUEST = PreparedStatement(
    _REQUESTS.select.where(_requests.c.key == bindparam("wanted"), _requests.c.account_id == bindparam("account"))
)
_INSERT_REQUEST = PreparedStatement(insert(_requests))


def find_request(connection: Connection, scope: Scope, key: str, *fingerprints: str) -> IdempotencyRecord | None:
    """The record of an earlier request with this key, or an error when its fingerprint is none of these."""
    rows = _REQUEST.rows(connection, {"wanted": key, "account": scope.account})
    record = _REQUESTS.from_row(rows[0]) if rows else None
    if record is not None and record.fingerprint not in fingerprints:
        raise IdempotencyMismatchError()
    return record


def record_request(connection: Connection, scope: Scope, record: IdempotencyRecord) -> None:
    """Record a request, in the transaction that carries it out and after `find_request` in the same transaction."""
    _INSERT_REQUEST.execute(connection, _REQUESTS.to_row(record, account_id=scope.account))


def forget_requests(connection: Connection, scope: Scope, before: float) -> int:
    """Delete the records of requests before a time; returns how many there were."""
    old = delete(_requests).where(_requests.c.created_at < before)
    return connection.execute(scope.limit(old, _requests.c.account_id)).rowcount

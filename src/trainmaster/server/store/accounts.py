"""Accounts: whose jobs, keys and files are kept apart."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, Row, bindparam, delete, insert, select, update

from trainmaster.server.core.accounts import DEFAULT_ACCOUNT, Account
from trainmaster.server.core.errors import ConflictError, IdempotencyMismatchError, NotFoundError
from trainmaster.server.store import schema
from trainmaster.server.store.records import Prepared, dumps
from trainmaster.server.store.scope import Scope

_accounts, _jobs, _models = schema.accounts, schema.jobs, schema.promoted_models
_keys = schema.api_keys
_ITS_OWN = (
    _keys,
    schema.webhooks,
    schema.idempotency,
    schema.operations,
    schema.tinker_samplers,
    schema.tinker_runs,
    schema.tinker_sessions,
    _accounts,
)
"""What goes with an account, in an order in which nothing refers to what is gone."""

_ACCOUNTS = select(*(_accounts.c[name] for name in Account.__dataclass_fields__))
_BY_ID = Prepared(_ACCOUNTS.where(_accounts.c.account_id == bindparam("wanted")))


def all(connection: Connection, scope: Scope) -> list[Account]:  # noqa: A001 - read as `accounts.all`
    """Every account in scope, by name."""
    query = scope.limit(_ACCOUNTS.order_by(_accounts.c.account_id), _accounts.c.account_id)
    return [Account(**row._mapping) for row in connection.execute(query)]


def get(connection: Connection, scope: Scope, account_id: str) -> Account:
    """One account.

    Raises:
        NotFoundError: there is no such account in scope.
    """
    row = _BY_ID.execute(connection, {"wanted": account_id}).first() if scope.admits(account_id) else None
    if row is None:
        raise NotFoundError(f"there is no account {account_id}")
    return Account(**row._mapping)


def ensure(connection: Connection, scope: Scope, account_id: str, now: float) -> None:
    """Make an account unless it is there."""
    scope.require(account_id)
    if _BY_ID.execute(connection, {"wanted": account_id}).first() is None:
        connection.execute(insert(_accounts), {"account_id": account_id, "created_at": now})


def create(connection: Connection, scope: Scope, account: Account) -> None:
    """Make an account.

    Raises:
        ConflictError: there is one of that name, or there was one that left jobs behind.
    """
    scope.require_everything()
    if _BY_ID.execute(connection, {"wanted": account.account_id}).first() is not None:
        raise ConflictError(f"there is an account {account.account_id} already")
    left = select(_jobs.c.job_id).where(_jobs.c.account_id == account.account_id).limit(1)
    if connection.execute(left).first() is not None:
        # Whoever had the name after it would have its events, usage and checkpoints.
        raise ConflictError(f"there was an account {account.account_id}, whose jobs are on record; take another name")
    values = {name: getattr(account, name) for name in Account.__dataclass_fields__}
    connection.execute(insert(_accounts), values)


def set_uid(connection: Connection, scope: Scope, account_id: str, uid: int | None) -> None:
    """Say as whom the jobs of an account run.

    Raises:
        NotFoundError: there is no such account.
    """
    scope.require_everything()
    changed = update(_accounts).where(_accounts.c.account_id == account_id).values(uid=uid)
    if connection.execute(changed).rowcount == 0:
        raise NotFoundError(f"there is no account {account_id}")


def remove(connection: Connection, scope: Scope, account_id: str) -> None:
    """Take an account away, with its revoked keys, its webhooks, its operations and its sessions.

    Raises:
        NotFoundError: there is no such account.
        ConflictError: it is the default account, or it has jobs, keys or promoted models.
    """
    scope.require_everything()
    get(connection, scope, account_id)
    if account_id == DEFAULT_ACCOUNT:
        raise ConflictError("the account default is always there: the key of the first start belongs to it")
    jobs = select(_jobs.c.job_id).where(_jobs.c.account_id == account_id, _jobs.c.deleted_at.is_(None)).limit(1)
    if connection.execute(jobs).first() is not None:
        raise ConflictError(f"account {account_id} has jobs; delete them first")
    keys = select(_keys.c.key_id).where(_keys.c.account_id == account_id, _keys.c.revoked_at.is_(None)).limit(1)
    if connection.execute(keys).first() is not None:
        raise ConflictError(f"account {account_id} has keys; revoke them first")
    models = select(_models.c.model_id).where(_models.c.account_id == account_id).limit(1)
    if connection.execute(models).first() is not None:
        raise ConflictError(f"account {account_id} has promoted models; delete them first")
    for table in _ITS_OWN:
        connection.execute(delete(table).where(table.c.account_id == account_id))


# API keys: known by their digest only.


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key of an account, without the key."""

    key_id: str
    account_id: str
    name: str
    scopes: tuple[str, ...]
    """What it may do."""
    hash: str
    """SHA-256 of the key, in hexadecimal."""
    created_at: float
    created_by: str = ""
    """The id of the key that made it; empty for the first one."""
    revoked_at: float | None = None


_API_KEYS = select(*(_keys.c[name] for name in ApiKey.__dataclass_fields__))
_BY_HASH = _API_KEYS.where(_keys.c.hash == bindparam("digest"), _keys.c.revoked_at.is_(None))


def create_key(connection: Connection, scope: Scope, key: ApiKey) -> None:
    """Add a key to an account that exists."""
    scope.require(key.account_id)
    row = {name: getattr(key, name) for name in ApiKey.__dataclass_fields__}
    connection.execute(insert(_keys), {**row, "scopes": dumps(key.scopes)})


def find_key(connection: Connection, scope: Scope, digest: str) -> ApiKey | None:
    """The key with this digest, unless it was revoked."""
    row = connection.execute(_BY_HASH, {"digest": digest}).one_or_none()
    return _key(row) if row is not None and scope.admits(row.account_id) else None


def all_keys(connection: Connection, scope: Scope) -> list[ApiKey]:
    """Every key, also those that were revoked, the oldest first."""
    query = _API_KEYS.order_by(_keys.c.created_at, _keys.c.key_id)
    return [_key(row) for row in connection.execute(scope.limit(query, _keys.c.account_id))]


def get_key(connection: Connection, scope: Scope, key_id: str) -> ApiKey:
    """One key, also one that was revoked.

    Raises:
        NotFoundError: there is no such key in scope.
    """
    query = scope.limit(_API_KEYS.where(_keys.c.key_id == key_id), _keys.c.account_id)
    row = connection.execute(query).first()
    if row is None:
        raise NotFoundError(f"there is no key {key_id}")
    return _key(row)


def key_was_known(connection: Connection, scope: Scope, digest: str) -> bool:
    """Whether there is or was a key with this digest."""
    query = scope.limit(select(_keys.c.key_id).where(_keys.c.hash == digest), _keys.c.account_id)
    return connection.execute(query).first() is not None


def revoke_key(connection: Connection, scope: Scope, key_id: str, now: float) -> None:
    """Take a key's power away, for good.

    Raises:
        NotFoundError: there is no such key in scope, or it was revoked before.
    """
    revoked = update(_keys).where(_keys.c.key_id == key_id, _keys.c.revoked_at.is_(None)).values(revoked_at=now)
    if scope.account_id is not None:
        revoked = revoked.where(_keys.c.account_id == scope.account_id)
    if connection.execute(revoked).rowcount == 0:
        raise NotFoundError(f"there is no key {key_id}")


def _key(row: Row[Any]) -> ApiKey:
    return ApiKey(**{**row._mapping, "scopes": tuple(json.loads(row.scopes))})


# Idempotency keys: which job the first request with a key made or changed.

_requests = schema.idempotency


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotencyRecord:
    """A request that was carried out."""

    key: str
    fingerprint: str
    """Of the request: its route and its body."""
    job_id: str
    created_at: float


_REQUEST = Prepared(
    select(*(_requests.c[name] for name in IdempotencyRecord.__dataclass_fields__)).where(
        _requests.c.key == bindparam("wanted"), _requests.c.account_id == bindparam("account")
    )
)
_INSERT_REQUEST = Prepared(insert(_requests))


def find_request(connection: Connection, scope: Scope, key: str, *fingerprints: str) -> IdempotencyRecord | None:
    """The record of an earlier request with this key, if there was one; any of the fingerprints may be its own.

    Raises:
        IdempotencyMismatchError: that request was a different one.
    """
    row = _REQUEST.execute(connection, {"wanted": key, "account": scope.account}).one_or_none()
    if row is None:
        return None
    if row.fingerprint not in fingerprints:
        raise IdempotencyMismatchError()
    return IdempotencyRecord(**row._mapping)


def record_request(connection: Connection, scope: Scope, record: IdempotencyRecord) -> None:
    """Keep a record, in the transaction that does what was asked; `find` comes before it in the same one."""
    _INSERT_REQUEST.execute(connection, {**asdict(record), "account_id": scope.account})


def forget_requests(connection: Connection, scope: Scope, before: float) -> int:
    """Forget what was asked before a time; says how much that was."""
    old = delete(_requests).where(_requests.c.created_at < before)
    if scope.account_id is not None:
        old = old.where(_requests.c.account_id == scope.account_id)
    return connection.execute(old).rowcount

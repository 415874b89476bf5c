"""API keys: known by their digest only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, bindparam, insert, select, update

from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.store import schema
from trainmaster.server.store.records import dumps
from trainmaster.server.store.scope import Scope

_keys = schema.api_keys


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


_SELECT = select(*(_keys.c[name] for name in ApiKey.__dataclass_fields__))
_BY_HASH = _SELECT.where(_keys.c.hash == bindparam("digest"), _keys.c.revoked_at.is_(None))


def create(connection: Connection, scope: Scope, key: ApiKey) -> None:
    """Add a key to an account that exists."""
    scope.require(key.account_id)
    row = {name: getattr(key, name) for name in ApiKey.__dataclass_fields__}
    connection.execute(insert(_keys), {**row, "scopes": dumps(key.scopes)})


def find_by_hash(connection: Connection, scope: Scope, digest: str) -> ApiKey | None:
    """The key with this digest, unless it was revoked."""
    row = connection.execute(_BY_HASH, {"digest": digest}).one_or_none()
    return _key(row) if row is not None and scope.admits(row.account_id) else None


def all(connection: Connection, scope: Scope) -> list[ApiKey]:  # noqa: A001 - read as `keys.all`
    """Every key, also those that were revoked, the oldest first."""
    query = _SELECT.order_by(_keys.c.created_at, _keys.c.key_id)
    return [_key(row) for row in connection.execute(scope.limit(query, _keys.c.account_id))]


def get(connection: Connection, scope: Scope, key_id: str) -> ApiKey:
    """One key, also one that was revoked.

    Raises:
        NotFoundError: there is no such key in scope.
    """
    query = scope.limit(_SELECT.where(_keys.c.key_id == key_id), _keys.c.account_id)
    row = connection.execute(query).first()
    if row is None:
        raise NotFoundError(f"there is no key {key_id}")
    return _key(row)


def known(connection: Connection, scope: Scope, digest: str) -> bool:
    """Whether there is or was a key with this digest."""
    query = scope.limit(select(_keys.c.key_id).where(_keys.c.hash == digest), _keys.c.account_id)
    return connection.execute(query).first() is not None


def revoke(connection: Connection, scope: Scope, key_id: str, now: float) -> None:
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

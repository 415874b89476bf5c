"""Idempotency keys: which job the first request with a key made or changed."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sqlalchemy import Connection, bindparam, delete, insert, select

from trainmaster.server.core.errors import IdempotencyMismatchError
from trainmaster.server.store import schema
from trainmaster.server.store.scope import Scope
from trainmaster.server.store.statements import Prepared

_records = schema.idempotency


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotencyRecord:
    """A request that was carried out."""

    key: str
    fingerprint: str
    """Of the request: its route and its body."""
    job_id: str
    created_at: float


_FIND = Prepared(
    select(*(_records.c[name] for name in IdempotencyRecord.__dataclass_fields__)).where(
        _records.c.key == bindparam("wanted"), _records.c.account_id == bindparam("account")
    )
)
_INSERT = Prepared(insert(_records))


def find(connection: Connection, scope: Scope, key: str, *fingerprints: str) -> IdempotencyRecord | None:
    """The record of an earlier request with this key, if there was one; any of the fingerprints may be its own.

    Raises:
        IdempotencyMismatchError: that request was a different one.
    """
    row = _FIND.execute(connection, {"wanted": key, "account": scope.account}).one_or_none()
    if row is None:
        return None
    if row.fingerprint not in fingerprints:
        raise IdempotencyMismatchError()
    return IdempotencyRecord(**row._mapping)


def put(connection: Connection, scope: Scope, record: IdempotencyRecord) -> None:
    """Keep a record, in the transaction that does what was asked; `find` comes before it in the same one."""
    _INSERT.execute(connection, {**asdict(record), "account_id": scope.account})


def prune(connection: Connection, scope: Scope, before: float) -> int:
    """Forget what was asked before a time; says how much that was."""
    old = delete(_records).where(_records.c.created_at < before)
    if scope.account_id is not None:
        old = old.where(_records.c.account_id == scope.account_id)
    return connection.execute(old).rowcount

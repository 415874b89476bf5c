"""Facts about the whole installation, by name."""

from __future__ import annotations

from sqlalchemy import Connection, insert, select, update

from trainmaster.store import schema
from trainmaster.store.scope import Scope

_meta = schema.meta


def get(connection: Connection, scope: Scope, key: str) -> str | None:
    """A fact; None when it was never put."""
    scope.require_everything()
    return connection.execute(select(_meta.c.value).where(_meta.c.key == key)).scalar()


def put(connection: Connection, scope: Scope, key: str, value: str) -> None:
    """Keep a fact, instead of what was there."""
    scope.require_everything()
    if connection.execute(update(_meta).where(_meta.c.key == key).values(value=value)).rowcount == 0:
        connection.execute(insert(_meta), {"key": key, "value": value})

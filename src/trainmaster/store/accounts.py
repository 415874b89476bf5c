"""Accounts: whose jobs, keys and files are kept apart."""

from __future__ import annotations

from sqlalchemy import Connection, insert, select

from trainmaster.store import schema
from trainmaster.store.scope import Scope

_accounts = schema.accounts


def ensure(connection: Connection, scope: Scope, account_id: str, now: float) -> None:
    """Make an account unless it is there."""
    scope.require(account_id)
    present = select(_accounts.c.account_id).where(_accounts.c.account_id == account_id)
    if connection.execute(present).first() is None:
        connection.execute(insert(_accounts), {"account_id": account_id, "created_at": now})

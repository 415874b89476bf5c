"""Whose rows a store function may see and change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select

from trainmaster.server.core.errors import NotFoundError


@dataclass(frozen=True, slots=True)
class Scope:
    """One account, or everything.

    A read sees nothing outside its scope. A write outside it raises `NotFoundError`, as does a write to what belongs
    to no account (nodes, queues, the lease) by anything less than everything.
    """

    account_id: str | None

    @classmethod
    def everything(cls) -> Scope:
        """All accounts, and what belongs to none: for the coordinator and for the operator."""
        return cls(None)

    @property
    def account(self) -> str:
        """The one account, where there must be one: some ids are unique only within it."""
        if self.account_id is None:
            raise ValueError("this needs the scope of one account")
        return self.account_id

    def admits(self, account_id: str) -> bool:
        """Whether the rows of an account are in scope."""
        return self.account_id is None or self.account_id == account_id

    def require(self, account_id: str) -> None:
        """Refuse to touch an account that is out of scope."""
        if not self.admits(account_id):
            raise NotFoundError()

    def require_everything(self) -> None:
        """Refuse to touch what belongs to no account."""
        if self.account_id is not None:
            raise NotFoundError()

    def limit(self, statement: Select[Any], column: ColumnElement[str]) -> Select[Any]:
        """A query, restricted to the rows in scope."""
        return statement if self.account_id is None else statement.where(column == self.account_id)

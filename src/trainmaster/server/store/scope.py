"""Whose rows a store function may see and change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Delete, Select, Update

from trainmaster.server.core.errors import NotFoundError

Statement = TypeVar("Statement", Select[Any], Update, Delete)


@dataclass(frozen=True, slots=True)
class Scope:
    """One account, or everything. A read sees nothing outside its scope; a write outside it raises `NotFoundError`, as
    does a write to what belongs to no account (nodes, queues, the lease) by anything less than everything."""

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
        return self.account_id is None or self.account_id == account_id

    def require(self, account_id: str) -> None:
        if not self.admits(account_id):
            raise NotFoundError()

    def require_everything(self) -> None:
        if self.account_id is not None:
            raise NotFoundError()

    def limit(self, statement: Statement, owner: ColumnElement[str]) -> Statement:
        """The statement, restricted to the rows in scope; `owner` is the column that names their account."""
        return statement if self.account_id is None else statement.where(owner == self.account_id)

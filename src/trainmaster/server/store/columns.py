"""What the tables are put together from: columns that hold a value unless their name says `maybe`."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    text,
)
from sqlalchemy.schema import SchemaItem

metadata = MetaData(naming_convention={"pk": "pk_%(table_name)s", "fk": "fk_%(table_name)s_%(referred_table_name)s"})
"""Where all tables are listed."""


def _columns(kind: Any, *names: str, nullable: bool = False, **options: Any) -> list[Column[Any]]:
    return [Column(name, kind, nullable=nullable, **options) for name in names]


texts = functools.partial(_columns, Text)
integers = functools.partial(_columns, Integer)
"""Numbers that 32 bits hold."""
big_integers = functools.partial(_columns, BigInteger)
"""Numbers that may take 64 bits: sizes, and steps."""
numbers = functools.partial(_columns, Double)
"""Numbers with a fraction; also times."""
flags = functools.partial(_columns, Boolean)
maybe_texts = functools.partial(texts, nullable=True)
maybe_integers = functools.partial(integers, nullable=True)
maybe_numbers = functools.partial(numbers, nullable=True)
keys = functools.partial(texts, primary_key=True)
number_keys = functools.partial(integers, primary_key=True, autoincrement=False)


def rising_id() -> list[Column[Any]]:
    """The cursor of a feed: rises in the order of commits and is never used twice."""
    return _columns(BigInteger().with_variant(Integer, "sqlite"), "id", primary_key=True, autoincrement=True)


def of_a_job() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(["job_id", "account_id"], ["jobs.job_id", "jobs.account_id"])


def of_an_account() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(["account_id"], ["accounts.account_id"])


def of_a_session() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(
        ["session_id", "account_id"], ["tinker_sessions.session_id", "tinker_sessions.account_id"]
    )


def where(condition: str) -> dict[str, Any]:
    """The options of an index over some rows only."""
    return {"sqlite_where": text(condition), "postgresql_where": text(condition)}


def table(name: str, *parts: SchemaItem | Iterable[SchemaItem], **options: Any) -> Table:
    items = [item for part in parts for item in ([part] if isinstance(part, SchemaItem) else part)]
    return Table(name, metadata, *items, **options)


def index(name: str, table: Table, *columns: str, **options: Any) -> None:
    Index(name, *(table.c[column] for column in columns), **options)

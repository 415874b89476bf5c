"""What the tables are put together from: columns that hold a value unless their name says `maybe`."""

from __future__ import annotations

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
    Text,
    text,
)

metadata = MetaData(
    naming_convention={"pk": "pk_%(table_name)s", "fk": "fk_%(table_name)s_%(referred_table_name)s"},
)
"""Where all tables are listed."""


def text_column(name: str, **options: Any) -> Column[str]:
    return Column(name, Text, nullable=False, **options)


def integer(name: str, **options: Any) -> Column[int]:
    """A number that 32 bits hold."""
    return Column(name, Integer, nullable=False, **options)


def big_integer(name: str) -> Column[int]:
    """A number that may take 64 bits: sizes, and steps."""
    return Column(name, BigInteger, nullable=False)


def number(name: str) -> Column[float]:
    """A number with a fraction; also times."""
    return Column(name, Double, nullable=False)


def flag(name: str) -> Column[bool]:
    return Column(name, Boolean, nullable=False)


def maybe_text(name: str) -> Column[str | None]:
    return Column(name, Text)


def maybe_number(name: str) -> Column[float | None]:
    return Column(name, Double)


def of_a_job() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(["job_id", "account_id"], ["jobs.job_id", "jobs.account_id"])


def partial_index(name: str, *columns: Column[Any], where: str, unique: bool = False) -> Index:
    condition = text(where)
    return Index(name, *columns, unique=unique, sqlite_where=condition, postgresql_where=condition)

"""Statements of the hot path: compiled once, then handed to the driver as they are.

For a row as wide as a job's, SQLAlchemy's own `execute` takes more than twice as long. What it does besides is to
convert values, so these statements bind and return only what drivers take anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, CursorResult, Select, UpdateBase


class Prepared:
    """One statement, for values of the same names at each execution."""

    def __init__(self, statement: Select[Any] | UpdateBase, columns: Iterable[str] | None = None) -> None:
        """Take a statement, and the columns that it sets where it sets any."""
        self._statement = statement
        self._columns = None if columns is None else list(columns)
        self._compiled: dict[str, tuple[str, Sequence[str] | None]] = {}

    def execute(self, connection: Connection, values: Mapping[str, Any]) -> CursorResult[Any]:
        """Execute it once."""
        sql, order = self._compiled.get(connection.dialect.name) or self._compile(connection)
        return connection.exec_driver_sql(
            sql, dict(values) if order is None else tuple([values[name] for name in order])
        )

    def execute_many(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        """Execute it for each row, of which there is at least one."""
        sql, order = self._compiled.get(connection.dialect.name) or self._compile(connection)
        if order is None:
            connection.exec_driver_sql(sql, [dict(row) for row in rows])
        else:
            connection.exec_driver_sql(sql, [tuple([row[name] for name in order]) for row in rows])

    def _compile(self, connection: Connection) -> tuple[str, Sequence[str] | None]:
        compiled = self._statement.compile(dialect=connection.dialect, column_keys=self._columns)
        self._compiled[connection.dialect.name] = made = (str(compiled), compiled.positiontup)
        return made

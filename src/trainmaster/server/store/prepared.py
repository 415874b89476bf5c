"""Statements of the hot path: compiled once, then handed to the driver as they are.

For a row as wide as a job's, SQLAlchemy's own `execute` takes more than twice as long. What it does besides is to
convert values, so these statements bind only what drivers take anyway, and return what drivers give.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, CursorResult, Select, UpdateBase, bindparam


class Prepared:
    """One statement, for values of the same names at each execution."""

    def __init__(self, statement: Select[Any] | UpdateBase, columns: Iterable[str] | None = None) -> None:
        """Take a statement, and the columns that it sets where it sets any."""
        self._statement = statement
        self._columns = None if columns is None else list(columns)
        self._compiled: dict[str, tuple[str, Sequence[str] | None, Mapping[str, Any]]] = {}

    def execute(self, connection: Connection, values: Mapping[str, Any]) -> CursorResult[Any]:
        """Execute it once."""
        return connection.exec_driver_sql(*self._bound(connection, values))

    def rows(self, connection: Connection, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """What it selects, as the driver gives it: to describe the columns takes longer than to read a few rows."""
        if not connection.in_transaction():
            connection.begin()
        cursor = connection.connection.cursor()
        try:
            cursor.execute(*self._bound(connection, values))
            return list(cursor.fetchall())
        finally:
            cursor.close()

    def execute_many(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        """Execute it for each row, of which there is at least one."""
        sql, order, _ = self._compiled.get(connection.dialect.name) or self._compile(connection)
        if order is None:
            connection.exec_driver_sql(sql, [dict(row) for row in rows])
        else:
            connection.exec_driver_sql(sql, [tuple([row[name] for name in order]) for row in rows])

    def _bound(self, connection: Connection, values: Mapping[str, Any]) -> tuple[str, Any]:
        sql, order, constants = self._compiled.get(connection.dialect.name) or self._compile(connection)
        whole = {**constants, **values}
        return sql, whole if order is None else tuple([whole[name] for name in order])

    def _compile(self, connection: Connection) -> tuple[str, Sequence[str] | None, Mapping[str, Any]]:
        compiled = self._statement.compile(dialect=connection.dialect, column_keys=self._columns)
        # Values that the statement itself has, such as a limit.
        constants = {name: value for name, value in compiled.params.items() if value is not None}
        self._compiled[connection.dialect.name] = made = (str(compiled), compiled.positiontup, constants)
        return made


def prepared_by_scope(query: Select[Any], owner: ColumnElement[str]) -> Mapping[bool, Prepared]:
    """A query for everything (True), and one whose rows belong to the account that `account` names (False)."""
    return {True: Prepared(query), False: Prepared(query.where(owner == bindparam("account")))}

"""SQL statements: prepared ones, lists split into portions, and the time of the database's clock."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, CursorResult, Double, Select, UpdateBase, bindparam
from sqlalchemy.sql.functions import FunctionElement


class database_time(FunctionElement[float]):  # noqa: N801 - read as a function of SQL
    """The current time by the database's clock, in Unix seconds; each kind of database compiles it its own way.

    All servers share this clock. It is not the time at which the transaction began.
    """

    type = Double()
    inherit_cache = True


class Prepared:
    """A statement of the hot path: compiled once, then passed to the driver as it is.

    Each execution binds values of the same names. For a row as wide as a job's, SQLAlchemy's own `execute` takes more
    than twice as long. It also converts values, so these statements bind only values that drivers accept, and return
    the values that drivers return.
    """

    def __init__(self, statement: Select[Any] | UpdateBase, columns: Iterable[str] | None = None) -> None:
        """Take a statement, and the columns that it sets if it is an insert or an update."""
        self._statement = statement
        self._columns = None if columns is None else list(columns)
        self._compiled: dict[str, tuple[str, Sequence[str] | None, Mapping[str, Any]]] = {}

    def execute(self, connection: Connection, values: Mapping[str, Any]) -> CursorResult[Any]:
        """Execute it once."""
        return connection.exec_driver_sql(*self._bound(connection, values))

    def rows(self, connection: Connection, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """The selected rows as the driver returns them: describing the columns takes longer than reading a few rows."""
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


T = TypeVar("T")

VALUES_PER_STATEMENT = 500
"""Databases limit the parameters of a statement (PostgreSQL: 65,535)."""


def portions(values: Collection[T]) -> Iterator[list[T]]:
    """The values in lists that are short enough for one statement; no list if there are no values."""
    listed = list(values)
    for start in range(0, len(listed), VALUES_PER_STATEMENT):
        yield listed[start : start + VALUES_PER_STATEMENT]

"""Dataclasses whose fields are the columns of a table, and the statements that read and write them. Nested values are
JSON in text columns, read tolerantly: keys that this version does not know are ignored."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import operator
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Generic, TypeVar

import sqlalchemy as sa
from sqlalchemy import ColumnElement, Connection, Double, Select, Table, Text, UpdateBase, bindparam
from sqlalchemy.engine.interfaces import DBAPICursor
from sqlalchemy.sql.functions import FunctionElement

from trainmaster.server.core import resources
from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.core.job import JobProgress
from trainmaster.server.core.resources import Gpu, Needs, Share
from trainmaster.server.store.scope import Scope

T = TypeVar("T")

VALUES_PER_STATEMENT = 500
"""Databases limit the parameters of a statement (PostgreSQL: 65,535)."""


class database_time(FunctionElement[float]):  # noqa: N801 - read as a function of SQL
    """The time by the database's clock, which all servers share, in Unix seconds; not when the transaction began."""

    type = Double()
    inherit_cache = True


class listed(FunctionElement[str]):  # noqa: N801 - as above
    """The texts of a JSON list, as a subquery: the statement is the same however many there are."""

    type = Text()
    inherit_cache = True


class PreparedStatement:
    """A statement of the hot path: compiled once, then executed by the driver's own cursor, with values that drivers
    accept and return; errors are the driver's, too. SQLAlchemy's own `execute` takes several times as long."""

    def __init__(self, statement: Select[Any] | UpdateBase, columns: Iterable[str] | None = None) -> None:
        """Take a statement, and the columns that it sets if it is an insert or an update."""
        self._statement = statement
        self._columns = None if columns is None else list(columns)
        self._compiled: dict[str, tuple[str, Sequence[str] | None, Mapping[str, Any]]] = {}

    def execute(self, connection: Connection, values: Mapping[str, Any]) -> int:
        """Execute the statement; returns how many rows it wrote."""
        return self._executed(connection, values).rowcount

    def rows(self, connection: Connection, values: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
        return self._executed(connection, values).fetchall()

    def first(self, connection: Connection, values: Mapping[str, Any]) -> tuple[Any, ...] | None:
        return next(iter(self.rows(connection, values)), None)

    def execute_many(self, connection: Connection, rows: Iterable[Mapping[str, Any]]) -> None:
        sql, order, constants = self._compiled.get(connection.dialect.name) or self._compile(connection)
        _cursor(connection).executemany(sql, [_bound(order, {**constants, **row}) for row in rows])

    def _executed(self, connection: Connection, values: Mapping[str, Any]) -> DBAPICursor:
        sql, order, constants = self._compiled.get(connection.dialect.name) or self._compile(connection)
        cursor = _cursor(connection)
        cursor.execute(sql, _bound(order, {**constants, **values}))
        return cursor

    def _compile(self, connection: Connection) -> tuple[str, Sequence[str] | None, Mapping[str, Any]]:
        compiled = self._statement.compile(dialect=connection.dialect, column_keys=self._columns)
        # Values that the statement itself has, such as a limit.
        constants = {name: value for name, value in compiled.params.items() if value is not None}
        self._compiled[connection.dialect.name] = made = (str(compiled), compiled.positiontup, constants)
        return made


def _cursor(connection: Connection) -> DBAPICursor:
    if not connection.in_transaction():
        connection.begin()
    return connection.connection.cursor()


def _bound(order: Sequence[str] | None, values: Mapping[str, Any]) -> Any:
    """The values as the driver takes them: by their names, or in order."""
    return values if order is None else [values[name] for name in order]


class ScopedQuery:
    """A query of the hot path, compiled once for the scope of everything and once for the scope of an account."""

    def __init__(self, query: Select[Any], owner: ColumnElement[str]) -> None:
        self._of_everything = PreparedStatement(query)
        self._of_account = PreparedStatement(query.where(owner == bindparam("account")))

    def rows(self, connection: Connection, scope: Scope, **values: Any) -> Sequence[tuple[Any, ...]]:
        if scope.account_id is None:
            return self._of_everything.rows(connection, values)
        return self._of_account.rows(connection, {**values, "account": scope.account_id})


def portions(values: Collection[T]) -> Iterator[list[T]]:
    """The values in lists that are short enough for one statement; no list if there are no values."""
    listed = list(values)
    for start in range(0, len(listed), VALUES_PER_STATEMENT):
        yield listed[start : start + VALUES_PER_STATEMENT]


class Records(Generic[T]):
    """The rows of a table as values of a dataclass: each field has a column of its name, converted by its type. Rows of
    a table without accounts (nodes, queues, events of the cluster) are in every scope."""

    def __init__(
        self, kind: type[T], table: Table, *, only: Sequence[str] = (), without: Collection[str] = (), lazy: str = ""
    ) -> None:
        """Choose the fields, and one whose JSON is parsed when somebody looks into it."""
        hints = typing.get_type_hints(kind)
        named = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]  # it is a dataclass
        self.fields = tuple(name for name in only or named if name not in without)
        self.columns = tuple(table.c[name] for name in self.fields)
        self.select: Select[Any] = sa.select(*self.columns)
        self._kind: Callable[..., T] = kind
        self._table = table
        codecs = {name: _STORED_DOCUMENT if name == lazy else _codec_of(hints[name]) for name in self.fields}
        self._codecs = [(name, codec) for name, codec in codecs.items() if codec is not None]
        self._encoded = [(name, codec.encode) for name, codec in self._codecs if codec.encode is not _as_is]
        self._values_of = operator.attrgetter(*self.fields)

    def from_row(self, row: Sequence[Any], **others: Any) -> T:
        """The record of a row with the values of `columns`; `others` are fields that are not in the row."""
        values = dict(zip(self.fields, row, strict=True))
        for name, codec in self._codecs:
            values[name] = codec.decode(values[name])
        return self._kind(**values, **others)

    def to_row(self, record: T, **others: Any) -> dict[str, Any]:
        """The row of a record; `others` are columns that are not in the record."""
        row = dict(zip(self.fields, self._values_of(record), strict=True))
        for name, encode in self._encoded:
            row[name] = encode(row[name])
        return {**row, **others}

    def insert(self, connection: Connection, record: T, **others: Any) -> None:
        connection.execute(sa.insert(self._table), self.to_row(record, **others))

    def find(
        self,
        connection: Connection,
        scope: Scope,
        *conditions: ColumnElement[bool],
        order_by: Sequence[ColumnElement[Any]] = (),
        limit: int | None = None,
        offset: int | None = None,
    ) -> list[T]:
        """The records in scope for which all conditions hold."""
        query = self.select.where(*conditions).order_by(*order_by).limit(limit).offset(offset)
        if "account_id" in self._table.c:
            query = scope.limit(query, self._table.c.account_id)
        return [self.from_row(row) for row in connection.execute(query)]

    def first(
        self,
        connection: Connection,
        scope: Scope,
        *conditions: ColumnElement[bool],
        order_by: Sequence[ColumnElement[Any]] = (),
    ) -> T | None:
        return next(iter(self.find(connection, scope, *conditions, order_by=order_by, limit=1)), None)

    def get(self, connection: Connection, scope: Scope, *conditions: ColumnElement[bool], missing: str) -> T:
        """The one record in scope for which all conditions hold, or a NotFoundError with the message `missing`."""
        if (record := self.first(connection, scope, *conditions)) is None:
            raise NotFoundError(missing)
        return record


@dataclasses.dataclass(frozen=True, slots=True)
class _Codec:
    """How a field is stored where drivers do not take its type."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def _codec_of(hint: Any) -> _Codec | None:
    if hint in _CODECS:
        return _CODECS[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        (inner,) = (_codec_of(each) for each in arguments if each is not types.NoneType)
        return inner and _Codec(inner.encode, lambda value: None if value is None else inner.decode(value))
    if origin is tuple:
        return _Codec(dumps, lambda text: tuple(json.loads(text)))
    if origin is frozenset:
        return _Codec(lambda values: dumps(sorted(values)), lambda text: frozenset(json.loads(text)))
    if origin is Mapping:
        return _Codec(dumps, json.loads)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _Codec(_as_is, hint)
    return None


def dumps(value: object) -> str:
    return _encoder.encode(value)


_encoder = json.JSONEncoder(separators=(",", ":"), default=dict)  # mappings that are no dict


def _as_is(value: Any) -> Any:
    return value


class StoredDocument(Mapping[str, Any]):
    """A JSON object as stored, parsed when somebody looks into it, and not kept for long: a leader holds the specs of
    thousands of jobs, and reads each of them once or twice."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    @property
    def _document(self) -> dict[str, Any]:
        return _parsed(self.text)

    def __getitem__(self, key: str) -> Any:
        return self._document[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._document)

    def __len__(self) -> int:
        return len(self._document)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StoredDocument) and other.text == self.text:
            return True
        return isinstance(other, Mapping) and self._document == dict(other)

    __hash__ = None  # type: ignore[assignment]  # as of any mapping that is compared by its content

    def __repr__(self) -> str:
        return repr(self._document)


@functools.lru_cache(maxsize=32)
def _parsed(text: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(text)
    return document


_STORED_DOCUMENT = _Codec(
    lambda document: document.text if isinstance(document, StoredDocument) else dumps(document), StoredDocument
)


@functools.lru_cache(maxsize=4096)
def _needs_from_text(text: str) -> Needs:
    """Many jobs need the same: they share one object."""
    return resources.needs_from_json(json.loads(text))


def _progress_to_text(progress: JobProgress) -> str:
    values = {field: getattr(progress, field) for field in JobProgress.__dataclass_fields__}
    return dumps({name: value for name, value in values.items() if value or value == 0})


def _from_known(kind: type[T], document: Mapping[str, Any]) -> T:
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]  # it is a dataclass
    return kind(**{name: value for name, value in document.items() if name in known})


_NO_PROGRESS = JobProgress()

_CODECS: dict[Any, _Codec] = {
    bool: _Codec(_as_is, bool),  # SQLite has no such type: `PreparedStatement` returns 0 and 1
    Needs: _Codec(lambda needs: dumps(resources.needs_to_json(needs)), _needs_from_text),
    JobProgress: _Codec(
        _progress_to_text, lambda text: _NO_PROGRESS if text == "{}" else _from_known(JobProgress, json.loads(text))
    ),
    tuple[Share, ...]: _Codec(
        lambda shares: dumps([resources.share_to_json(share) for share in shares]),
        lambda text: tuple(resources.share_from_json(share) for share in json.loads(text)),
    ),
    tuple[Gpu, ...]: _Codec(
        lambda gpus: dumps([dataclasses.asdict(gpu) for gpu in gpus]),
        lambda text: tuple(_from_known(Gpu, gpu) for gpu in json.loads(text)),
    ),
    Mapping[int, Mapping[str, Any]]: _Codec(
        dumps, lambda text: {int(key): value for key, value in json.loads(text).items()}
    ),
}
"""By the type of a field, where `_codec_of` does not know it by its form."""


def label_mark(key: str, value: str) -> str:
    """What stands for a label among the marks of its job: 64 bits of a digest, in hexadecimal, between commas."""
    return f",{hashlib.blake2b(f'{key}={value}'.encode(), digest_size=8).hexdigest()},"


def label_marks(labels: Mapping[str, str]) -> str:
    """The marks of all labels of a job; each row of a label has them, so that the others need not be looked up."""
    return "".join(label_mark(key, value) for key, value in labels.items())

"""Rows of the tables, and the core's values that they stand for.

A row is read tolerantly: keys of its JSON that this version does not know are ignored.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from sqlalchemy import ColumnElement, Connection, CursorResult, Double, Select, UpdateBase, bindparam
from sqlalchemy.sql.functions import FunctionElement

from trainmaster.protocol.launch import Lifetime
from trainmaster.protocol.reasons import Reason, StopCause
from trainmaster.server.core.job import Attempt, Checkpoint, Event, Job, Progress
from trainmaster.server.core.resources import (
    Gpu,
    Needs,
    Node,
    NodeState,
    needs_from_json,
    needs_to_json,
    share_from_json,
    share_to_json,
)
from trainmaster.server.core.states import Actor, Desired, JobStatus


def _fields(kind: type[Any], *without: str) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind) if field.name not in without)


JOB_FIELDS = _fields(Job, "attempt")
"""What a job's row holds, in the order in which it is read; its attempt has a row of its own."""
ATTEMPT_FIELDS = _fields(Attempt)
CHECKPOINT_FIELDS = _fields(Checkpoint)
EVENT_FIELDS = _fields(Event)
_JOB_FLAGS = ("preemptible", "best_is_greater", "can_save", "purge")
_ATTEMPT_FLAGS = ("stop_save", "stack_dump")
_CHECKPOINT_FLAGS = ("pinned", "public")
"""Truth values, for which SQLite has no type: a statement of `Prepared` gives 0 and 1."""
NODE_FIELDS = _fields(Node)


def dumps(value: object) -> str:
    """JSON, as compact as it gets."""
    return _encoder.encode(value)


_encoder = json.JSONEncoder(separators=(",", ":"), default=dict)  # mappings that are no dict


def job_to_row(job: Job) -> dict[str, Any]:
    """A job's row."""
    row = {name: getattr(job, name) for name in JOB_FIELDS}
    row["labels"] = dumps(dict(job.labels))
    row["spec"] = job.spec.text if isinstance(job.spec, StoredDocument) else dumps(job.spec)
    row["needs"] = dumps(needs_to_json(job.needs))
    row["progress"] = dumps(_without_defaults(job.progress))
    row["order_key"] = job.order_key
    row["attempt_number"] = None if job.attempt is None else job.attempt.number
    return row


def job_from_row(row: Sequence[Any]) -> Job:
    """The job of its row, followed by the row of its current attempt (all NULL where there is none)."""
    values = dict(zip(JOB_FIELDS, row, strict=False))
    values["labels"] = json.loads(values["labels"])
    values["spec"] = StoredDocument(values["spec"])
    values["needs"] = needs_of(values["needs"])
    values["progress"] = _NO_PROGRESS if values["progress"] == "{}" else _progress(values["progress"])
    values["lifetime"] = Lifetime(values["lifetime"])
    values["status"] = JobStatus(values["status"])
    values["desired"] = Desired(values["desired"])
    values["reason"] = _maybe(Reason, values["reason"])
    for name in _JOB_FLAGS:
        values[name] = bool(values[name])
    attempt = row[len(JOB_FIELDS) :]
    return Job(**values, attempt=None if attempt[0] is None else attempt_from_row(attempt))


def attempt_to_row(job: Job, attempt: Attempt) -> dict[str, Any]:
    """An attempt's row."""
    row = {name: getattr(attempt, name) for name in ATTEMPT_FIELDS}
    row["shares"] = dumps([share_to_json(share) for share in attempt.shares])
    row["claimed"] = dumps(sorted(attempt.claimed))
    row["started"] = dumps(sorted(attempt.started))
    row["exits"] = dumps(attempt.exits)
    row["offsets"] = dumps(attempt.offsets)
    row["evidence"] = dumps(attempt.evidence)
    return {**row, "account_id": job.account_id, "job_id": job.job_id}


def attempt_from_row(row: Sequence[Any]) -> Attempt:
    """The attempt of a row."""
    values = dict(zip(ATTEMPT_FIELDS, row, strict=True))
    values["shares"] = tuple(share_from_json(share) for share in json.loads(values["shares"]))
    values["claimed"] = frozenset(json.loads(values["claimed"]))
    values["started"] = frozenset(json.loads(values["started"]))
    values["exits"] = {int(node): document for node, document in json.loads(values["exits"]).items()}
    values["offsets"] = json.loads(values["offsets"])
    values["evidence"] = json.loads(values["evidence"])
    values["stop"] = _maybe(StopCause, values["stop"])
    values["reason"] = _maybe(Reason, values["reason"])
    for name in _ATTEMPT_FLAGS:
        values[name] = bool(values[name])
    return Attempt(**values)


def label_mark(key: str, value: str) -> str:
    """What stands for a label among the marks of its job: 64 bits of a digest, in hexadecimal, between commas."""
    return f",{hashlib.blake2b(f'{key}={value}'.encode(), digest_size=8).hexdigest()},"


def label_marks(labels: Mapping[str, str]) -> str:
    """The marks of all labels of a job; each row of a label has them, so that the others need not be looked up."""
    return "".join(label_mark(key, value) for key, value in labels.items())


class StoredDocument(Mapping[str, Any]):
    """A JSON object as it is stored; read when somebody looks into it.

    A leader holds every job that waits, and looks into the specs of those that it starts.
    """

    __slots__ = ("_parsed", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._parsed: dict[str, Any] | None = None

    @property
    def _document(self) -> dict[str, Any]:
        if self._parsed is None:
            self._parsed = json.loads(self.text)
        return self._parsed

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


@functools.lru_cache(maxsize=4096)
def needs_of(text: str) -> Needs:
    """What a row says that a job needs. Many jobs need the same: they share one object."""
    return needs_from_json(json.loads(text))


def _progress(text: str) -> Progress:
    return cast(Progress, _from_known(Progress, json.loads(text)))


_NO_PROGRESS = Progress()


def event_to_row(job: Job, event: Event) -> dict[str, Any]:
    """An event's row."""
    row = {name: getattr(event, name) for name in EVENT_FIELDS}
    return {**row, "data": dumps(event.data), "account_id": job.account_id}


def event_from_row(row: Sequence[Any]) -> Event:
    """The event of a row."""
    values = dict(zip(EVENT_FIELDS, row, strict=True))
    values["actor"] = Actor(values["actor"])
    values["from_status"] = _maybe(JobStatus, values["from_status"])
    values["to_status"] = _maybe(JobStatus, values["to_status"])
    values["reason"] = _maybe(Reason, values["reason"])
    values["data"] = json.loads(values["data"])
    return Event(**values)


def checkpoint_to_row(job: Job, checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint's row."""
    row = {name: getattr(checkpoint, name) for name in CHECKPOINT_FIELDS}
    nested = {"metrics": dumps(checkpoint.metrics), "attributes": dumps(checkpoint.attributes)}
    return {**row, **nested, "account_id": job.account_id}


def checkpoint_from_row(row: Sequence[Any]) -> Checkpoint:
    """The checkpoint of a row."""
    values = dict(zip(CHECKPOINT_FIELDS, row, strict=True))
    nested = {name: json.loads(values[name]) for name in ("metrics", "attributes")}
    flags = {name: bool(values[name]) for name in _CHECKPOINT_FLAGS}
    return Checkpoint(**{**values, **nested, **flags})


def node_to_row(node: Node) -> dict[str, Any]:
    """A node's row."""
    row = {name: getattr(node, name) for name in NODE_FIELDS}
    row["gpus"] = dumps([dataclasses.asdict(gpu) for gpu in node.gpus])
    row["labels"] = dumps(node.labels)
    row["capabilities"] = dumps(node.capabilities)
    row["given_labels"] = dumps(node.given_labels)
    row["given_capabilities"] = dumps(node.given_capabilities)
    return row


def node_from_row(row: Sequence[Any]) -> Node:
    """The node of a row."""
    values = dict(zip(NODE_FIELDS, row, strict=True))
    values["gpus"] = tuple(_from_known(Gpu, gpu) for gpu in json.loads(values["gpus"]))
    for name in ("labels", "capabilities", "given_labels", "given_capabilities"):
        values[name] = tuple(json.loads(values[name]))
    values["state"] = NodeState(values["state"])
    values["drain_force"] = bool(values["drain_force"])
    return Node(**values)


def _maybe(kind: Callable[[str], Any], value: str | None) -> Any:
    return None if value is None else kind(value)


def _without_defaults(progress: Progress) -> dict[str, Any]:
    return {name: value for name in _PROGRESS_FIELDS if (value := getattr(progress, name)) or value == 0}


_PROGRESS_FIELDS = _fields(Progress)


def _from_known(kind: type[Any], document: Mapping[str, Any]) -> Any:
    known = kind.__dataclass_fields__
    return kind(**{name: value for name, value in document.items() if name in known})


# SQL statements: prepared ones, lists split into portions, and the time of the database's clock.


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

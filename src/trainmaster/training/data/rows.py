"""The rows of all sources after filters and projection, in one file that is mapped into memory.

Rows are kept as JSON text beside where they come from: rows of one source may differ in shape, and types that are
guessed from some rows are wrong for others.
"""

from __future__ import annotations

import datetime
import decimal
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from trainmaster.training.data import formats
from trainmaster.training.data.config import LocalSource, Part, Source
from trainmaster.training.data.row_selection import MISSING, FilterError, predicate, value_at
from trainmaster.training.errors import InputError, Origin, RowError
from trainmaster.training.steps import Tell, tell_nobody

SCHEMA = pa.schema([("row", pa.large_string()), ("source", pa.int32()), ("file", pa.int32()), ("number", pa.int64())])
_WRITE_ROWS = 1000
_WRITE_CHARACTERS = 32 << 20

_Read = TypeVar("_Read")


@dataclass(slots=True, kw_only=True)
class Tally:
    """What was seen of one source."""

    read: int = 0
    kept: int = 0
    columns: dict[str, None] = field(default_factory=dict)
    """Every column that some row has, in the order in which they came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row that passed its source's filters, with the columns that are read."""

    origin: Origin
    file: int
    """Which of the source's files it comes from."""
    values: dict[str, Any]
    text: str
    """The same as JSON."""


def rows_of(source: Source, local: LocalSource, tally: Tally, *, whole: bool = True) -> Iterator[Row]:
    """The rows of one source that its filters keep.

    Raises:
        InputError: a file cannot be read, or a row is wrong.
    """
    keeps = [predicate(each, textual=local.format == "csv") for each in source.filters]
    needed = None if source.columns is None else {*source.columns, *(each.column for each in source.filters)}
    for index, raw in _raw_rows(local, needed, whole):
        tally.read += 1
        tally.columns.update(dict.fromkeys(raw.values))
        origin = origin_of(local, index, raw.number)
        try:
            if not all(keep(raw.values) for keep in keeps):
                continue
        except FilterError as error:
            raise RowError(origin, str(error), error.column) from None
        tally.kept += 1
        values = _projected(raw.values, source.columns)
        text = raw.text if raw.text is not None and source.columns is None else _as_json(values, origin)
        yield Row(origin=origin, file=index, values=values, text=text)
    _check_names(source, tally)


def _raw_rows(local: LocalSource, columns: Collection[str] | None, whole: bool) -> Iterator[tuple[int, formats.RawRow]]:
    """The rows of each part of a source, with the number of their file; a slice counts the rows of all its files."""
    files = iter(range(len(local.files)))
    for part in local.parts or (Part(files=len(local.files)),):
        own = list(itertools.islice(files, part.files))
        start, stop = part.rows.places(lambda own=own: sum(_count(local, index) for index in own))
        rows = (
            (index, raw)
            for index in own
            for raw in _of_file(
                local, index, lambda path: formats.read(path, local.format, columns=columns, whole=whole)
            )
        )
        yield from itertools.islice(rows, start, None if stop is None else max(start, stop))


def _count(local: LocalSource, index: int) -> int:
    return next(iter(_of_file(local, index, lambda path: [formats.count(path, local.format)])))


def _of_file(local: LocalSource, index: int, read: Callable[[Path], Iterable[_Read]]) -> Iterator[_Read]:
    """What is read from a file; its errors say which file of which source it is."""
    path = local.files[index]
    try:
        yield from read(path)
    except formats.FileError as error:
        if error.number is None:
            inside = "" if path.name == local.path.rpartition("/")[2] else f" (file {path.name})"
            raise InputError(f"{local.path}{inside}: {error}") from error
        raise RowError(origin_of(local, index, error.number), str(error), error.column) from error


def origin_of(local: LocalSource, file: int, number: int) -> Origin:
    """Where a row of a source comes from."""
    unit = formats.unit_of(local.format)
    return Origin(source=local.path, file=local.files[file].name, number=number, unit=unit)


def write_rows(
    path: Path, sources: Sequence[Source], locals_: Sequence[LocalSource], progress: Tell = tell_nobody
) -> list[Tally]:
    """Write the rows of all sources into one Arrow stream; returns what was seen of each source.

    Raises:
        InputError: something is wrong with a source, or nothing of it is left.
    """
    sizes = [[file.stat().st_size for file in local.files] for local in locals_]
    total, before = sum(map(sum, sizes)) or 1, 0
    tallies = []
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as writer:
        for number, (source, local) in enumerate(zip(sources, locals_, strict=True)):
            tally = Tally()
            batch = _Batch(writer, number)
            for row in rows_of(source, local, tally):
                if batch.add(row):
                    progress((before + sum(sizes[number][: row.file])) / total)
            batch.write()
            if not tally.kept:
                raise InputError(f"{local.path}: {nothing_left(source, tally)}")
            tallies.append(tally)
            before += sum(sizes[number])
    return tallies


def nothing_left(source: Source, tally: Tally) -> str:
    """Why a source has no row to train on."""
    if tally.read:
        return f"its filters keep none of its {tally.read} rows"
    return f"its split {source.split} has no rows" if source.split else "it has no rows"


class _Batch:
    """Rows of one source on their way into the file."""

    def __init__(self, writer: Any, source: int) -> None:
        self._writer = writer
        self._source = source
        self._rows: list[Row] = []
        self._characters = 0

    def add(self, row: Row) -> bool:
        """Take a row; true when that filled a batch, which is written now."""
        self._rows.append(row)
        self._characters += len(row.text)
        if len(self._rows) < _WRITE_ROWS and self._characters < _WRITE_CHARACTERS:
            return False
        self.write()
        return True

    def write(self) -> None:
        if self._rows:
            columns = [
                [row.text for row in self._rows],
                [self._source] * len(self._rows),
                [row.file for row in self._rows],
                [row.origin.number for row in self._rows],
            ]
            arrays = [pa.array(column, kind) for column, kind in zip(columns, SCHEMA.types, strict=True)]
            self._writer.write_batch(pa.record_batch(arrays, schema=SCHEMA))
        self._rows, self._characters = [], 0


def _projected(values: Any, columns: Sequence[str] | None) -> dict[str, Any]:
    if columns is None:
        return dict(values)
    found = ((column, value_at(values, column)) for column in columns)
    return {column: value for column, value in found if value is not MISSING}


def _check_names(source: Source, tally: Tally) -> None:
    """A column that no row has is a mistake of the job's."""
    if not tally.read:
        return
    named = [("columns", column) for column in source.columns or ()]
    named += [("filters", each.column) for each in source.filters]
    for where, column in named:
        if column not in tally.columns and column.partition(".")[0] not in tally.columns:
            has = ", ".join(tally.columns)
            raise InputError(f"{source.path}: `{where}` names '{column}', which no row has; its columns are {has}")


def _as_json(values: dict[str, Any], origin: Origin) -> str:
    try:
        return json.dumps(values, default=_plain, ensure_ascii=False)
    except (TypeError, ValueError):
        for column, value in values.items():
            try:
                json.dumps(value, default=_plain)
            except (TypeError, ValueError) as error:
                problem = f"holds what is no text, number, list or object ({error}); leave it out with `columns`"
                raise RowError(origin, problem, column) from None
        raise


def _plain(value: Any) -> Any:
    """Values that tables have and JSON has not."""
    match value:
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case datetime.timedelta():
            return value.total_seconds()
        case decimal.Decimal():
            return float(value)
        case bytes():
            return value.decode()
        case _:
            raise TypeError(type(value).__name__)

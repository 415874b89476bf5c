"""The rows of all sources after filters and projection, in one memory-mapped file.

Each row is JSON text: rows of one source may differ in shape, and types inferred from some are wrong for others.
"""

from __future__ import annotations

import datetime
import decimal
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import pyarrow as pa

from trainmaster.jobs import inputs
from trainmaster.server.core.spec.data import DataSource
from trainmaster.training.data import formats
from trainmaster.training.data.row_selection import MISSING, FilterError, Indices, predicate, select, value_at
from trainmaster.training.document import LocalSource, Part, TokenizationConfig
from trainmaster.training.fetching.access import Access
from trainmaster.training.fetching.cache import Cache, emptied, key_of
from trainmaster.training.steps import InputError, OnProgress, Origin, RowError, ignore_progress

SCHEMA = pa.schema([("row", pa.large_string()), ("source", pa.int32()), ("file", pa.int32()), ("number", pa.int64())])
_WRITE_ROWS = 1000
_WRITE_CHARACTERS = 32 << 20

_Read = TypeVar("_Read")


@dataclass(slots=True, kw_only=True)
class RowCounts:
    read: int = 0
    kept: int = 0
    columns: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row that passed its source's filters, with the columns that are read."""

    origin: Origin
    file: int
    values: dict[str, Any]
    text: str
    """The values as JSON."""


def rows_of(source: DataSource, local: LocalSource, counts: RowCounts, *, whole: bool = True) -> Iterator[Row]:
    """The rows of a source that its filters keep. Raises InputError where a file or a row is wrong."""
    filters = source.filters or ()
    keeps = [predicate(each, textual=local.format == "csv") for each in filters]
    needed = None if source.columns is None else {*source.columns, *(each.column for each in filters)}
    for index, raw in _raw_rows(local, needed, whole):
        counts.read += 1
        counts.columns.update(dict.fromkeys(raw.values))
        origin = origin_of(local, index, raw.number)
        try:
            if not all(keep(raw.values) for keep in keeps):
                continue
        except FilterError as error:
            raise RowError(origin, str(error), error.column) from None
        counts.kept += 1
        values, text = dict(raw.values), raw.text
        if source.columns is not None:
            found = ((column, value_at(values, column)) for column in source.columns)
            values, text = {column: value for column, value in found if value is not MISSING}, None
        yield Row(origin=origin, file=index, values=values, text=_as_json(values, origin) if text is None else text)
    _check_names(source, counts)


def _raw_rows(local: LocalSource, columns: Collection[str] | None, whole: bool) -> Iterator[tuple[int, formats.RawRow]]:
    """Rows with the index of their file; a slice counts over all files of its part."""
    files = iter(range(len(local.files)))
    for part in local.parts or (Part(files=len(local.files)),):
        own = list(itertools.islice(files, part.files))
        start, stop = part.rows.places(partial(_count, local, own))
        rows = (
            (index, raw)
            for index in own
            for raw in _of_file(
                local, index, lambda path: formats.read(path, local.format, columns=columns, whole=whole)
            )
        )
        yield from itertools.islice(rows, start, None if stop is None else max(start, stop))


def _count(local: LocalSource, files: Iterable[int]) -> int:
    return sum(
        number for index in files for number in _of_file(local, index, lambda path: [formats.count(path, local.format)])
    )


def _of_file(local: LocalSource, index: int, read: Callable[[Path], Iterable[_Read]]) -> Iterator[_Read]:
    path = local.files[index]
    try:
        yield from read(path)
    except formats.FileError as error:
        if error.number is None:
            inside = "" if path.name == local.path.rpartition("/")[2] else f" (file {path.name})"
            raise InputError(f"{local.path}{inside}: {error}") from error
        raise RowError(origin_of(local, index, error.number), str(error), error.column) from error


def origin_of(local: LocalSource, file: int, number: int) -> Origin:
    unit = "line" if local.format in ("jsonl", "csv") else "row"
    return Origin(source=local.path, file=local.files[file].name, number=number, unit=unit)


def write_rows(
    path: Path, sources: Sequence[DataSource], locals_: Sequence[LocalSource], progress: OnProgress = ignore_progress
) -> list[RowCounts]:
    """Write the rows of all sources into one Arrow stream. Raises InputError where nothing of a source is left."""
    sizes = [[file.stat().st_size for file in local.files] for local in locals_]
    total, before = sum(map(sum, sizes)) or 1, 0
    counts_by_source = []
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as writer:
        for number, (source, local) in enumerate(zip(sources, locals_, strict=True)):
            counts = RowCounts()
            for batch in _batches(rows_of(source, local, counts)):
                _write(writer, number, batch)
                file = batch[-1].file
                batch.clear()  # before the next one is read
                progress((before + sum(sizes[number][:file])) / total)
            if not counts.kept:
                raise InputError(f"{local.path}: {nothing_left(source, counts)}")
            counts_by_source.append(counts)
            before += sum(sizes[number])
    return counts_by_source


def _write(writer: Any, source: int, batch: Sequence[Row]) -> None:
    columns = [
        [row.text for row in batch],
        [source] * len(batch),
        [row.file for row in batch],
        [row.origin.number for row in batch],
    ]
    arrays = [pa.array(column, kind) for column, kind in zip(columns, SCHEMA.types, strict=True)]
    writer.write_batch(pa.record_batch(arrays, schema=SCHEMA))


def nothing_left(source: DataSource, counts: RowCounts) -> str:
    if counts.read:
        return f"its filters keep none of its {counts.read} rows"
    return f"its split {source.split} has no rows" if source.split else "it has no rows"


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    characters = 0
    for row in rows:
        batch.append(row)
        characters += len(row.text)
        if len(batch) >= _WRITE_ROWS or characters >= _WRITE_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _check_names(source: DataSource, counts: RowCounts) -> None:
    if not counts.read:
        return
    named = [("columns", column) for column in source.columns or ()]
    named += [("filters", each.column) for each in source.filters or ()]
    for where, column in named:
        if column not in counts.columns and column.partition(".")[0] not in counts.columns:
            has = ", ".join(counts.columns)
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
    """Convert values of tables that JSON does not have."""
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


_FORM = 2


class Rows(Sequence[dict[str, Any]]):
    def __init__(self, texts: pa.ChunkedArray, indices: Indices) -> None:
        self._texts = texts
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> Rows: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | Rows:
        if isinstance(index, slice):
            return Rows(self._texts, self._indices[index])
        row: dict[str, Any] = json.loads(self._texts[int(self._indices[index])].as_py())
        return row


class Loaded(NamedTuple):
    """The rows to train on, and those to validate with."""

    train: Rows
    eval: Rows


def load() -> Loaded:
    """The rows of this job's sources after filters, projection and sampling, parted for validation.

    The order is shuffled by the job's seed, and the same on every rank and in every attempt. The first rank to ask
    reads the files; the others wait for it.

    Raises:
        RuntimeError: this process is in no job that has data.
        InputError: a source or a row is wrong.
    """
    config = TokenizationConfig.from_document(inputs.training()).data
    sources = [LocalSource.from_json(each) for each in inputs.prepared()["sources"]]
    cache = Cache(Access.from_environ(os.environ).cache)
    key = key_of(
        _FORM,
        [
            [source.columns, [each.model_dump(mode="json") for each in source.filters or ()]]
            for source in config.sources
        ],
        [[local.format, local.slices, [cache.digest(file) for file in local.files]] for local in sources],
    )

    def make(target: Path) -> None:
        counts_by_source = write_rows(emptied(target) / "rows.arrow", config.sources, sources)
        (target / "counts.json").write_text(json.dumps([counts.kept for counts in counts_by_source]))

    entry = cache.entry("rows", key, make)
    selection = select(
        json.loads((entry / "counts.json").read_text()),
        [source.sampling for source in config.sources],
        validation_split=config.validation_split,
        seed=config.seed or 0,
        validation=[source.validation for source in config.sources],
    )
    with pa.memory_map(str(entry / "rows.arrow")) as file:
        texts = pa.ipc.open_stream(file).read_all().column("row")
    return Loaded(train=Rows(texts, selection.train), eval=Rows(texts, selection.evaluation))

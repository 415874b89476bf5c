"""Reads rows (dictionaries) from files, which may be compressed. A text file is one row with the column `text`."""

# ruff: noqa: A002, ARG001 - `format` is what it is everywhere else; readers have one signature

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import io
import json
import lzma
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import IO, Any

from trainmaster.training.steps import InputError

FORMAT_OF_SUFFIX: Mapping[str, str] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".txt": "text",
    ".text": "text",
}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
BEGINNING_SUFFICES = frozenset({"jsonl", "csv"})
MAX_DOCUMENT_BYTES = 256 << 20
"""Of a text file, which is tokenized as one piece."""
_BATCH_ROWS = 1024
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""JSON's escape of what may be a lone surrogate."""


class FileError(Exception):
    """A file, or one row of it, cannot be read; the caller adds the file's name."""

    def __init__(self, problem: str, *, number: int | None = None, column: str | None = None) -> None:
        super().__init__(problem)
        self.number = number
        self.column = column


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRow:
    number: int
    """The number of the row, or of its line for jsonl and csv."""
    values: Mapping[str, Any]
    text: str | None = None


def format_of(name: str) -> str | None:
    """The format by a file's name, such as `a/train.jsonl.gz` or `table.PQ`; None where the name does not tell."""
    path = PurePath(name.lower())
    suffix = path.with_suffix("").suffix if path.suffix in COMPRESSIONS else path.suffix
    return FORMAT_OF_SUFFIX.get(suffix)


def kind_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a truth value"
        case str():
            return "text"
        case int() | float():
            return "a number"
        case list() | tuple():
            return "a list"
        case Mapping():
            return "an object"
        case _:
            return f"a {type(value).__name__}"


def read(path: Path, format: str, *, columns: Collection[str] | None = None, whole: bool = True) -> Iterator[RawRow]:
    """The rows of a file, of `columns` alone if it can; without `whole`, its end may be cut off. Raises FileError."""
    try:
        yield from _READERS[format](path, columns, whole)
    except (EOFError, OSError, lzma.LZMAError) as error:
        raise FileError(f"cannot be read: {error}") from error


def count(path: Path, format: str) -> int:
    if format == "parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            return int(pyarrow.parquet.read_metadata(path).num_rows)
        except (OSError, pyarrow.ArrowException) as error:
            raise FileError(f"is not valid Parquet: {error}") from error
    return sum(1 for _ in read(path, format))


def _jsonl(path: Path, columns: Collection[str] | None, whole: bool) -> Iterator[RawRow]:
    with _opened(path) as file:
        for number, line in enumerate(_lines(file, whole), 1):
            if not line.strip():
                continue
            text = _decoded(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, number)
            values = _object(_parsed(text, number), number)
            if _SURROGATE.search(text):
                _require_whole_characters(values, number)
            yield RawRow(number=number, values=values, text=text)


def _json(path: Path, columns: Collection[str] | None, whole: bool) -> Iterator[RawRow]:
    with _opened(path) as file:
        data = file.read()
    text = _decoded(data.removeprefix(b"\xef\xbb\xbf"), None)
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        # Files of lines are often named .json.
        if text.lstrip().startswith("{") and error.msg == "Extra data":
            yield from _jsonl(path, columns, whole)
            return
        raise FileError(f"is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    if isinstance(document, dict):
        lists = [value for value in document.values() if isinstance(value, list)]
        document = lists[0] if len(lists) == 1 else [document]
    if not isinstance(document, list):
        raise FileError("must hold a list of objects, or an object with one list of objects")
    surrogates = _SURROGATE.search(text)
    for number, value in enumerate(document, 1):
        values = _object(value, number)
        if surrogates:
            _require_whole_characters(values, number)
        yield RawRow(number=number, values=values)


def _csv(path: Path, columns: Collection[str] | None, whole: bool) -> Iterator[RawRow]:
    csv.field_size_limit(MAX_DOCUMENT_BYTES)
    delimiter = "\t" if ".tsv" in (suffix.lower() for suffix in path.suffixes) else ","
    with _opened(path) as file:
        lines = (_decoded(line, number) for number, line in enumerate(_lines(file, whole), 1))
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            header = next(reader, None)
            if header is None:
                raise FileError("is empty; its first line must name the columns")
            header[0] = header[0].removeprefix("\ufeff")
            if len(header) == 1 and ";" in header[0]:
                raise FileError("separates its columns with ';'; save it with ',' between them", number=1)
            if len(set(header)) < len(header):
                raise FileError("its first line names a column twice", number=1)
            number = reader.line_num + 1
            for cells in reader:
                if cells and len(cells) != len(header):
                    raise FileError(f"has {len(cells)} cells, and the header {len(header)}", number=number)
                if cells:
                    # CSV does not distinguish an empty cell from null.
                    values = {name: cell or None for name, cell in zip(header, cells, strict=True)}
                    yield RawRow(number=number, values=values)
                number = reader.line_num + 1
        except csv.Error as error:
            # A quoted record may span lines: the last one of a beginning may be cut off.
            if whole:
                raise FileError(f"is not valid CSV: {error}", number=reader.line_num) from None


def _parquet(path: Path, columns: Collection[str] | None, whole: bool) -> Iterator[RawRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, memory_map=True) as file:
            names = _wanted(file.schema_arrow.names, columns)
            yield from _rows_of_batches(file.iter_batches(_BATCH_ROWS, columns=names))
    except pyarrow.ArrowException as error:
        raise FileError(f"is not valid Parquet: {error}") from error


def _arrow(path: Path, columns: Collection[str] | None, whole: bool) -> Iterator[RawRow]:
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as file:
            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            if is_file:
                opened = pyarrow.ipc.open_file(file)
                batches = (opened.get_batch(index) for index in range(opened.num_record_batches))
            else:
                opened = pyarrow.ipc.open_stream(file)
                batches = iter(opened)
            names = _wanted(opened.schema.names, columns)
            yield from _rows_of_batches(batch.select(names) for batch in batches)
    except pyarrow.ArrowException as error:
        raise FileError(f"is not a valid Arrow file: {error}") from error


def _text(path: Path, columns: Collection[str] | None, whole: bool) -> Iterator[RawRow]:
    with _opened(path) as file:
        data = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        limit = MAX_DOCUMENT_BYTES >> 20
        raise FileError(f"a text file is one document, and this one has more than {limit} MiB; write its documents "
                        "as jsonl, one object with `text` on each line")  # fmt: skip
    text = data.decode("utf-8", "ignore") if not whole else _decoded(data, None)
    if text.strip():
        yield RawRow(number=1, values={"text": text})


_READERS = {"jsonl": _jsonl, "json": _json, "csv": _csv, "parquet": _parquet, "arrow": _arrow, "text": _text}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    suffix = path.suffix.lower()
    with contextlib.ExitStack() as stack:
        if suffix == ".zst":
            import pyarrow

            raw = stack.enter_context(pyarrow.OSFile(str(path)))
            yield io.BufferedReader(stack.enter_context(pyarrow.CompressedInputStream(raw, "zstd")))
        else:
            opener: Any = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(suffix, open)
            yield stack.enter_context(opener(path, "rb"))


def _lines(file: IO[bytes], whole: bool) -> Iterator[bytes]:
    try:
        for line in file:
            if whole or line.endswith(b"\n"):
                yield line
    except (EOFError, OSError, lzma.LZMAError):
        # A compressed file may be only a beginning, too.
        if whole:
            raise


def _decoded(data: bytes, number: int | None) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise FileError(f"is not UTF-8: byte {data[error.start]:#04x} at {error.start}", number=number) from None


def _parsed(text: str, number: int) -> Any:
    try:
        return json.loads(text.rstrip())  # the position of an error would otherwise be on the next line
    except json.JSONDecodeError as error:
        raise FileError(f"is not valid JSON: {error.msg} at column {error.colno}", number=number) from None
    except RecursionError:
        raise FileError("is nested too deeply", number=number) from None


def _object(value: Any, number: int) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise FileError(f'holds {kind_of(value)}; expected an object, such as {{"text": "..."}}', number=number)
    return value


def _require_whole_characters(values: Mapping[str, Any], number: int) -> None:
    """JSON can spell a lone surrogate, which no tokenizer takes."""
    for column, value in values.items():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])[1:-1]
            raise FileError(
                f"contains a lone surrogate ({half}); fix or remove it", number=number, column=column
            ) from None


def _wanted(names: list[str], columns: Collection[str] | None) -> list[str]:
    if columns is None:
        return names
    tops = {column if column in names else column.partition(".")[0] for column in columns}
    # A missing name is an error, which lists all names.
    return [name for name in names if name in tops] if tops <= set(names) else names


def _rows_of_batches(batches: Iterator[Any]) -> Iterator[RawRow]:
    number = 0
    for batch in batches:
        for values in batch.to_pylist():
            number += 1
            yield RawRow(number=number, values=values)


_SPREADSHEETS = (".xlsx", ".xls", ".ods")


def require_format(name: str, path: str) -> str:
    found = format_of(name)
    if found is None and name.lower().endswith(_SPREADSHEETS):
        raise InputError(f"{path}: spreadsheets are not read; save it as CSV")
    if found is None:
        raise InputError(
            f"{path}: the name {name} does not tell the format; say it with `format`: "
            f"{', '.join(sorted(set(FORMAT_OF_SUFFIX.values())))}"
        )
    return found

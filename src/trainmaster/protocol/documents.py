"""JSON documents and JSON lines: on disk, in memory, how deep they nest; and full disks."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Self, TypeVar, get_args, get_origin, get_type_hints

from trainmaster.protocol.account_files import closing, open_plain

_MOST_OWN_BYTES = 64 << 20
"""Limit for documents that we wrote ourselves: a request holds all parameters of a job."""


def read_lines(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """The complete JSON lines in a chunk of a stream, and their length in bytes."""
    end = data.rfind(b"\n") + 1
    return parse_lines(data[:end].split(b"\n")), end


def parse_lines(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """The JSON objects in these lines. Anything else (a write torn by a full disk) is skipped."""
    return [record for line in lines if line and (record := decoded(line)) is not None]


def write_document(path: Path, document: Mapping[str, Any], *, uid: int | None = None, gid: int | None = None) -> None:
    """Replace a document atomically: a reader sees the old one or the new one.

    Only its owner can access it: this process's user, or `uid`. With `gid`, that group can read it.
    """
    with closing(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as directory:
        replace_document(directory, path.name, document, uid=uid, gid=gid)


def replace_document(
    directory: int, name: str, document: Mapping[str, Any], *, uid: int | None = None, gid: int | None = None
) -> None:
    """Like `write_document`, in an open directory."""
    temporary = write_new(directory, name, document, uid=uid, gid=gid)
    with _removed_on_error(directory, temporary):
        os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)


def write_new(
    directory: int, name: str, document: Mapping[str, Any], *, uid: int | None = None, gid: int | None = None
) -> str:
    """Write a document under a temporary name; returns that name."""
    # Unpredictable: others who can write here could otherwise put something else in its place.
    temporary = f".{name}.{os.urandom(8).hex()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
    with closing(descriptor), _removed_on_error(directory, temporary):
        data = _encoder.encode(document).encode()
        while data:
            data = data[os.write(descriptor, data) :]
        if uid is not None:
            os.fchown(descriptor, uid, -1)
        if gid is not None:
            os.fchown(descriptor, -1, gid)
            os.fchmod(descriptor, 0o640)
    return temporary


@contextlib.contextmanager
def _removed_on_error(directory: int, temporary: str) -> Iterator[None]:
    try:
        yield
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory)
        raise


def read_document(path: Path) -> dict[str, Any] | None:
    """The document at a path; None if there is none, or it is no JSON object. The directories above it are ours."""
    try:
        with open(open_plain(path), "rb") as file:
            return decoded(file.read(_MOST_OWN_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None


def decoded(data: bytes) -> dict[str, Any] | None:
    """The JSON object in these bytes, or None."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


Record = TypeVar("Record")


def from_json(kind: type[Record], document: Mapping[str, Any]) -> Record:
    """A dataclass from the plain form that `asdict` makes; the inverse of it, by the types of its fields.

    Missing keys get their defaults, and unknown ones are ignored: readers and writers may differ in version.
    """
    readers = field_readers(kind)  # type: ignore[arg-type]  # all classes are hashable
    return kind(**{name: _read(readers[name], document[name]) for name in readers if name in document})


def fields_of(record: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, to be written as a document; unlike `asdict`, this copies no values."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def _plain(value: Any) -> dict[str, Any]:
    return fields_of(value) if is_dataclass(value) else dict(value)


_encoder = json.JSONEncoder(separators=(",", ":"), default=_plain)


class JsonRecord:
    """A base class of dataclasses that are stored or sent as JSON."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        return from_json(cls, document)


Reader = Callable[[Any], Any]


@functools.cache
def field_readers(kind: type[Any]) -> dict[str, Reader | None]:
    """How the values of a dataclass's fields are read; None: as they are. The first look-up takes some milliseconds."""
    return {name: _reader_of(hint) for name, hint in get_type_hints(kind).items()}


def _reader_of(kind: Any) -> Reader | None:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return _reader_of(next(each for each in arguments if each is not NoneType))
    if origin is tuple:
        item = _reader_of(arguments[0])
        return tuple if item is None else lambda values: tuple([_read(item, each) for each in values])
    if origin is Mapping:
        item = _reader_of(arguments[1])
        return dict if item is None else lambda values: {key: _read(item, each) for key, each in values.items()}
    if isinstance(kind, type) and is_dataclass(kind):
        field_readers(kind)
        return functools.partial(from_json, kind)
    return kind if isinstance(kind, type) and issubclass(kind, StrEnum) else None


def _read(reader: Reader | None, value: Any) -> Any:
    return value if reader is None or value is None else reader(value)


def is_deeper(value: object, most: int) -> bool:
    """Whether a value nests more than `most` objects and lists. For server and trainers: one passes on to the other."""
    level: list[Any] = [value]
    for _ in range(most + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return False
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return True


DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
LEAST_FREE_BYTES = 64 << 10
"""A disk with less free space counts as full: more than any document of a worker needs."""


def disk_is_full(path: str | os.PathLike[str]) -> bool:
    try:
        usage = os.statvfs(path)
    except OSError:
        return False
    free = usage.f_bavail if os.geteuid() else usage.f_bfree
    return free * usage.f_frsize < LEAST_FREE_BYTES


# A worker passes a document to a program that leads into a container through a file in memory: nobody else can read it,
# and the job cannot change the program through its environment (LD_PRELOAD). The program answers in the same file.

_STDIN = 0
_ANSWER = "answer"


def in_memory(document: Mapping[str, Any]) -> int:
    """A descriptor of a file in memory that holds a document; it becomes a program's standard input."""
    descriptor = os.memfd_create("document")
    _write(descriptor, document)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def put_answer(answer: Mapping[str, Any]) -> None:
    """In that program: replace the document by an answer."""
    os.ftruncate(_STDIN, 0)
    _write(_STDIN, {_ANSWER: answer})


def take_answer(descriptor: int) -> Mapping[str, Any] | None:
    """The answer of a program that has ended; None if it gave none. Closes the descriptor."""
    with open(descriptor, "rb") as file, contextlib.suppress(ValueError):
        file.seek(0)
        answer = json.load(file).get(_ANSWER)
        # Without an answer, the file still holds the document, which may have a key of this name.
        return answer if isinstance(answer, dict) else None
    return None


def _write(descriptor: int, document: Mapping[str, Any]) -> None:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "w", closefd=False) as file:
        json.dump(document, file)

"""JSON documents and JSON lines: on disk, in memory, how deep they nest; and full disks."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainmaster.protocol.account_files import open_plain

_MOST_OWN_BYTES = 64 << 20
"""What is read of a document that we wrote ourselves: a request holds all of a job's parameters."""


def read_lines(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """The whole JSON lines of a piece of a stream, and how many bytes they took."""
    end = data.rfind(b"\n") + 1
    return parse_lines(data[:end].split(b"\n")), end


def parse_lines(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """The JSON objects of some lines. A line that is none (a torn write of a full disk) is skipped."""
    records = []
    for line in lines:
        if not line:
            continue
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record)
    return records


def write_document(path: Path, document: Mapping[str, Any], *, uid: int | None = None, gid: int | None = None) -> None:
    """Replace a document in one step: a reader sees the old one or the new one, never a part.

    It is its owner's alone: ours, or another user's. A group can read it, where one is named.
    """
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        replace_document(directory, path.name, document, uid=uid, gid=gid)
    finally:
        os.close(directory)


def replace_document(
    directory: int, name: str, document: Mapping[str, Any], *, uid: int | None = None, gid: int | None = None
) -> None:
    """Replace a document of an open directory, as `write_document` does."""
    temporary = write_new(directory, name, document, uid=uid, gid=gid)
    try:
        os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory)
        raise


def write_new(
    directory: int, name: str, document: Mapping[str, Any], *, uid: int | None = None, gid: int | None = None
) -> str:
    """Write a document under a temporary name, which is returned."""
    # A name that nobody knows before: others who write there could have put something else in its place.
    temporary = f".{name}.{os.urandom(8).hex()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
    try:
        data = _encode(document)
        while data:
            data = data[os.write(descriptor, data) :]
        if uid is not None:
            os.fchown(descriptor, uid, -1)
        if gid is not None:
            os.fchown(descriptor, -1, gid)
            os.fchmod(descriptor, 0o640)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory)
        raise
    finally:
        os.close(descriptor)
    return temporary


def read_document(path: Path) -> dict[str, Any] | None:
    """A document, or None when there is none that can be read. The way to it is ours; it itself may be anything."""
    try:
        with open(open_plain(path), "rb") as file:
            return decoded(file.read(_MOST_OWN_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None


def decoded(data: bytes) -> dict[str, Any] | None:
    """The JSON object in some bytes; None when they hold none."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _encode(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def is_deeper(value: object, most: int) -> bool:
    """Whether a value nests more than `most` objects and lists.

    The server and the trainers must agree about it: the server passes on what it accepts.
    """
    level: list[Any] = [value]
    for _ in range(most + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return False
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return True


DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a full disk."""
LEAST_FREE_BYTES = 64 << 10
"""A disk with less is as good as full: more than any document of a worker takes."""


def disk_is_full(path: str | os.PathLike[str]) -> bool:
    """Whether nothing more can be written where `path` lies."""
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

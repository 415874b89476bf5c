"""The paths of an attempt's files: which there can be, and what they are for."""

from __future__ import annotations

import os
from typing import NamedTuple

from trainmaster.protocol.attempt_files import DRAFT

_MOST_PATH_BYTES = 2048
_MOST_NAMES = 60
"""Of one path: what is committed must not be deeper than `account_files` goes."""
_MOST_NAME_BYTES = 255


class FilePathError(ValueError):
    """No file of an attempt can have this path."""


class FileStatus(NamedTuple):
    path: str
    size: int
    version: str
    modified_at: float


def status_of(path: str, status: os.stat_result) -> FileStatus:
    version = f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"
    return FileStatus(path=path, size=status.st_size, version=version, modified_at=status.st_mtime)


def parts_of(path: str) -> tuple[str, ...]:
    names = tuple(path.split("/"))
    wrong = any(name in ("", ".", "..") or len(os.fsencode(name)) > _MOST_NAME_BYTES for name in names)
    if wrong or "\0" in path or len(names) > _MOST_NAMES or len(os.fsencode(path)) > _MOST_PATH_BYTES:
        raise FilePathError("it is no relative path of plain names, or is too long")
    return names


def is_of_save(path: str) -> bool:
    return any(DRAFT.fullmatch(name) for name in path.split("/")[:-1])


def is_beside_checkpoints(path: str) -> bool:
    """Whether a path is that of a pointer or a lock: they have a dot first, as no checkpoint has."""
    *above, last = path.split("/")
    return last.startswith(".") and not any(name.startswith(".") for name in above)

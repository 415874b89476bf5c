"""Checkpoints in archives: unpacked so that nothing lands outside, and nothing inside leads out."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tarfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import IO

from trainmaster.training.errors import InputError

MAX_FILES = 100_000
MARK = "config.json"
"""A checkpoint directory has it."""


def unpack(archive: Path, directory: Path, shown: str, *, most_bytes: int | None = None) -> None:
    """Unpack a tar (compressed or not) or zip archive; one that unpacks to more than `most_bytes` is refused.

    Raises:
        InputError: it is neither, is broken, or holds what an archive of a checkpoint has no use for.
    """
    try:
        if zipfile.is_zipfile(archive):
            _unzip(archive, directory, _Allowance(directory, shown, most_bytes))
        elif tarfile.is_tarfile(archive):
            _untar(archive, directory, _Allowance(directory, shown, most_bytes))
        else:
            raise InputError(f"{shown} is no archive; expected .tar, .tar.gz or .zip of a model's directory")
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError) as error:
        raise InputError(f"{shown}: the archive cannot be read: {error}") from error
    except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
        raise InputError(f"{shown}: the archive names {Path(error.filename).name} twice") from error


def checkpoint_in(directory: Path, shown: str, mark: str = MARK) -> Path:
    """Where in an unpacked archive the checkpoint lies: at its top, or in its one directory.

    Raises:
        InputError: it is in neither place.
    """
    found = sorted(path.parent for path in directory.rglob(mark))
    if not found:
        raise InputError(f"{shown} holds no {mark}; expected the directory of a model, as save_pretrained writes it")
    top = min(found, key=lambda path: len(path.parts))
    if sum(len(path.parts) == len(top.parts) for path in found) > 1:
        raise InputError(f"{shown} holds several models; pack one alone")
    return top


def _untar(archive: Path, directory: Path, allowance: _Allowance) -> None:
    with tarfile.open(archive) as opened:
        for member in opened:
            allowance.take(member.name, member.size, plain=member.isfile() or member.isdir())
            if member.isdir():
                continue
            source = opened.extractfile(member)
            if source is not None:
                with source:
                    _write(directory / member.name, source)


def _unzip(archive: Path, directory: Path, allowance: _Allowance) -> None:
    with zipfile.ZipFile(archive) as opened:
        for member in opened.infolist():
            kind = stat.S_IFMT(member.external_attr >> 16)
            allowance.take(member.filename, member.file_size, plain=member.is_dir() or kind in (0, stat.S_IFREG))
            if member.is_dir():
                continue
            with opened.open(member) as source:
                _write(directory / member.filename, source)


class _Allowance:
    """What an archive may hold. What it says of its sizes is what it can unpack to: both readers stop there."""

    def __init__(self, directory: Path, shown: str, most_bytes: int | None) -> None:
        self._directory = directory
        self._shown = shown
        self._most_bytes = most_bytes
        self._files = self._bytes = 0

    def take(self, name: str, size: int, *, plain: bool) -> None:
        """Count one member, or refuse it."""
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
            raise InputError(f"{self._shown}: {name!r} would be unpacked outside of its directory")
        if not plain:
            raise InputError(f"{self._shown}: {name} is no plain file; links and devices are not unpacked")
        self._files += 1
        self._bytes += size
        if self._files > MAX_FILES:
            raise InputError(f"{self._shown} holds more than {MAX_FILES} files")
        if self._most_bytes is not None and self._bytes > self._most_bytes:
            raise InputError(
                f"{self._shown} is too large to be unpacked for a check ({self._most_bytes >> 20} MiB); name the "
                "tokenizer with tokenizer_id"
            )
        free = shutil.disk_usage(self._directory).free
        if size > free:
            raise OSError(
                errno.ENOSPC, f"No space left on device: {name} of {self._shown} has {size} bytes, and {free} are free"
            )


def _write(path: Path, source: IO[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o644)) as file:
        shutil.copyfileobj(source, file, 1 << 20)

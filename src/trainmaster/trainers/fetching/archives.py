"""Checkpoints in archives: unpacked so that nothing lands outside, and nothing inside leads out."""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import IO

from trainmaster.trainers.errors import InputError

MAX_FILES = 100_000
MARK = "config.json"
"""A checkpoint directory has it."""


def unpack(archive: Path, directory: Path, shown: str) -> None:
    """Unpack a tar (compressed or not) or zip archive.

    Raises:
        InputError: it is neither, is broken, or holds what an archive of a checkpoint has no use for.
    """
    try:
        if zipfile.is_zipfile(archive):
            _unzip(archive, directory, shown)
        elif tarfile.is_tarfile(archive):
            _untar(archive, directory, shown)
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


def _untar(archive: Path, directory: Path, shown: str) -> None:
    with tarfile.open(archive) as opened:
        for number, member in enumerate(opened):
            _check(member.name, number, member.size, directory, shown)
            if member.isdir():
                continue
            if not member.isfile():
                raise InputError(f"{shown}: {member.name} is no plain file; links and devices are not unpacked")
            source = opened.extractfile(member)
            if source is not None:
                with source:
                    _write(directory / member.name, source)


def _unzip(archive: Path, directory: Path, shown: str) -> None:
    with zipfile.ZipFile(archive) as opened:
        for number, member in enumerate(opened.infolist()):
            _check(member.filename, number, member.file_size, directory, shown)
            if member.is_dir():
                continue
            kind = stat.S_IFMT(member.external_attr >> 16)
            if kind not in (0, stat.S_IFREG):
                raise InputError(f"{shown}: {member.filename} is no plain file; links and devices are not unpacked")
            with opened.open(member) as source:
                _write(directory / member.filename, source)


def _check(name: str, number: int, size: int, directory: Path, shown: str) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise InputError(f"{shown}: {name!r} would be unpacked outside of its directory")
    if number >= MAX_FILES:
        raise InputError(f"{shown} holds more than {MAX_FILES} files")
    # What an archive says of its sizes is what it can unpack to: both readers stop there.
    free = shutil.disk_usage(directory).free
    if size > free:
        raise OSError(28, f"No space left on device: {name} of {shown} has {size} bytes, and {free} are free")


def _write(path: Path, source: IO[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o644)) as file:
        shutil.copyfileobj(source, file, 1 << 20)

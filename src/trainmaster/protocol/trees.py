"""Removing a directory that others may have filled, and may still write to."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: str | os.PathLike[str]) -> None:
    """Remove a directory with all that is in it. Links are removed, not followed.

    `shutil.rmtree` fails on directories that lie deeper in one another than Python can call itself. Whoever could make
    such would keep them, and what is to be removed after them, for ever.

    Raises:
        OSError: something could not be removed.
    """
    try:
        shutil.rmtree(path)
    except RecursionError:
        with _opened(path) as top:
            while directories := _unlink_files(top):
                for name in directories:
                    _dissolve(name, top)
        os.rmdir(path)


def _dissolve(name: str, top: int) -> None:
    """Move the directories in a directory up beside it, and remove it with the rest: nothing is ever deep."""
    with _opened(name, top) as directory:
        for inner in _unlink_files(directory):
            os.rename(inner, f".{os.urandom(8).hex()}", src_dir_fd=directory, dst_dir_fd=top)
    os.rmdir(name, dir_fd=top)


def _unlink_files(directory: int) -> list[str]:
    """Remove all but the directories in a directory, which are returned."""
    with os.scandir(directory) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_directory in found:
        if not is_directory:
            os.unlink(name, dir_fd=directory)
    return [name for name, is_directory in found if is_directory]


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str], inside: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, _DIRECTORY, dir_fd=inside)
    try:
        yield descriptor
    finally:
        os.close(descriptor)

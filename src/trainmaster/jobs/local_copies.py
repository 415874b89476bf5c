"""Local copies of what lies elsewhere: one for all processes of a machine that want it at the same time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

_PREFIX = "copy-"
_FILES = "files"
"""Inside a copy: present when it is whole."""


@contextlib.contextmanager
def copy(parent: Path, name: str, bring: Callable[[Path], None]) -> Iterator[Path]:
    """A directory that `bring` has filled, for reading. Whoever leaves last removes it.

    Of several processes that want the same `name`, one brings it and the others wait. What dead processes left is
    removed.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for entry in list(parent.iterdir()):
        if entry.name.startswith(_PREFIX) and entry.name != _PREFIX + name:
            _remove_if_unused(entry)
    home = parent / f"{_PREFIX}{name}"
    descriptor = _enter(home, bring)
    try:
        yield home / _FILES
    finally:
        os.close(descriptor)
        _remove_if_unused(home)


def _enter(home: Path, bring: Callable[[Path], None]) -> int:
    """A descriptor with a shared lock on a directory with the files in it."""
    while True:
        home.mkdir(exist_ok=True)
        try:
            descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            # Shared first: those who read it hold that for long, and must not be waited for.
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if _is_at(home, descriptor) and (home / _FILES).is_dir():
                return descriptor
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(home, descriptor) and not (home / _FILES).is_dir():
                _fill(home, bring)
        except BaseException:
            os.close(descriptor)
            raise
        # From the beginning: the lock that is held now cannot become a shared one in one step.
        os.close(descriptor)


def _fill(home: Path, bring: Callable[[Path], None]) -> None:
    coming = home / "coming"
    try:
        shutil.rmtree(coming, ignore_errors=True)
        coming.mkdir()
        bring(coming)
        os.rename(coming, home / _FILES)
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise


def _remove_if_unused(home: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(home, ignore_errors=True)
        finally:
            os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the directory at a path is still the one that was opened."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False

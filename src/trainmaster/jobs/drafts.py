"""Temporary directories, locked while in use: drafts of checkpoints, and local copies of remote ones.

What dead processes left is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from trainmaster.jobs.checkpoint import DRAFT_PREFIX, REMOVED_PREFIX, require_space

_DRAFT = re.compile(re.escape(DRAFT_PREFIX) + r"(?P<job>.+)\.(?P<attempt>\d+)-[0-9a-f]+")


def nonce(job_id: str, attempt: int) -> str:
    """A name that no other save has."""
    return f"{job_id}.{attempt}-{os.urandom(4).hex()}"


@contextlib.contextmanager
def draft(parent: Path, *, job_id: str, attempt: int, expected_bytes: int = 0) -> Iterator[Path]:
    """A temporary directory in `parent`. It is gone afterwards, unless it was renamed.

    It is locked while it is written, so that others can tell it from what a dead process left.

    Raises:
        OSError: with ENOSPC when there is less room than `expected_bytes`.
    """
    parent.mkdir(parents=True, exist_ok=True)
    # First, because a draft that a full disk cut short is in the way of this one.
    tidy(parent, job_id=job_id, attempt=attempt)
    require_space(parent, expected_bytes)
    directory, descriptor = _make(parent, job_id, attempt)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(descriptor)


def discard(directory: Path) -> None:
    """Remove a checkpoint: at once for all who list it, then file by file."""
    doomed = directory.with_name(f"{REMOVED_PREFIX}{os.urandom(4).hex()}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(directory, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def tidy(parent: Path, *, job_id: str, attempt: int) -> None:
    """Remove what nobody will ever finish: drafts of older attempts, and those whose writer is dead."""
    for entry in list(parent.iterdir()):
        if entry.name.startswith(REMOVED_PREFIX):
            shutil.rmtree(entry, ignore_errors=True)
        elif found := _DRAFT.fullmatch(entry.name):
            # An older attempt can never commit any more, dead or not.
            if found["job"] == job_id and int(found["attempt"]) < attempt:
                shutil.rmtree(entry, ignore_errors=True)
            else:
                _remove_if_dead(entry)


def _make(parent: Path, job_id: str, attempt: int) -> tuple[Path, int]:
    while True:
        directory = parent / f"{DRAFT_PREFIX}{nonce(job_id, attempt)}"
        directory.mkdir()
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            if _lock(descriptor) is not False and directory.exists():
                return directory, descriptor
            os.close(descriptor)  # Somebody tidied in between, and took it for a dead one's.


def _remove_if_dead(directory: Path) -> None:
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        if _lock(descriptor):
            shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Whether the lock was free; None where the file system cannot lock a directory."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


_COPY_PREFIX = "copy-"
_FILES = "files"
"""Inside a copy: present when it is whole."""


@contextlib.contextmanager
def local_copy(parent: Path, name: str, bring: Callable[[Path], None]) -> Iterator[Path]:
    """A directory that `bring` has filled, for reading. The last process that leaves removes it.

    Of several processes that want the same `name`, one brings it and the others wait. What dead processes left is
    removed.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for entry in list(parent.iterdir()):
        if entry.name.startswith(_COPY_PREFIX) and entry.name != _COPY_PREFIX + name:
            _remove_if_unused(entry)
    home = parent / f"{_COPY_PREFIX}{name}"
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

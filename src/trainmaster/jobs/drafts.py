"""Directories in which checkpoints are written before they are committed, and what the dead leave of them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
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

"""Directories on this machine for drafts and copies of checkpoints that lie elsewhere."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from trainmaster.jobs import checkpoint
from trainmaster.protocol import environment


def staging() -> Path:
    """The directory for drafts and copies on this machine: in a job beside its caches, else in TMPDIR."""
    directory = Path(os.environ.get(environment.CACHE_DIR) or tempfile.gettempdir()) / f"trainmaster-{os.getuid()}"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise PermissionError(f"{directory} belongs to another user; set TMPDIR to a directory of your own")
    return directory


_COPY_PREFIX = "copy-"
_FILES = "files"
"""Inside a copy: present when the copy is complete."""


@contextlib.contextmanager
def local_copy(parent: Path, name: str, bring: Callable[[Path], None]) -> Iterator[Path]:
    """A directory that `bring` fills once for all processes that want this `name`; the last to leave removes it."""
    parent.mkdir(parents=True, exist_ok=True)
    for entry in list(parent.iterdir()):
        if entry.name.startswith(_COPY_PREFIX) and entry.name != _COPY_PREFIX + name:
            checkpoint.remove_unless_locked(entry)
    home = parent / f"{_COPY_PREFIX}{name}"
    descriptor = _enter(home, bring)
    try:
        yield home / _FILES
    finally:
        os.close(descriptor)
        checkpoint.remove_unless_locked(home)


def _enter(home: Path, bring: Callable[[Path], None]) -> int:
    """Fill the directory unless another process did; returns a descriptor with a shared lock on it."""
    while True:
        home.mkdir(exist_ok=True)
        try:
            descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            # Shared first: readers hold that lock for long, and must not be waited for.
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if checkpoint.is_at(home, descriptor) and (home / _FILES).is_dir():
                return descriptor
            if _becomes_exclusive(descriptor) and checkpoint.is_at(home, descriptor) and not (home / _FILES).is_dir():
                _fill(home, bring)
        except BaseException:
            os.close(descriptor)
            raise
        # Once more: an exclusive lock cannot become a shared one in one step.
        os.close(descriptor)


def _becomes_exclusive(descriptor: int) -> bool:
    """Without waiting, as the one that gets it first may read for long; if several found the directory empty, only one
    of them fills it, after a pause of random length."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(random.uniform(0.001, 0.02))
        return False
    return True


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

"""The account's cache of what was fetched or prepared: entries by key, each made once and atomically.

An entry is a directory. The process that makes it holds a lock, which the kernel releases when the process dies; others
wait. An unfinished draft is there for the next holder of the lock. Using an entry renews its modification time, so that
unused entries can be removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmaster.jobs.checkpoint import flush_path, flush_tree
from trainmaster.training.steps import say, write_whole

_LOOK_AGAIN_S = 0.2
_TELL_EVERY_S = 30.0
UNFINISHED = ".unfinished"
KINDS = ("http", "s3", "models", "rows", "prepared", "tables", "references")
"""The kinds of entries, each in a directory of its name. `hub` is the cache of the Hub's client."""
KEEP_S = 30 * 24 * 3600.0
SPARE_BYTES = 256 << 20
"""A download leaves at least this much free: a full disk stops more than one job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    path: Path
    whole: bool = True
    """False: only the beginning of the file was requested."""


def key_of(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:40]


class Cache:
    def __init__(self, root: Path) -> None:
        self.root = root

    def entry(self, kind: str, key: str, make: Callable[[Path], None]) -> Path:
        """The entry's directory; where there is none, `make` fills one, which may hold what an unfinished call left."""
        place = self.root / kind / key
        if not place.is_dir():
            with self.lock(kind, key):
                if not place.is_dir():
                    draft = self.draft(kind, key)
                    draft.mkdir(parents=True, exist_ok=True)
                    make(draft)
                    flush_tree(draft)
                    os.rename(draft, place)
                    flush_path(place.parent)
        with contextlib.suppress(OSError):
            os.utime(place)
        return place

    def draft(self, kind: str, key: str) -> Path:
        """The directory in which an entry is made; the holder of its lock may have others write there."""
        return self.root / kind / (key + UNFINISHED)

    @contextlib.contextmanager
    def lock(self, kind: str, key: str) -> Iterator[None]:
        path = self.root / "locks" / f"{kind}-{key}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            _acquire(file.fileno(), kind)
            yield  # closing the file gives the lock back

    def forget_unused(self, older_than_s: float = KEEP_S) -> None:
        """Remove entries that were not used for so long; locked ones stay."""
        before = time.time() - older_than_s
        for kind in KINDS:
            for path in (self.root / kind).glob("*"):
                with contextlib.suppress(OSError), self._try_lock(kind, path.name.removesuffix(UNFINISHED)) as held:
                    if held and path.stat().st_mtime < before:
                        shutil.rmtree(path)

    @contextlib.contextmanager
    def _try_lock(self, kind: str, key: str) -> Iterator[bool]:
        with open(self.root / "locks" / f"{kind}-{key}", "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                held = False
            yield held

    def digest(self, path: Path) -> str:
        """The SHA-256 of a file, cached while the file does not change."""
        status = path.stat()
        facts = [os.path.realpath(path), status.st_size, status.st_mtime_ns, status.st_ino]
        memo = self.root / "digests" / key_of(facts)
        with contextlib.suppress(OSError):
            return memo.read_text()
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        memo.parent.mkdir(parents=True, exist_ok=True)
        write_whole(memo, digest)
        return digest


def require_room(directory: Path, needed: int, shown: str) -> None:
    free = shutil.disk_usage(directory).free
    if free - SPARE_BYTES < needed:
        message = f"No space left on device: {shown} needs {needed} bytes more, and {free} are free"
        raise OSError(errno.ENOSPC, message, str(directory))


def emptied(directory: Path) -> Path:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return directory


def _acquire(descriptor: int, kind: str) -> None:
    told = time.monotonic() - _TELL_EVERY_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() - told >= _TELL_EVERY_S:
                told = time.monotonic()
                say(f"waiting for another job, which is fetching or preparing the same ({kind})")
            time.sleep(_LOOK_AGAIN_S)

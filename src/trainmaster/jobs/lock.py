"""Locks that keep two runs from writing checkpoints under the same name.

The kernel holds locks on files until the process dies. On an object store a lock is an object that its holder renews;
it is free after `EXPIRES_S` without a renewal. A server, as an object store, respects both kinds, and frees the locks
of attempts that are over.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from trainmaster.jobs import objects
from trainmaster.protocol.account_files import closing

LOOK_EVERY_S = 0.2
EXPIRES_S = 60.0
RENEWED_EVERY_S = 15.0
CLOCKS_DIFFER_S = 30.0
"""How much the clocks of two machines may differ without one taking the other's lock."""


class LockedError(RuntimeError):
    """Another process holds the lock."""


class LockLostError(RuntimeError):
    """Another process may hold the lock now, since this one did not renew it in time."""


class Lock:
    """A lock that is held. One on a file cannot be lost."""

    def require(self) -> None:
        """Raise LockLostError if the lock is no longer held; called before a commit."""


@contextlib.contextmanager
def file_lock(path: Path, owner: str, *, wait_s: float = 0.0) -> Iterator[Lock]:
    """Lock a file, made if missing, which names the holder; raises LockedError if it is held, even after `wait_s`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + wait_s
    while True:
        with closing(os.open(path, os.O_RDWR | os.O_CREAT, 0o644)) as descriptor:
            if (holder := _lock(path, descriptor)) is None:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, owner.encode(), 0)
                # Released explicitly: a child that was forked meanwhile shares the descriptor and would keep the lock.
                try:
                    yield Lock()
                finally:
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
                return
        if time.monotonic() >= deadline:
            raise LockedError(f"{path.parent} is in use by {holder}")
        time.sleep(LOOK_EVERY_S)


def _lock(path: Path, descriptor: int) -> str | None:
    """Lock an open file; returns who holds it, if somebody does."""
    content = os.pread(descriptor, 1000, 0)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return content.decode(errors="replace") or "another process"
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.stat(path), os.fstat(descriptor)):
            # A job on another machine holds the lock by what it writes there, through the server.
            holder, expires_at = _holder(os.pread(descriptor, 1000, 0))
            return holder if expires_at + CLOCKS_DIFFER_S >= time.time() else None
    return "another process"  # which has replaced the file


class ObjectLock(Lock):
    """A lock that a thread renews until the block ends."""

    def __init__(self, place: objects.Place, key: str, owner: str) -> None:
        self._place = place
        self._key = key
        self._owner = owner
        self._nonce = os.urandom(8).hex()
        self._version: str | None = None
        self._renewals = 0
        self._renewed_at = 0.0
        self._lost = False
        self._released = threading.Event()

    def require(self) -> None:
        if self._lost or time.monotonic() > self._renewed_at + EXPIRES_S:
            raise LockLostError(f"{self._place.locate(self._key)}: the lock was not renewed in time and may be taken")

    def take(self, deadline: float) -> None:
        while not self._write(time.time() + EXPIRES_S):
            try:
                data, version = self._place.get(self._key)
                holder, expires_at = _holder(data)
                self._version = version if expires_at + CLOCKS_DIFFER_S < time.time() else None
            except FileNotFoundError:
                self._version = None
                continue
            if self._version is None:
                if time.monotonic() >= deadline:
                    raise LockedError(f"{self._place.locate(self._key)}: in use by {holder}")
                time.sleep(LOOK_EVERY_S)

    def renew(self) -> None:
        while not self._lost and not self._released.wait(RENEWED_EVERY_S):
            with contextlib.suppress(OSError):
                self._lost = not self._write(time.time() + EXPIRES_S)

    def release(self, renewing: threading.Thread) -> None:
        self._released.set()
        renewing.join()
        with contextlib.suppress(OSError):
            if not self._lost:
                self._write(0.0)

    def _write(self, expires_at: float) -> bool:
        now = time.monotonic()
        self._renewals += 1
        record = {"owner": self._owner, "nonce": self._nonce, "renewals": self._renewals}
        document = json.dumps({**record, "expires_at": expires_at}).encode()
        if (written := self._place.put_if(self._key, document, version=self._version)) is None:
            # Perhaps refused because of itself: a request whose answer got lost is sent again.
            with contextlib.suppress(FileNotFoundError):
                found, there = self._place.get(self._key)
                written = there if found == document else None
        if written is not None:
            self._version, self._renewed_at = written, now
        return written is not None


@contextlib.contextmanager
def object_lock(place: objects.Place, key: str, owner: str, *, wait_s: float = 0.0) -> Iterator[ObjectLock]:
    """Lock by an object that names the holder; raises LockedError if it is held after `wait_s`."""
    lock = ObjectLock(place, key, owner)
    lock.take(time.monotonic() + wait_s)
    thread = threading.Thread(target=lock.renew, name="trainmaster-lock", daemon=True)
    thread.start()
    try:
        yield lock
    finally:
        lock.release(thread)


def _holder(data: bytes) -> tuple[str, float]:
    try:
        record = json.loads(data)
        return str(record["owner"]), float(record["expires_at"])
    except (ValueError, KeyError, TypeError):
        return "another process", 0.0

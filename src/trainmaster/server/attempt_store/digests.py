"""Digests of files that are being sent."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from typing import Any

_READ_BYTES = 1 << 20


class RunningDigests:
    """Digests of files that are being sent, so that most need not be read again when all of one has arrived."""

    MOST = 4096

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[int, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def extend(self, name: str, begin: int, data: memoryview) -> None:
        with self._lock:
            end, digest = self._known.pop(name, (0, hashlib.sha256()))
        if end != begin:
            return  # Another process took what lies between.
        digest.update(data)
        with self._lock:
            self._known[name] = (begin + len(data), digest)
            if len(self._known) > self.MOST:
                self._known.popitem(last=False)

    def take(self, name: str, size: int) -> str | None:
        """The digest of a file of this size; None if it is not known."""
        with self._lock:
            end, digest = self._known.pop(name, (-1, None))
        return str(digest.hexdigest()) if end == size else None


running_digests = RunningDigests()


def digest_of(descriptor: int) -> str:
    digest, offset = hashlib.sha256(), 0
    while data := os.pread(descriptor, _READ_BYTES, offset):
        digest.update(data)
        offset += len(data)
    return digest.hexdigest()

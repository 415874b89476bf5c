"""Unix sockets whose path may be longer than the kernel allows (about 100 bytes)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_LONGEST = 100


@contextlib.contextmanager
def reachable(path: str | os.PathLike[str]) -> Iterator[str]:
    """A path to the same socket that is short enough to bind or to connect to, while the context lasts."""
    plain = os.fspath(path)
    if len(os.fsencode(plain)) <= _LONGEST:
        yield plain
        return
    directory = os.open(Path(plain).parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{Path(plain).name}"
    finally:
        os.close(directory)

"""Directories in memory: databases that wait for no disk. Nobody pulls the plug here, and kill -9 loses nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_MEMORY = Path("/dev/shm")
_ENOUGH_BYTES = 2 << 30
"""Containers may have much less."""


@contextlib.contextmanager
def directory_in_memory() -> Iterator[Path]:
    """A new directory for the length of a block; on a disk where there is not enough memory for it."""
    fits = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= _ENOUGH_BYTES
    with tempfile.TemporaryDirectory(
        prefix="tm-test-", dir=_MEMORY if fits else None, ignore_cleanup_errors=True
    ) as directory:
        yield Path(directory)

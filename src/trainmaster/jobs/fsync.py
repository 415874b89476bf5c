"""What was written, on disk for good: before it gets the name by which others find it."""

from __future__ import annotations

import os
from pathlib import Path


def flush_path(path: str | Path) -> None:
    """Make the bytes of a file, or the names in a directory, last."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(directory: str | Path) -> None:
    """Make a directory last with all that is in it. Links are names, and lead to what is somebody else's to keep."""
    for parent, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(parent, name)
            if os.path.isfile(path) and not os.path.islink(path):
                flush_path(path)
        flush_path(parent)

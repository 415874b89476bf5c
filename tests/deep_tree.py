"""A directory that is deeper than Python can recurse. pytest cannot remove such a one either, so this does."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def deep_tree(directory: Path, depth: int = 1_500) -> Iterator[None]:
    """Make directories in one another below a directory, the last of them with a file, for the length of a block."""
    directory.mkdir(parents=True, exist_ok=True)
    here = os.open(directory, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=here))
    os.close(here)
    try:
        yield
    finally:
        subprocess.run(["rm", "-rf", directory / "d"], check=True)

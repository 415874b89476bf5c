"""Letting users of this machine through to what is theirs below the server's directories, and to nothing else.

Where jobs run as users of their own, these have to pass through directories of the server's. Such a directory can be
neither listed nor changed by them, and all that lies in it is closed before it is opened: what is to be reached is
opened by whoever makes it.
"""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterable
from pathlib import Path

from trainmaster.protocol.run_directory import SEARCH_ONLY

_OURS = (
    *("api-key", "artifacts", "blobs", "cache", "config.toml", "forkserver", "hints.sock", "lock", "port", "runs"),
    *("secret-key", "server.json", "server.log", "spool", "starting.lock", "workers"),
    *("trainmaster.db", "trainmaster.db-shm", "trainmaster.db-wal"),
)
"""What lies in a data directory."""
_OTHERS = 0o077


def open_passage(data_dir: Path, targets: Iterable[Path]) -> None:
    """Let others pass through these directories, and through the data directory where they lie in it.

    One that was opened before is left as it is.
    """
    wanted = list(targets)
    if any(data_dir in target.parents for target in wanted):
        # One that others could look into already may hold more than ours: that is for its owner to close.
        was_open = bool(stat.S_IMODE(data_dir.stat().st_mode) & _OTHERS)
        _open(data_dir, [data_dir / name for name in _OURS] if was_open else list(data_dir.iterdir()))
    for target in wanted:
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        _open(target, target.iterdir())


def _open(directory: Path, inside: Iterable[Path]) -> None:
    if stat.S_IMODE(directory.stat().st_mode) == SEARCH_ONLY:
        return
    for path in inside:
        # Something may go meanwhile. A link is as closed as what it leads to.
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            mode = stat.S_IMODE(status.st_mode)
            if mode & _OTHERS and mode != SEARCH_ONLY and not stat.S_ISLNK(status.st_mode):
                path.chmod(mode & ~_OTHERS)
    directory.chmod(SEARCH_ONLY)

"""Giving a directory of a job's to somebody else: its plain files, linked or copied, and nothing behind a link."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from trainmaster.core.errors import RefusedError

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


def open_below(root: Path, path: str) -> int:
    """A directory of ours by its descriptor. Jobs fill what lies on the way, and may put links there: not through them.

    Raises:
        OSError: it is not there.
    """
    within = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in Path(path).parts:
            inner = os.open(part, _DIRECTORY, dir_fd=within)
            os.close(within)
            within = inner
    except BaseException:
        os.close(within)
        raise
    return within


class Linker:
    """Puts the files of a directory into another one, as links where the file system can."""

    def __init__(self, *, uid: int | None, tick: Callable[[], None]) -> None:
        """Give what is made to a user, unless that is None; `tick` is called again and again meanwhile."""
        self._uid = uid
        self._tick = tick

    def link(self, source: int, target: Path) -> int:
        """Link or copy all plain files; how many bytes they have. Closes `source`.

        Raises:
            RefusedError: there is something that is no plain file.
            OSError: something cannot be read, or written.
        """
        size = 0
        try:
            with os.scandir(source) as entries:
                for entry in entries:
                    size += self._entry(source, entry, target / entry.name)
                    self._tick()
            if self._uid is not None:
                os.chown(target, self._uid, -1)
        finally:
            os.close(source)
        return size

    def _entry(self, source: int, entry: os.DirEntry[str], target: Path) -> int:
        found = entry.stat(follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            target.mkdir(mode=0o700)
            return self.link(os.open(entry.name, _DIRECTORY, dir_fd=source), target)
        if not stat.S_ISREG(found.st_mode):
            raise RefusedError(f"the checkpoint holds {entry.name!r}, which is no plain file")
        try:
            os.link(entry.name, target, src_dir_fd=source, follow_symlinks=False)
        except OSError:
            # Another file system, one without links, or too many of them.
            self._copy_file(source, entry.name, target)
        return found.st_size

    def _copy_file(self, source: int, name: str, target: Path) -> None:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=source)
        with open(descriptor, "rb") as reader, open(target, "xb") as writer:
            while piece := reader.read(16 << 20):
                writer.write(piece)
                self._tick()
            writer.flush()
            os.fsync(writer.fileno())
            if self._uid is not None:
                os.fchown(writer.fileno(), self._uid, -1)

"""Listing, measuring, moving and removing trees that others may be changing."""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import os
import stat
from collections.abc import Iterator

from trainmaster.protocol.account_files.safe_open import DIRECTORY, PathLike, directory_below, open_directory, split

MOST_COUNTED = 250_000
"""Entries that are counted for a size or a time; counting a million takes seconds."""
_BATCH = 10_000
"""Names of one directory that are held in memory at a time."""
_MOST_BATCHES = 1_000
_LONGEST_WAY = 4093
"""Of a directory: with a slash and a one-letter name, it reaches the kernel's PATH_MAX."""


class Descent:
    """A position in a tree; holds one descriptor at any depth."""

    def __init__(self, directory: int) -> None:
        self.descriptor = os.dup(directory)
        self._above: list[tuple[int, int]] = []

    def __enter__(self) -> Descent:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def enter(self, name: str) -> None:
        inner = open_directory(self.descriptor, name)
        self._above.append(_identity(self.descriptor))
        os.close(self.descriptor)
        self.descriptor = inner

    def leave(self) -> None:
        """Go back to the parent; raises OSError if this directory was moved meanwhile."""
        outer = os.open("..", DIRECTORY, dir_fd=self.descriptor)
        if _identity(outer) != self._above.pop():
            os.close(outer)
            raise OSError(errno.ESTALE, "the directory was moved while it was read")
        os.close(self.descriptor)
        self.descriptor = outer


@contextlib.contextmanager
def _entries(top: PathLike, name: str) -> Iterator[Iterator[os.DirEntry[str]]]:
    with directory_below(top, name) as directory, os.scandir(directory) as entries:
        yield entries


def directories_in(top: PathLike, name: str = "") -> list[str]:
    """The names of the directories in a directory; empty if it is absent."""
    with contextlib.suppress(FileNotFoundError), _entries(top, name) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []


def has_entries(top: PathLike, name: str) -> bool:
    with contextlib.suppress(FileNotFoundError), _entries(top, name) as entries:
        return next(entries, None) is not None
    return False


def newest_in(top: PathLike, name: str) -> float:
    """When a directory or a direct entry of it last changed; 0 if it is absent."""
    newest = 0.0
    with contextlib.suppress(FileNotFoundError), directory_below(top, name) as directory:
        newest = os.fstat(directory).st_mtime
        with os.scandir(directory) as entries:
            for entry in itertools.islice(entries, MOST_COUNTED):
                with contextlib.suppress(FileNotFoundError):
                    newest = max(newest, entry.stat(follow_symlinks=False).st_mtime)
    return newest


def size_of(top: PathLike, name: str) -> int:
    """The disk space of what can be read in a directory; a lower bound if it has more than `MOST_COUNTED` entries."""
    size = counted = 0

    def count(directory: int) -> list[str]:
        """Add up the direct entries of a directory; returns the names of its directories."""
        nonlocal size, counted
        inner = []
        with os.scandir(directory) as entries:
            for entry in itertools.islice(entries, MOST_COUNTED - counted):
                counted += 1
                with contextlib.suppress(FileNotFoundError):
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        inner.append(entry.name)
        return inner

    with contextlib.suppress(OSError), directory_below(top, name) as start, Descent(start) as here:
        pending = [count(here.descriptor)]
        while pending and counted < MOST_COUNTED:
            if pending[-1]:
                with contextlib.suppress(FileNotFoundError):
                    here.enter(pending[-1].pop())
                    pending.append(count(here.descriptor))
            else:
                pending.pop()
                if pending:
                    here.leave()
    return size


def files_in_order(directory: int, after: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all files below a directory, sorted, each as a tuple of names; only those after `after`.

    Links to directories are not followed. Everything that is no directory counts as a file, links and pipes included
    (`open_inside` tells them apart); names that are not text are left out. A directory is skipped if the paths below it
    would be too long to open.
    """
    with Descent(directory) as here:
        names: list[str] = []
        levels = [_names_after(here.descriptor, after)]
        while levels:
            try:
                name, is_directory = next(levels[-1])
            except StopIteration:
                levels.pop()
                if levels:
                    names.pop()
                    here.leave()
                continue
            path = (*names, name)
            if not is_directory:
                yield path
                continue
            if len(os.fsencode("/".join(path))) > _LONGEST_WAY:
                continue
            with contextlib.suppress(FileNotFoundError):
                here.enter(name)
                names.append(name)
                levels.append(_names_after(here.descriptor, after[len(path) :] if after[: len(path)] == path else ()))


def _names_after(directory: int, after: tuple[str, ...]) -> Iterator[tuple[str, bool]]:
    """The sorted names in a directory from the first of `after` on, and whether each is a directory; in batches."""
    # What follows a/b may lie in the directory a, and is never the file a.
    last, is_last_wanted = (after[0], len(after) > 1) if after else ("", False)
    while True:
        with os.scandir(directory) as entries:
            wanted = (
                (entry.name, entry.is_dir(follow_symlinks=False))
                for entry in entries
                if _is_text(entry.name) and (entry.name > last or (is_last_wanted and entry.name == last))
            )
            batch = heapq.nsmallest(_BATCH, wanted)
        yield from batch
        if len(batch) < _BATCH:
            return
        last, is_last_wanted = batch[-1][0], False


def move(top: PathLike, name: str, new_name: str) -> bool:
    """Rename something below a directory of ours; False if it is not there."""
    way, last = split(name)
    new_way, new_last = split(new_name)
    try:
        with directory_below(top, way) as source, directory_below(top, new_way) as target:
            os.rename(last, new_last, src_dir_fd=source, dst_dir_fd=target)
    except FileNotFoundError:
        return False
    return True


def remove(top: PathLike, name: str) -> None:
    """Remove a file, a link or a tree, if it exists. Links are removed, not followed."""
    way, last = split(name)
    with contextlib.suppress(FileNotFoundError), directory_below(top, way) as directory:
        if stat.S_ISDIR(os.stat(last, dir_fd=directory, follow_symlinks=False).st_mode):
            _remove_tree(directory, last)
        else:
            os.unlink(last, dir_fd=directory)


def remove_tree(path: PathLike) -> None:
    """Remove a directory, the path to which is ours, with its content, if it exists."""
    way, last = os.path.split(os.path.abspath(path))
    remove(way, last)


def _remove_tree(directory: int, name: str) -> None:
    with Descent(directory) as here:
        here.enter(name)
        names, pending = [name], [_remove_files(here.descriptor)]
        while names:
            if pending[-1]:
                inner = pending[-1].pop()
                try:
                    here.enter(inner)
                except FileNotFoundError:
                    continue
                names.append(inner)
                pending.append(_remove_files(here.descriptor))
            else:
                pending.pop()
                here.leave()
                with contextlib.suppress(FileNotFoundError):
                    os.rmdir(names.pop(), dir_fd=here.descriptor)


def _remove_files(directory: int) -> list[str]:
    """Remove everything but the directories in a directory; returns their names."""
    for _ in range(_MOST_BATCHES):  # bounded, as somebody may make files as fast as they go
        inner: list[str] = []
        files: list[str] = []
        with os.scandir(directory) as entries:
            for entry in entries:
                (inner if entry.is_dir(follow_symlinks=False) else files).append(entry.name)
                if len(files) == _BATCH:
                    break
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory)
        if len(files) < _BATCH:
            return inner
    raise OSError(errno.EBUSY, "files appear as fast as they are removed")


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _is_text(name: str) -> bool:
    """Whether JSON can carry a name."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True

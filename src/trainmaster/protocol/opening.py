"""Opening what lies below a directory of ours that others fill.

A job can put anything at the names that it may write to: a link to a file of another account, which the server could
read; a pipe, which nobody ever writes to. So no link is followed on the way, and nothing but a plain file is opened.
What is something else is not there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

_TOP = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_DIRECTORY = _TOP | os.O_NOFOLLOW
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Without waiting: a pipe would keep us until somebody opens its other end."""
_OWNERS_ALONE = 0o600
_STRANGE = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ENODEV, errno.EACCES, errno.EPERM)
"""What opening a link, a file in a directory's place, a directory, a pipe or socket, a device, and what belongs to
another user fails with."""


def open_below(top: str | os.PathLike[str], name: str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the plain file of this name, such as `nodes/0/exit.json`. The way to `top` itself is ours.

    Raises:
        FileNotFoundError: there is none.
    """
    way, _, last = name.rpartition("/")
    directory = _directory(top, way)
    try:
        return open_plain(last, flags, directory=directory)
    finally:
        os.close(directory)


def open_plain(path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, directory: int | None = None) -> int:
    """A descriptor of the plain file at a path, the way to which is ours.

    Raises:
        FileNotFoundError: there is none.
    """
    name = os.fspath(path)
    try:
        descriptor = os.open(name, flags | _FILE, _OWNERS_ALONE, dir_fd=directory)
    except OSError as error:
        _take_strange_for_absent(error, name)
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "it is no plain file", name)
    return descriptor


@contextlib.contextmanager
def directory_below(top: str | os.PathLike[str], name: str) -> Iterator[int]:
    """A descriptor of the directory of this name, for the length of a block.

    Raises:
        FileNotFoundError: there is none.
    """
    directory = _directory(top, name)
    try:
        yield directory
    finally:
        os.close(directory)


def status_below(top: str | os.PathLike[str], name: str) -> os.stat_result | None:
    """Size and times of the plain file of this name; None while there is none."""
    try:
        descriptor = open_below(top, name)
    except FileNotFoundError:
        return None
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def _directory(top: str | os.PathLike[str], name: str) -> int:
    directory = os.open(top, _TOP)
    for part in name.split("/") if name else ():
        try:
            below = os.open(part, _DIRECTORY, dir_fd=directory)
        except OSError as error:
            _take_strange_for_absent(error, name)
            raise
        finally:
            os.close(directory)
        directory = below
    return directory


def _take_strange_for_absent(error: OSError, name: str) -> None:
    if error.errno in _STRANGE:
        raise FileNotFoundError(errno.ENOENT, "it lies behind a link, or is no plain file of ours", name) from error

"""Opening and making single files and directories, without following links.

Opening a link, a pipe, a socket, a device, or a file in place of a directory fails as if nothing were there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator

PathLike = str | os.PathLike[str]

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
PRIVATE = 0o700
OWNERS_ALONE = 0o600

_TOP = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Without waiting: opening a pipe would block until somebody opens its other end, and opening a file on which its owner
has a lease (`F_SETLEASE`) until that is given up, 45 s by default."""
_STRANGE = frozenset(
    {
        errno.ELOOP,  # a link
        errno.ENOTDIR,  # a file in place of a directory
        errno.EISDIR,
        errno.ENXIO,  # a pipe or a socket
        errno.ENODEV,
        errno.EACCES,  # something of another user
        errno.EPERM,
        errno.EAGAIN,  # a file with a lease
    }
)
"""What opening fails with when something else is there than a file that can be read at once."""


def open_below(top: PathLike, name: str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the plain file of this name, such as `nodes/0/exit.json`. The way to `top` itself is ours.

    Raises:
        FileNotFoundError: there is none.
    """
    way, last = split(name)
    with directory_below(top, way) as directory:
        return open_plain(last, flags, directory=directory)


def open_plain(path: PathLike, flags: int = os.O_RDONLY, *, directory: int | None = None) -> int:
    """A descriptor of the plain file at a path, the way to which is ours.

    Raises:
        FileNotFoundError: there is none.
    """
    name = os.fspath(path)
    try:
        descriptor = os.open(name, flags | _FILE, OWNERS_ALONE, dir_fd=directory)
    except OSError as error:
        take_strange_for_absent(error, name)
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "it is no plain file", name)
    return descriptor


def open_inside(directory: int, name: str) -> int:
    """A descriptor of a plain file below a directory, also by links, as long as these lead to a file below it.

    In a directory of another user's, the file has to be that user's: a hard link may lead to anybody's.

    Raises:
        FileNotFoundError: there is none.
    """
    return _open_real(name, [os.readlink(by_descriptor(directory))], directory=directory)


def open_real(path: PathLike, within: Iterable[PathLike]) -> int:
    """A descriptor of the plain file that a path leads to, also by links, where it lies below one of these directories.

    Raises:
        FileNotFoundError: there is none.
    """
    return _open_real(os.fspath(path), [os.path.realpath(each) for each in within])


def _open_real(name: str, within: Iterable[str], *, directory: int | None = None) -> int:
    absent = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    try:
        # A handle only: opening a device, to which a link may lead, does something.
        handle = os.open(name, os.O_PATH | os.O_CLOEXEC, dir_fd=directory)
    except (OSError, ValueError):
        raise absent from None
    try:
        status = os.fstat(handle)
        # Where the file is now, by the handle: its name may lead elsewhere a moment later.
        real = os.readlink(by_descriptor(handle))
        is_inside = any(real.startswith(f"{each.rstrip(os.sep)}{os.sep}") for each in within)
        is_theirs = directory is None or is_own(status, os.fstat(directory))
        if is_inside and is_theirs and stat.S_ISREG(status.st_mode):
            return os.open(by_descriptor(handle), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        pass
    finally:
        os.close(handle)
    raise absent


@contextlib.contextmanager
def directory_below(top: PathLike, name: str = "") -> Iterator[int]:
    """A descriptor of the directory of this name, for the length of a block.

    Raises:
        FileNotFoundError: there is none.
    """
    directory = os.open(top, _TOP)
    try:
        for part in parts(name):
            inner = open_directory(directory, part)
            os.close(directory)
            directory = inner
        yield directory
    finally:
        os.close(directory)


def status_below(top: PathLike, name: str) -> os.stat_result | None:
    """Size and times of the plain file of this name; None while there is none."""
    try:
        descriptor = open_below(top, name)
    except FileNotFoundError:
        return None
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def exists(top: PathLike, name: str) -> bool:
    """Whether there is anything of this name, a broken link included."""
    way, last = split(name)
    try:
        with directory_below(top, way) as directory:
            os.stat(last, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def make_directories(top: PathLike, name: str) -> None:
    """Make a directory, and those on the way, open to their owner alone; those that are there stay as they are.

    Raises:
        FileExistsError: a link or a file is on the way.
    """
    directory = os.open(top, _TOP)
    try:
        for part in parts(name):
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, PRIVATE, dir_fd=directory)
            try:
                inner = open_directory(directory, part)
            except FileNotFoundError:
                raise FileExistsError(errno.EEXIST, "there is something else than a directory", part) from None
            os.close(directory)
            directory = inner
    finally:
        os.close(directory)


def claim_directory(top: PathLike, name: str, *, mode: int) -> None:
    """Make a directory, unless it is there, and see that it is the server's own and has this mode."""
    make_directories(top, name)
    with directory_below(top, name) as directory:
        os.fchown(directory, os.geteuid(), -1)
        os.fchmod(directory, mode)


# For the other modules of this package.


def open_directory(directory: int, name: str) -> int:
    """A descriptor of a directory in a directory.

    Raises:
        FileNotFoundError: there is none.
    """
    try:
        return os.open(name, DIRECTORY, dir_fd=directory)
    except OSError as error:
        take_strange_for_absent(error, name)
        raise


def is_own(status: os.stat_result, directory: os.stat_result) -> bool:
    """Whether a file belongs in a directory: in one of another user's, only that user's files do."""
    return directory.st_uid in (os.geteuid(), status.st_uid)


def parts(name: str) -> list[str]:
    """The names that a relative path is made of."""
    found = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in found or name.startswith("/"):
        raise ValueError(f"{name!r} leads out of its directory")
    return found


def split(name: str) -> tuple[str, str]:
    """The way to something, and its own name."""
    *way, last = parts(name)
    return "/".join(way), last


def by_descriptor(descriptor: int) -> str:
    """A path of whatever is open there."""
    return f"/proc/self/fd/{descriptor}"


def take_strange_for_absent(error: OSError, name: str) -> None:
    """Raise FileNotFoundError in place of an error that says that something strange is there."""
    if error.errno in _STRANGE:
        raise FileNotFoundError(errno.ENOENT, "it lies behind a link, or is no plain file of ours", name) from error

"""Opening and making single files and directories without following links.

Opening a link, a pipe, a socket, a device, or a file in place of a directory fails with FileNotFoundError.
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
"""Non-blocking: opening a pipe would wait for its other end, and a file with a lease (`F_SETLEASE`) up to 45 s."""
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
"""Errors of opening something that is not a file which can be read at once."""


def open_below(top: PathLike, name: str, flags: int = os.O_RDONLY) -> int:
    """Open the regular file with this relative path, such as `nodes/0/exit.json`. The path to `top` is ours."""
    way, last = split(name)
    with directory_below(top, way) as directory:
        return open_plain(last, flags, directory=directory)


def open_plain(path: PathLike, flags: int = os.O_RDONLY, *, directory: int | None = None) -> int:
    """Open the regular file at a path; the directories above it are ours."""
    name = os.fspath(path)
    try:
        descriptor = os.open(name, flags | _FILE, OWNERS_ALONE, dir_fd=directory)
    except OSError as error:
        raise _absent_if_strange(error, name) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "it is no plain file", name)
    return descriptor


def open_inside(directory: int, name: str) -> int:
    """Open a regular file below a directory, also through links that lead to a file below it.

    In another user's directory, the file must belong to that user: a hard link may lead to anybody's.
    """
    return _open_real(name, [os.readlink(by_descriptor(directory))], directory=directory)


def open_real(path: PathLike, within: Iterable[PathLike]) -> int:
    """Open the regular file that a path leads to, also through links, if it lies below one of these directories."""
    return _open_real(os.fspath(path), [os.path.realpath(each) for each in within])


def _open_real(name: str, within: Iterable[str], *, directory: int | None = None) -> int:
    absent = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    try:
        # O_PATH: opening a device, to which a link may lead, has side effects.
        handle = os.open(name, os.O_PATH | os.O_CLOEXEC, dir_fd=directory)
    except (OSError, ValueError):
        raise absent from None
    try:
        status = os.fstat(handle)
        # The real path of the open file: its name may lead elsewhere a moment later.
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
    """A descriptor of the directory with this relative path, for the length of the block."""
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
    """The status of the regular file with this path, or None."""
    with contextlib.suppress(FileNotFoundError), closing(open_below(top, name)) as descriptor:
        return os.fstat(descriptor)
    return None


def exists(top: PathLike, name: str) -> bool:
    """Whether anything has this name, a broken link included."""
    way, last = split(name)
    try:
        with directory_below(top, way) as directory:
            os.stat(last, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def make_directories(top: PathLike, name: str) -> None:
    """Make a directory and its parents with mode 0700; existing ones stay. Raises FileExistsError for anything else."""
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
    """Make a directory, unless it exists, and make it the server's own with this mode."""
    make_directories(top, name)
    with directory_below(top, name) as directory:
        os.fchown(directory, os.geteuid(), -1)
        os.fchmod(directory, mode)


@contextlib.contextmanager
def closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


# For the other modules of this package.


def open_directory(directory: int, name: str) -> int:
    try:
        return os.open(name, DIRECTORY, dir_fd=directory)
    except OSError as error:
        raise _absent_if_strange(error, name) from None


def is_own(status: os.stat_result, directory: os.stat_result) -> bool:
    """Whether a file belongs in a directory: in another user's directory, only that user's files do."""
    return directory.st_uid in (os.geteuid(), status.st_uid)


def parts(name: str) -> list[str]:
    found = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in found or name.startswith("/"):
        raise ValueError(f"{name!r} leads out of its directory")
    return found


def split(name: str) -> tuple[str, str]:
    """A path as its directory and its last name."""
    *way, last = parts(name)
    return "/".join(way), last


def by_descriptor(descriptor: int) -> str:
    """A path to an open file."""
    return f"/proc/self/fd/{descriptor}"


def _absent_if_strange(error: OSError, name: str) -> OSError:
    """FileNotFoundError instead of an error that means that something strange is there."""
    if error.errno not in _STRANGE:
        return error
    return FileNotFoundError(errno.ENOENT, "it is behind a link, or is no plain file of ours", name)

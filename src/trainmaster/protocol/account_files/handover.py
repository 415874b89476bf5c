"""The system users that jobs run as, and directories that the server fills and hands over to them."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from trainmaster.protocol.account_files.safe_open import (
    OWNERS_ALONE,
    PRIVATE,
    PathLike,
    by_descriptor,
    closing,
    directory_below,
    is_own,
    make_directories,
    open_directory,
    open_plain,
    parts,
    split,
)

_SEARCH_ONLY = 0o711
_NOBODYS_GROUP = 65534
"""For a uid without a passwd entry: a group with the same number may be somebody else's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    name: str | None = None
    attempt_group: int | None = None
    """One of `groups`: the attempt's own, which owns its streams; None if it has none."""
    home: str | None = None
    """None if the directory does not exist."""

    @staticmethod
    def of(uid: int) -> User:
        """The user with this uid, whether or not it has a passwd entry."""
        try:
            entry = pwd.getpwuid(uid)
        except KeyError:
            return User(uid=uid, gid=_NOBODYS_GROUP)
        return User(
            uid=uid,
            gid=entry.pw_gid,
            groups=tuple(os.getgrouplist(entry.pw_name, entry.pw_gid)),
            name=entry.pw_name,
            home=entry.pw_dir if os.path.isdir(entry.pw_dir) else None,
        )

    def variables(self, working_directory: str) -> dict[str, str]:
        """What a login would set."""
        name = self.name or str(self.uid)
        return {"HOME": self.home or working_directory, "USER": name, "LOGNAME": name}


MOST_DEPTH = 64
"""Of a tree that is linked or sealed."""
_COPY_BYTES = 16 << 20


class UnsafeFileError(ValueError):
    """A tree contains something else than regular files of its owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserDirectoryBuilder:
    """Makes directories for a user, in a place where nobody else can write; the caller moves the result from there."""

    user: User | None
    """The new owner; None: the server."""
    tick: Callable[[], None] = lambda: None
    """Called repeatedly during long operations."""

    def lay_out(self, top: PathLike, name: str, files: Mapping[str, PathLike], *, link: bool) -> None:
        """Make a directory with these files of the server's (path in the directory -> source)."""
        make_directories(top, name)
        made = {PurePosixPath(name)}
        for path, content in files.items():
            way, last = split(f"{name}/{path}")
            make_directories(top, way)
            made.update((parent := PurePosixPath(way), *parent.parents))
            source = os.open(content, os.O_RDONLY | os.O_CLOEXEC)
            with closing(source), directory_below(top, way) as directory:
                self._put(source, directory, last, link=link)
        # Bottom up: a directory changes hands when nothing is left to do in it.
        for each in sorted(made, key=lambda each: len(each.parts), reverse=True):
            if each.is_relative_to(name):
                with directory_below(top, str(each)) as directory:
                    self._give(directory)

    def link_tree(self, top: PathLike, name: str, new_name: str) -> int:
        """Make a directory with the files of another one, linked where possible; returns their size in bytes."""
        make_directories(top, new_name)
        with directory_below(top, name) as source, directory_below(top, new_name) as target:
            return self._link_tree(source, target, os.fstat(source), MOST_DEPTH)

    def _link_tree(self, source: int, target: int, owner: os.stat_result, depth: int) -> int:
        if not depth:
            raise UnsafeFileError(f"directories that are more than {MOST_DEPTH} deep")
        size = 0
        with os.scandir(source) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    size += self._link_directory(source, target, entry.name, owner, depth)
                else:
                    size += self._link_file(source, target, entry.name, owner)
                self.tick()
        self._give(target)
        return size

    def _link_directory(self, source: int, target: int, name: str, owner: os.stat_result, depth: int) -> int:
        with closing(open_directory(source, name)) as inner:
            os.mkdir(name, PRIVATE, dir_fd=target)
            with closing(open_directory(target, name)) as made:
                return self._link_tree(inner, made, owner, depth - 1)

    def _link_file(self, source: int, target: int, name: str, owner: os.stat_result) -> int:
        try:
            descriptor = open_plain(name, directory=source)
        except FileNotFoundError:
            raise UnsafeFileError(f"{name!r}, which is no plain file") from None
        with closing(descriptor):
            status = os.fstat(descriptor)
            if not is_own(status, owner):
                raise UnsafeFileError(f"{name!r}, which is a file of another user")
            # A link keeps owner and mode: it would give the user somebody else's file, perhaps a setuid program.
            self._put(descriptor, target, name, link=self.user is None or status.st_uid == self.user.uid)
        return status.st_size

    def _put(self, source: int, directory: int, name: str, *, link: bool) -> None:
        if link:
            # By descriptor: the name may lead to another file by now.
            with contextlib.suppress(OSError):  # another file system, one without links, or too many of them
                os.link(by_descriptor(source), name, dst_dir_fd=directory, follow_symlinks=True)
                return
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with closing(os.open(name, flags, OWNERS_ALONE, dir_fd=directory)) as target:
            self._copy(source, target)
            os.fsync(target)
            self._give(target)

    def _copy(self, source: int, target: int) -> None:
        """Copy the current content, but not the holes: a sparse file of any size takes no space."""
        size = os.fstat(source).st_size
        os.ftruncate(target, size)
        start = 0
        while (start := _data_from(source, start, size)) < size:
            end = min(os.lseek(source, start, os.SEEK_HOLE), size)
            while start < end:
                piece = memoryview(os.pread(source, min(_COPY_BYTES, end - start), start))
                if not piece:
                    raise OSError(errno.EIO, "the file became shorter while it was copied")
                while piece:
                    written = os.pwrite(target, piece, start)
                    piece, start = piece[written:], start + written
                self.tick()

    def _give(self, descriptor: int) -> None:
        if self.user is not None:
            os.fchown(descriptor, self.user.uid, self.user.gid)


def make_directories_for(user: User | None, top: PathLike, home: str, below: str = "") -> None:
    """Make a user's directory, and others below it; the user passes through the directory above `home`, which is ours.

    Without a user, all of them are ours alone.
    """
    make_directories(top, f"{home}/{below}")
    if user is None:
        return
    with directory_below(top, split(home)[0]) as above:
        os.fchmod(above, _SEARCH_ONLY)
    name = home
    for part in ("", *parts(below)):
        name = f"{name}/{part}" if part else name
        with directory_below(top, name) as directory:
            if os.fstat(directory).st_uid == os.geteuid():
                os.fchown(directory, user.uid, user.gid)


def give_file(descriptor: int, user: User | None) -> None:
    """Give an open file, whose name only the server can use, to a user."""
    if user is not None:
        os.fchown(descriptor, user.uid, user.gid)


def seal_tree(top: PathLike, name: str, user: User | None) -> None:
    """Give a tree, in a place where nobody else can write, to a user, and flush its directories to disk."""
    with directory_below(top, name) as directory:
        _seal(directory, user, MOST_DEPTH)


def _seal(directory: int, user: User | None, depth: int) -> None:
    if not depth:
        raise UnsafeFileError(f"directories that are more than {MOST_DEPTH} deep")
    with os.scandir(directory) as entries:
        names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_directory in names:
        opened = open_directory(directory, name) if is_directory else open_plain(name, directory=directory)
        with closing(opened) as inner:
            if is_directory:
                _seal(inner, user, depth - 1)
            else:
                give_file(inner, user)
    os.fsync(directory)
    give_file(directory, user)


def _data_from(descriptor: int, offset: int, size: int) -> int:
    """Where data starts from an offset on; `size` if there is only a hole."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return size
        raise

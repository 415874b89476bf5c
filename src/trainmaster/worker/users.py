"""The system user that a job's processes run as, if it is not the worker's own.

Files and directories are given to the user while they lie in a directory of ours, where nobody can replace them.
Inside the user's own directories, the worker acts as that user: a link that leads elsewhere leads nowhere further.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from trainmaster.protocol.account_files import User, closing
from trainmaster.protocol.run_directory import SEARCH_ONLY
from trainmaster.worker.processes import keeping_death_signal

PRIVATE_UMASK = 0o077
"""Ranks of different users share directories that all may write to, such as /tmp."""

_ROOT = 0
_OF_A_SESSION = frozenset({"DBUS_SESSION_BUS_ADDRESS", "KRB5CCNAME", "MAIL", "SHELL", "SSH_AGENT_PID", "SSH_AUTH_SOCK"})
_PREFIXES_OF_A_SESSION = ("SUDO_", "XDG_")


class CannotBecomeError(Exception):
    """The worker cannot start processes as the user whom its request names."""


def user_of(uid: int | None, attempt_group: int | None = None) -> User | None:
    """The user to become, in the group of an attempt; None if it is the worker's own. Only root can become another."""
    if uid is None:
        return None
    if uid == _ROOT:
        raise CannotBecomeError("a job must not run as root by its account's uid")
    own = os.geteuid()
    if uid == own:
        return None
    if own != _ROOT:
        raise CannotBecomeError(f"the worker runs as uid {own} and cannot start processes as uid {uid}")
    user = User.of(uid)
    if attempt_group is None:
        return user
    return replace(user, groups=(*user.groups, attempt_group), attempt_group=attempt_group)


def without_session(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables without those of the login session that started us."""
    return {
        name: value
        for name, value in variables.items()
        if name not in _OF_A_SESSION and not name.startswith(_PREFIXES_OF_A_SESSION)
    }


@contextlib.contextmanager
def acting_as(user: User | None) -> Iterator[None]:
    """Open and change files with this user's rights. For a process with one thread."""
    if user is None:
        yield
        return
    gid, groups = os.getegid(), os.getgroups()
    with keeping_death_signal():
        os.setgroups(user.groups)
        os.setegid(user.gid)
        os.seteuid(user.uid)
        try:
            yield
        finally:
            os.seteuid(_ROOT)
            os.setegid(gid)
            os.setgroups(groups)


def give_directory(path: str | os.PathLike[str], user: User | None) -> None:
    """Make a directory with mode 0700, unless it exists, and give it to the user. Others pass through its parent."""
    parent = Path(path).parent
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if user is None:
        Path(path).mkdir(mode=0o700, exist_ok=True)
        return
    if user.attempt_group is None or parent.stat().st_gid != user.attempt_group:
        parent.chmod(SEARCH_ONLY)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    with closing(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)) as descriptor:
        os.fchown(descriptor, user.uid, user.gid)
        os.fchmod(descriptor, 0o700)


def open_own(path: str, user: User | None, flags: int = os.O_APPEND) -> int:
    """Open a file in a directory of ours for writing; only the user may use it.

    With the group of an attempt, only that group: another process of the same user could open the user's own files.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    if user is not None:
        try:
            if user.attempt_group is None:
                os.fchown(descriptor, user.uid, user.gid)
            else:
                os.fchown(descriptor, _ROOT, user.attempt_group)
                os.fchmod(descriptor, 0o660)
        except OSError:
            os.close(descriptor)
            raise
    return descriptor


def first_untraversable(path: str, user: User | None) -> str | None:
    """The first directory on the path that the user may not pass through, or None."""
    with acting_as(user):
        for directory in (*reversed(Path(path).parents), Path(path)):
            if not os.access(directory, os.X_OK, effective_ids=True):
                return os.fspath(directory)
    return None

"""The system's users as whom the processes of jobs run."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass

_NOBODYS_GROUP = 65534
"""For a user without an entry in the system's list: a group of the same number may be somebody else's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A user of this machine."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    name: str | None = None
    attempt_group: int | None = None
    """One of `groups`: that of an attempt, to which its streams belong; None where it has none."""
    home: str | None = None
    """None where there is no such directory."""

    @staticmethod
    def of(uid: int) -> User:
        """The user of a number, whether or not the system's list has it."""
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

"""Users of this machine, by their numbers."""

from __future__ import annotations

import os
import pwd

from trainmaster.protocol.account_files import User


def test_user_of_the_systems_list_has_its_groups_and_home() -> None:
    entry = pwd.getpwuid(os.getuid())
    user = User.of(entry.pw_uid)
    assert (user.uid, user.gid, user.name) == (entry.pw_uid, entry.pw_gid, entry.pw_name)
    assert set(user.groups) == set(os.getgrouplist(entry.pw_name, entry.pw_gid))
    home = user.variables("/work")["HOME"]
    assert home == (entry.pw_dir if os.path.isdir(entry.pw_dir) else "/work")


def test_user_whom_nobody_knows_has_nobodys_group() -> None:
    unknown = max(entry.pw_uid for entry in pwd.getpwall()) + 4711
    user = User.of(unknown)
    assert (user.uid, user.gid, user.groups, user.name) == (unknown, 65534, (), None)
    assert user.variables("/work") == {"HOME": "/work", "USER": str(unknown), "LOGNAME": str(unknown)}

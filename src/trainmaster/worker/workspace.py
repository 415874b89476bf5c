"""`/workspace/dataset` and `/workspace/model`: where programs for Kubeflow look for what was fetched for them.

A worker that may do so makes them for its ranks alone, in a mount namespace of its own. In a container they are mounted
there already. Where they cannot be made, words that name them are changed to name the real directories.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainmaster.protocol.environment import WORKSPACE
from trainmaster.protocol.users import User
from trainmaster.worker.users import give_directory

_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_REC, _MS_SLAVE = 0x1000, 0x4000, 0x80000
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """What ranks find below /workspace."""

    directories: Mapping[str, str] = field(default_factory=dict)
    """Path below /workspace -> the directory that it stands for; none where the path itself is there."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The same paths, and the variables that name those directories."""
    why_not: str = ""
    """Why it is not there."""

    def place(self, word: str) -> str:
        """A word in which a path below /workspace is replaced, where that is not there."""
        for path, directory in self.directories.items():
            named = f"{WORKSPACE}/{path}"
            if word == named or word.startswith(f"{named}/"):
                return directory + word[len(named) :]
        return word

    def advice(self, text: str) -> str | None:
        """What to say to a program that failed with this text, because it looked there."""
        for path, variable in self.variables.items():
            if path in self.directories and f"{WORKSPACE}/{path}" in text:
                return f"{WORKSPACE}/{path} is not there ({self.why_not}); read os.environ[{variable!r}] instead"
        return None


NO_WORKSPACE = Workspace()
"""Nothing is to be changed: all is there, or nothing was fetched."""


def make_workspace(home: Path, prepared: Mapping[str, str], places: Mapping[str, str], user: User | None) -> Workspace:
    """Make /workspace for this process and all that it starts, if it may.

    Args:
        home: the node's part of the run directory.
        prepared: variable -> path below /workspace.
        places: path below /workspace -> the directory that it stands for.
        user: as whom the ranks run; None: as the worker.
    """
    if all(os.path.isdir(f"{WORKSPACE}/{path}") and _is_same(path, place) for path, place in places.items()):
        return NO_WORKSPACE
    why_not = _link(home / "workspace", places, user)
    if why_not is None:
        return NO_WORKSPACE
    # What is there of the machine's own, or is a volume of the job, is what is meant.
    missing = {path: place for path, place in places.items() if not os.path.lexists(f"{WORKSPACE}/{path}")}
    return Workspace(directories=missing, variables={path: name for name, path in prepared.items()}, why_not=why_not)


def _is_same(path: str, place: str) -> bool:
    return os.path.isdir(place) and os.path.samefile(f"{WORKSPACE}/{path}", place)


def _link(own: Path, places: Mapping[str, str], user: User | None) -> str | None:
    """Mount a directory of links at /workspace; why that cannot be, if it cannot."""
    if os.geteuid() != 0:
        return "the worker may mount nothing"
    try:
        if os.path.lexists(WORKSPACE):
            if not os.path.isdir(WORKSPACE) or os.path.islink(WORKSPACE) or os.listdir(WORKSPACE):
                return f"this machine has a {WORKSPACE} of its own"
        else:
            os.mkdir(WORKSPACE, 0o755)  # it stays, and is empty for everybody else
        own.mkdir(mode=0o700)
        for path, place in places.items():
            (own / path).symlink_to(place)
        give_directory(own, user)
        _call("unshare", ctypes.c_int(_CLONE_NEWNS))
        # What is mounted on the machine later comes here too; what is mounted here stays here.
        _mount("none", "/", _MS_REC | _MS_SLAVE)
        _mount(os.fspath(own), WORKSPACE, _MS_BIND)
    except OSError as error:
        return f"the worker cannot mount it: {error.strerror}"
    return None


def _mount(source: str, target: str, flags: int) -> None:
    _call("mount", os.fsencode(source), os.fsencode(target), None, ctypes.c_ulong(flags), None)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

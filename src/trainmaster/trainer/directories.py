"""The files of a directory that go along with a job: what git would keep, or all but well-known caches."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from trainmaster.sdk.shipping import LEFT_OUT, MAX_FILES


def files_of(directory: Path) -> list[str]:
    """The files to ship, relative to the directory, sorted.

    In a work tree of git: what is tracked, and what is neither tracked nor ignored. Elsewhere, or without git, all but
    caches and environments.

    Raises:
        ValueError: there is no such directory, nothing in it, or too much.
    """
    if not directory.is_dir():
        raise ValueError(f"there is no directory {directory}")
    kept = _of_git(directory)
    found = sorted(_of_disk(directory) if kept is None else kept)
    if not found:
        raise ValueError(f"there is nothing in {directory} to send along")
    if len(found) > MAX_FILES:
        raise ValueError(f"{directory} has {len(found)} files; at most {MAX_FILES} go along with a job")
    return found


def _of_git(directory: Path) -> list[str] | None:
    """None where git has no say."""
    command = ["git", "-C", str(directory), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(command, capture_output=True, check=False, env=environment)
    except OSError:
        return None
    if done.returncode != 0:
        return None
    names = {os.fsdecode(name) for name in done.stdout.split(b"\0") if name}
    # What was deleted and is still tracked is not there; a submodule is a directory.
    return [name for name in names if (directory / name).is_file()]


def _of_disk(directory: Path) -> list[str]:
    found: list[str] = []
    for parent, directories, names in os.walk(directory):
        directories[:] = [
            name for name in directories if name not in LEFT_OUT and not Path(parent, name, "pyvenv.cfg").exists()
        ]
        found += [
            Path(parent, name).relative_to(directory).as_posix() for name in names if Path(parent, name).is_file()
        ]
    return found

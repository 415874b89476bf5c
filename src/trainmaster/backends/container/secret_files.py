"""Handing secrets to a container: in a file that lies in memory, and is gone when the worker has read it.

The environment of a container can be looked at by whoever may ask the engine, and is kept on disk.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from trainmaster.backends.base import LaunchError
from trainmaster.backends.container.container_spec import SECRETS_FILE
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.secrets import Secrets

_IN_MEMORY = ("tmpfs", "ramfs")


def secrets_directory() -> Path:
    """Where secrets of containers lie: a directory of this user's own on a file system in memory.

    Raises:
        LaunchError: there is no such file system.
    """
    places = ("/dev/shm", os.environ.get("XDG_RUNTIME_DIR"), "/run")
    for place in filter(None, places):
        if _kind_of(place) in _IN_MEMORY and os.access(place, os.W_OK):
            directory = Path(place) / f"trainmaster-{os.geteuid()}"
            directory.mkdir(mode=0o700, exist_ok=True)
            status = directory.lstat()
            if status.st_uid != os.geteuid() or not directory.is_dir() or directory.is_symlink():
                raise LaunchError(f"{directory} is somebody else's; remove it", Reason.LAUNCH_REFUSED)
            return directory
    raise LaunchError(
        "there is no file system in memory (such as /dev/shm) to hand secrets to containers by", Reason.LAUNCH_REFUSED
    )


def put_secrets(directory: Path, secrets: Secrets) -> None:
    """Lay secrets down for a container."""
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / SECRETS_FILE
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(secrets.to_json(), file)


def remove_secrets(directory: Path) -> None:
    """Remove what was laid down for a container, read or not."""
    shutil.rmtree(directory, ignore_errors=True)


def _kind_of(path: str) -> str:
    """The kind of the file system that is mounted at a path; empty where none is."""
    found = ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, target, kind, *_ = line.split(" ")
        if target == path:
            found = kind
    return found

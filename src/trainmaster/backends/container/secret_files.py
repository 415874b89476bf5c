"""The secrets of a container, in a file on a file system in memory, which is removed when the worker has read it.

The environment of a container is visible to everybody who may ask the engine, and is kept on disk.
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
    """A directory of this user's own on a file system in memory; raises LaunchError if there is no such file system."""
    places = ("/dev/shm", os.environ.get("XDG_RUNTIME_DIR"), "/run")
    mounts = (line.split(" ") for line in Path("/proc/self/mounts").read_text().splitlines())
    kinds = {target: kind for _, target, kind, *_ in mounts}
    for place in filter(None, places):
        if kinds.get(place) in _IN_MEMORY and os.access(place, os.W_OK):
            directory = Path(place) / f"trainmaster-{os.geteuid()}"
            directory.mkdir(mode=0o700, exist_ok=True)
            if directory.lstat().st_uid != os.geteuid() or not directory.is_dir() or directory.is_symlink():
                raise LaunchError(f"{directory} is somebody else's; remove it", Reason.LAUNCH_REFUSED)
            return directory
    raise LaunchError(
        "there is no file system in memory (such as /dev/shm) to hand secrets to containers by", Reason.LAUNCH_REFUSED
    )


def put_secrets(directory: Path, secrets: Secrets) -> None:
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / SECRETS_FILE
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(secrets.to_json(), file)


def remove_secrets(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)

"""The worker and its secrets, as files that containers have mounted.

The worker is one file: a zip archive of this package that any Python of 3.11 or newer runs, made once for each version
of the sources. Python code in a container finds `trainmaster` in it, too: a job can report and save in any image.

Secrets are in a file on a file system in memory, which is removed when the worker has read it. The environment of a
container is visible to everybody who may ask the engine, and is kept on disk.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import trainmaster
from trainmaster.backends.base import LaunchError
from trainmaster.backends.container.container_spec import SECRETS_FILE
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.secrets import Secrets

OLDEST_PYTHON = (3, 11)

_MAIN = b"""import sys

from trainmaster.worker.__main__ import main

sys.exit(main())
"""


def packed_worker(directory: Path) -> Path:
    """The worker's archive below a directory, made if necessary."""
    path = directory / f"worker-{_digest()}.pyz"
    if not path.exists():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = directory / f".{path.name}.{os.getpid()}.{threading.get_ident()}"
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("__main__.py", _MAIN)
            for source in _sources():
                archive.write(source, f"trainmaster/{source.relative_to(_root())}")
        draft.chmod(0o644)  # ranks may run as others
        os.replace(draft, path)
        for other in directory.glob("worker-*.pyz"):
            if other != path:
                other.unlink(missing_ok=True)  # containers that have it mounted go on to see it
    return path


@functools.cache
def _digest() -> str:
    digest = hashlib.sha256(_MAIN)
    for source in _sources():
        digest.update(f"{source.relative_to(_root())}\0".encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _root() -> Path:
    return Path(trainmaster.__file__).parent


def _sources() -> Iterator[Path]:
    for source in sorted(_root().rglob("*")):
        if source.is_file() and "__pycache__" not in source.parts:
            yield source


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

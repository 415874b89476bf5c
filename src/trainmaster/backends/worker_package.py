"""The worker as one file: a zip archive of this package, which any Python of 3.11 or newer runs.

It is made once for each version of the sources, and has the same bytes wherever it is made. Python code beside it finds
`trainmaster` in it, too: a job can report and save in any image and on any node.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import trainmaster

OLDEST_PYTHON = (3, 11)

_MAIN = b"""import sys

from trainmaster.worker.__main__ import main

sys.exit(main())
"""
_MADE_AT = (2000, 1, 1, 0, 0, 0)


def packed_worker(directory: Path) -> Path:
    """The worker's archive below a directory, made if necessary."""
    path = directory / f"worker-{_digest()}.pyz"
    if not path.exists():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = directory / f".{path.name}.{os.getpid()}.{threading.get_ident()}"
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr(zipfile.ZipInfo("__main__.py", _MADE_AT), _MAIN)
            for source in _sources():
                name = f"trainmaster/{source.relative_to(_root())}"
                archive.writestr(zipfile.ZipInfo(name, _MADE_AT), source.read_bytes())
        draft.chmod(0o644)  # ranks may run as others
        os.replace(draft, path)
        for other in directory.glob("worker-*.pyz"):
            if other != path:
                other.unlink(missing_ok=True)  # containers that have it mounted go on to see it
    return path


def package_digest(package: Path) -> str:
    """Identifies the bytes of an archive."""
    return hashlib.sha256(package.read_bytes()).hexdigest()[:16]


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

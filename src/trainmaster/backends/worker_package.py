"""The worker as one file: a zip archive of this package, which any Python of 3.11 or newer runs.

It is made once for each version of the sources. Its last bytes, the archive's comment, identify these sources and
check all bytes before. Python code beside it finds `trainmaster` in it, too: a job can report and save in any image and
on any node.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import marshal
import os
import sys
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
_COMPILED = ("__init__.py", "protocol/", "worker/")
"""What starting a worker imports: compiled already for a Python of the server's version, others read the sources."""
_DIGEST_CHARACTERS = 16
_UNCHECKED_HASH = 0b01
"""Of a compiled module: it belongs to its source, whatever time or content that has."""


def packed_worker(directory: Path) -> Path:
    """The worker's archive below a directory, made if necessary."""
    path = directory / f"worker-{package_digest()}-{sys.implementation.cache_tag}.pyz"
    if not path.exists():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = directory / f".{path.name}.{os.getpid()}.{threading.get_ident()}"
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr(zipfile.ZipInfo("__main__.py", _MADE_AT), _MAIN)
            for source in _sources():
                name, content = str(source.relative_to(_root())), source.read_bytes()
                archive.writestr(zipfile.ZipInfo(f"trainmaster/{name}", _MADE_AT), content)
                if name.endswith(".py") and name.startswith(_COMPILED):
                    archive.writestr(zipfile.ZipInfo(f"trainmaster/{name}c", _MADE_AT), _compiled(name, content))
            archive.comment = bytes(2 * _DIGEST_CHARACTERS)
        _sign(draft)
        draft.chmod(0o644)  # ranks may run as others
        os.replace(draft, path)
        for other in directory.glob("worker-*.pyz"):
            if other != path:
                other.unlink(missing_ok=True)  # containers that have it mounted go on to see it
    return path


@functools.cache
def package_digest() -> str:
    """Identifies the sources in the archive."""
    digest = hashlib.sha256(_MAIN)
    for source in _sources():
        digest.update(f"{source.relative_to(_root())}\0".encode() + source.read_bytes())
    return digest.hexdigest()[:_DIGEST_CHARACTERS]


def _sign(archive: Path) -> None:
    """Write the comment, by which `bootstrap` knows that the archive arrived as it was made."""
    data = archive.read_bytes()[: -2 * _DIGEST_CHARACTERS]
    check = hashlib.sha256(data).hexdigest()[:_DIGEST_CHARACTERS]
    archive.write_bytes(data + package_digest().encode() + check.encode())


def _compiled(name: str, source: bytes) -> bytes:
    # By the name, its traceback shows the source in the archive, and nobody the directories of the server.
    code = compile(source, f"trainmaster/{name}", "exec", dont_inherit=True)
    flags = _UNCHECKED_HASH.to_bytes(4, "little")
    return importlib.util.MAGIC_NUMBER + flags + importlib.util.source_hash(source) + marshal.dumps(code)


def _root() -> Path:
    return Path(trainmaster.__file__).parent


def _sources() -> Iterator[Path]:
    for source in sorted(_root().rglob("*")):
        if source.is_file() and "__pycache__" not in source.parts:
            yield source

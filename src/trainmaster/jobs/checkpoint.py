"""Checkpoints: their manifest, and the drafts, locked while written, that `roots` commits."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from trainmaster.protocol.account_files import closing

MANIFEST = "manifest.json"
"""Written last into a checkpoint; no other file at its top may have this name."""
MAX_MANIFEST_BYTES = 64 << 20
"""A larger file is no manifest of ours, and is not read to its end."""

DRAFT_PREFIX = ".draft-"
REMOVED_PREFIX = ".removed-"
"""Names with these prefixes are not checkpoints yet, or no longer."""
_DRAFT = re.compile(re.escape(DRAFT_PREFIX) + r"(?P<job>.+)\.(?P<attempt>\d+)-[0-9a-f]+")

THREADS = 8
"""For digests and flushes of several files; more threads than this gain nothing on one disk."""

_CHUNK = 1 << 20


class CorruptCheckpointError(RuntimeError):
    """A file of the checkpoint is missing or differs from what was committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFile:
    path: str
    """Relative to the checkpoint, with forward slashes."""
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    checkpoint_id: str
    job_id: str
    attempt: int
    step: int
    epoch: float | None
    metrics: Mapping[str, float]
    world_size: int
    created_at: float
    kind: str = ""
    """What wrote it, such as a trainer's name or `job_class`; empty for a script."""
    framework: str = ""
    """The library of its arrays: `torch`, `jax` or `numpy`; empty if unknown."""
    name: str = ""
    """The user's name for it, if any."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """JSON values that the server stores with a named checkpoint."""
    saved_as: str = ""
    """The last part of the path that it was saved to; its directory has another name if an earlier save took that."""
    generation: int = 0
    """Counts the saves to that path; the path means the save with the highest."""
    data: str = ""
    """On an object store, the subdirectory that holds its files; empty where they are beside the manifest."""
    files: tuple[ManifestFile, ...] = ()
    version: int = 1

    def file(self, path: str) -> ManifestFile:
        """Raises FileNotFoundError if the checkpoint has no such file."""
        if (found := next((file for file in self.files if file.path == path), None)) is not None:
            return found
        raise FileNotFoundError(f"the checkpoint {self.checkpoint_id} has no file {path}")

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), allow_nan=False, indent=1).encode()

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Manifest:
        """Read a manifest, without what a newer version added; ValueError, KeyError or TypeError if it is none."""
        known = {name: document[name] for name in Manifest.__dataclass_fields__ if name in document}
        known["files"] = tuple(
            ManifestFile(path=_inner(file["path"]), size=int(file["size"]), sha256=str(file["sha256"]))
            for file in document["files"]
        )
        if known.get("data"):
            _inner(known["data"])
        return Manifest(**known)

    @staticmethod
    def from_bytes(data: bytes, where: str) -> Manifest:
        """Read a stored manifest; raises CorruptCheckpointError if this is none. `where` is for the message."""
        try:
            return Manifest.from_json(json.loads(data))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(f"{where}: no manifest ({type(error).__name__}: {error})") from error


def read_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_MANIFEST_BYTES)
    except OSError as error:
        raise CorruptCheckpointError(f"{path}: {error.strerror}") from error
    return Manifest.from_bytes(data, str(path))


def required(manifest: Manifest | None, where: str) -> Manifest:
    """Raise FileNotFoundError if there is no manifest at a place."""
    if manifest is None:
        raise FileNotFoundError(f"{where}: no checkpoint is committed there")
    return manifest


def committed(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory is a committed checkpoint, and not a draft or something else."""
    path = Path(directory)
    return not path.name.startswith((DRAFT_PREFIX, REMOVED_PREFIX)) and (path / MANIFEST).is_file()


def verify(directory: str | os.PathLike[str], *, on_bytes: Callable[[int], None] | None = None) -> Manifest:
    """Compare every file of a committed checkpoint with the manifest; CorruptCheckpointError names one that differs.

    `on_bytes` is called with the number of bytes read since the last call, from several threads.
    """
    path = Path(directory)
    manifest = read_manifest(path)
    with ThreadPoolExecutor(max_workers=THREADS) as pool:
        list(pool.map(lambda file: _compare(path / manifest.data, file, on_bytes), manifest.files))
    return manifest


def require_space(directory: Path, expected_bytes: int) -> None:
    """Raise OSError (ENOSPC) if a directory has less free space than this; the message says how much is missing."""
    free = shutil.disk_usage(directory).free
    if expected_bytes > free:
        raise OSError(
            errno.ENOSPC,
            f"No space left on device for a checkpoint: it takes {_size(expected_bytes)}, {_size(free)} are free, "
            f"{_size(expected_bytes - free)} are missing; nothing was written",
            str(directory),
        )


def save_name(job_id: str, attempt: int) -> str:
    return f"{job_id}.{attempt}-{os.urandom(4).hex()}"


@contextlib.contextmanager
def draft_directory(parent: Path, *, job_id: str, attempt: int, expected_bytes: int = 0) -> Iterator[Path]:
    """A new directory in `parent`, locked while the block lasts, and removed at its end unless it was renamed."""
    parent.mkdir(parents=True, exist_ok=True)
    # First: the disk may be full because of drafts that are removed here.
    _tidy(parent, job_id=job_id, attempt=attempt)
    require_space(parent, expected_bytes)
    directory, descriptor = _make_draft(parent, job_id, attempt)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(descriptor)


def _tidy(parent: Path, *, job_id: str, attempt: int) -> None:
    """Remove drafts that can never be committed: those of older attempts, and those whose writer is dead."""
    for entry in list(parent.iterdir()):
        if entry.name.startswith(REMOVED_PREFIX):
            shutil.rmtree(entry, ignore_errors=True)
        elif found := _DRAFT.fullmatch(entry.name):
            # An older attempt can never commit, dead or not.
            if found["job"] == job_id and int(found["attempt"]) < attempt:
                shutil.rmtree(entry, ignore_errors=True)
            else:
                remove_unless_locked(entry)


def _make_draft(parent: Path, job_id: str, attempt: int) -> tuple[Path, int]:
    while True:
        directory = parent / f"{DRAFT_PREFIX}{save_name(job_id, attempt)}"
        directory.mkdir()
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            if _try_lock(descriptor) is not False and directory.exists():
                return directory, descriptor
            os.close(descriptor)  # Another process tidied in between, and took it for a dead one's.


def remove_unless_locked(directory: Path) -> None:
    with contextlib.suppress(OSError), closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY)) as descriptor:
        if _try_lock(descriptor):
            shutil.rmtree(directory, ignore_errors=True)


def is_at(path: Path, descriptor: int) -> bool:
    """Whether the file or directory at a path is still the one that was opened."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False


def _try_lock(descriptor: int) -> bool | None:
    """Whether the lock was free; None where the file system cannot lock directories."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def describe(
    directory: Path, *, known_digests: Mapping[str, str] | None = None, flush: bool = True
) -> tuple[ManifestFile, ...]:
    """Sizes and digests of a draft's plain files (else ValueError), flushed if `flush`; known digests are believed."""
    files, directories = _contents(directory)
    known = known_digests or {}
    with ThreadPoolExecutor(max_workers=THREADS) as pool:
        described = tuple(pool.map(lambda file: _describe(directory, file, known, flush=flush), files))
    if flush:
        for inner in directories:
            flush_path(inner)
    return described


def _contents(directory: Path) -> tuple[list[Path], list[Path]]:
    """All files and directories below; each directory comes after those inside it."""
    files: list[Path] = []
    directories: list[Path] = []
    for parent, inner, names in os.walk(directory, topdown=False):
        directories += [Path(parent, name) for name in inner]
        files += [Path(parent, name) for name in names]
    if directory / MANIFEST in files:
        raise ValueError(f"{MANIFEST} is written by the commit itself: save under another name")
    for path in (*files, *directories):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path.relative_to(directory)} is no plain file: a checkpoint holds its own bytes")
    return sorted(files), directories


def _describe(directory: Path, path: Path, known: Mapping[str, str], *, flush: bool) -> ManifestFile:
    name = path.relative_to(directory).as_posix()
    with open(path, "rb") as file:
        if flush:
            os.fsync(file.fileno())
        digest = known.get(name) or hashlib.file_digest(file, "sha256").hexdigest()
        size = os.fstat(file.fileno()).st_size
    return ManifestFile(path=name, size=size, sha256=digest)


def _compare(directory: Path, expected: ManifestFile, on_bytes: Callable[[int], None] | None) -> None:
    path = directory / expected.path
    size, digest = 0, hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                size += len(chunk)
                digest.update(chunk)
                if on_bytes is not None:
                    on_bytes(len(chunk))
    except OSError as error:
        raise CorruptCheckpointError(f"{path}: {error.strerror}") from error
    require_same(str(path), expected, size, digest.hexdigest())


def require_same(where: str, expected: ManifestFile, size: int, sha256: str) -> None:
    if (size, sha256) != (expected.size, expected.sha256):
        raise CorruptCheckpointError(
            f"{where}: {size} bytes with digest {sha256[:12]}…, "
            f"but {expected.size} bytes with digest {expected.sha256[:12]}… were committed"
        )


def check_path(rel_path: str | os.PathLike[str], *, empty: bool = False) -> str:
    """Normalize a path below a root; ValueError if it leaves that, or has a part with a dot first, as drafts have."""
    text = os.fspath(rel_path)
    parts = PurePosixPath(text).parts
    wrong = text.startswith("/") or any(part.startswith(".") or not part.isprintable() for part in parts)
    if wrong or "\\" in text or not (parts or empty):
        raise ValueError(f"{text!r} is no path below a root: plain names joined by '/', none beginning with a dot")
    return "/".join(parts)


def _inner(path: str) -> str:
    """Check that a path stays inside the checkpoint: anybody may have written the manifest."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or "\0" in path or ".." in parts:
        raise ValueError(f"{path!r} is no path inside a checkpoint")
    return path


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 10**7 else f"{count} bytes"


def flush_path(path: str | Path) -> None:
    """Flush the bytes of a file, or the names in a directory, to disk."""
    with closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
        os.fsync(descriptor)


def flush_tree(directory: str | Path) -> None:
    """Flush a directory and all files in it to disk, without following links."""
    for parent, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(parent, name)
            if os.path.isfile(path) and not os.path.islink(path):
                flush_path(path)
        flush_path(parent)

"""The commit protocol of checkpoints: a draft beside the final place, sealed by a manifest, then renamed.

A directory counts as a checkpoint when it was renamed to its final name, never before. What is on disk
under a draft's name is worth nothing and is removed by a later attempt.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
"""Written last into a checkpoint; a file of this name at its top belongs to the protocol."""

_DRAFT = re.compile(r"\.draft-(?P<job>.+)\.(?P<attempt>\d+)-[0-9a-f]+")
_THREADS = 8
"""Digests and flushes of several files overlap; more threads than this gain nothing on one disk."""


class CorruptCheckpointError(RuntimeError):
    """A file of the checkpoint is missing or differs from what was committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFile:
    """One file of a checkpoint."""

    path: str
    """Relative to the checkpoint, with forward slashes."""
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds and where it comes from."""

    checkpoint_id: str
    job_id: str
    attempt: int
    step: int
    epoch: float | None
    metrics: Mapping[str, float]
    world_size: int
    created_at: float
    files: tuple[ManifestFile, ...] = ()
    version: int = 1

    @property
    def size_bytes(self) -> int:
        """Of all files together."""
        return sum(file.size for file in self.files)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Manifest:
        """The manifest of a plain form; what a newer writer added is ignored."""
        known = {name: document[name] for name in Manifest.__dataclass_fields__ if name in document}
        known["files"] = tuple(
            ManifestFile(path=file["path"], size=file["size"], sha256=file["sha256"]) for file in document["files"]
        )
        return Manifest(**known)


def committed(directory: str | os.PathLike[str]) -> bool:
    """Whether this is a committed checkpoint: neither a draft nor some other directory."""
    path = Path(directory)
    return not _DRAFT.fullmatch(path.name) and (path / MANIFEST).is_file()


def verify(directory: str | os.PathLike[str]) -> Manifest:
    """Read every file of a committed checkpoint and compare it with the manifest.

    Raises:
        CorruptCheckpointError: names the first file that is missing or differs.
    """
    path = Path(directory)
    try:
        manifest = Manifest.from_json(json.loads((path / MANIFEST).read_bytes()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"{path / MANIFEST}: {error}") from error
    with ThreadPoolExecutor(max_workers=_THREADS) as pool:
        for _ in pool.map(lambda file: _compare(path, file), manifest.files):
            pass
    return manifest


@contextlib.contextmanager
def draft(root: Path, *, job_id: str, attempt: int) -> Iterator[Path]:
    """A temporary directory beside the job's checkpoints. It is gone afterwards, unless it was published."""
    root.mkdir(parents=True, exist_ok=True)
    # First, because a draft that a full disk cut short is in the way of this one. An older attempt can
    # never commit any more, so that its drafts are of no use to anybody.
    _remove_older_drafts(root, job_id=job_id, attempt=attempt)
    directory = root / f".draft-{job_id}.{attempt}-{os.urandom(4).hex()}"
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def seal(directory: Path, manifest: Manifest) -> Manifest:
    """Flush all that a draft holds and write its manifest, with every file's size and digest, last.

    Raises:
        ValueError: the draft holds something that cannot be part of a checkpoint.
    """
    files, directories = _contents(directory)
    with ThreadPoolExecutor(max_workers=_THREADS) as pool:
        described = tuple(pool.map(lambda file: _describe(directory, file, flush=True), files))
    for inner in directories:
        _flush(inner)
    sealed = replace(manifest, files=described)
    with open(directory / MANIFEST, "xb") as target:
        target.write(json.dumps(asdict(sealed), allow_nan=False, indent=1).encode())
        target.flush()
        os.fsync(target.fileno())
    _flush(directory)
    return sealed


def publish(directory: Path, names: Iterable[str]) -> Path:
    """Rename a sealed draft to the first of `names` that is free, and make that last.

    Raises:
        FileExistsError: no name is free.
    """
    for name in names:
        target = directory.with_name(name)
        try:
            os.rename(directory, target)
        except OSError as error:
            # A committed checkpoint is never empty, so that the rename itself refuses to replace it.
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                continue
            raise
        _flush(target.parent)
        return target
    raise FileExistsError(f"no free name for a checkpoint in {directory.parent}")


def _remove_older_drafts(root: Path, *, job_id: str, attempt: int) -> None:
    for entry in root.iterdir():
        found = _DRAFT.fullmatch(entry.name)
        if found and found["job"] == job_id and int(found["attempt"]) < attempt:
            shutil.rmtree(entry, ignore_errors=True)


def _contents(directory: Path) -> tuple[list[Path], list[Path]]:
    """Every file and every directory below; each directory after those inside it."""
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


def _describe(directory: Path, path: Path, *, flush: bool = False) -> ManifestFile:
    with open(path, "rb") as file:
        if flush:
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = os.fstat(file.fileno()).st_size
    return ManifestFile(path=path.relative_to(directory).as_posix(), size=size, sha256=digest)


def _compare(directory: Path, expected: ManifestFile) -> None:
    path = directory / expected.path
    try:
        found = _describe(directory, path)
    except OSError as error:
        raise CorruptCheckpointError(f"{path}: {error.strerror}") from error
    if found != expected:
        raise CorruptCheckpointError(
            f"{path}: {found.size} bytes with digest {found.sha256[:12]}…, "
            f"but {expected.size} bytes with digest {expected.sha256[:12]}… were committed"
        )


def _flush(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

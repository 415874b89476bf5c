"""The commit protocol of checkpoints: a draft beside the final place, sealed by a manifest, then renamed.

A directory counts as a checkpoint when it was renamed to its final name, never before. What is on disk
under a draft's name is worth nothing (`drafts.py`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

MANIFEST = "manifest.json"
"""Written last into a checkpoint; a file of this name at its top belongs to the protocol."""
MAX_MANIFEST_BYTES = 64 << 20
"""More is no manifest of ours: nobody has to read it to the end."""

DRAFT_PREFIX = ".draft-"
REMOVED_PREFIX = ".removed-"
"""How the names of what is not a checkpoint yet, or no longer, begin."""

THREADS = 8
"""Digests, flushes and transfers of several files overlap; more threads than this gain nothing on one disk."""

_CHUNK = 1 << 20


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
    kind: str = ""
    """What made it, such as a trainer's name or a job class; empty for a script of its own."""
    framework: str = ""
    """What its arrays are of: `torch`, `jax`, `numpy`; empty when nobody said."""
    name: str = ""
    """What its user calls it; empty where users give no names."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """What else the server should know of one that has a name: plain values, as JSON has them."""
    saved_as: str = ""
    """The last part of the path that it was saved to; it lies under another name where an earlier save has that one."""
    generation: int = 0
    """Counts the saves to that path: the highest is the one that the path means."""
    data: str = ""
    """The directory of the checkpoint that its files lie in, on an object store; empty where they lie beside this."""
    files: tuple[ManifestFile, ...] = ()
    version: int = 1

    @property
    def size_bytes(self) -> int:
        """Of all files together."""
        return sum(file.size for file in self.files)

    def to_bytes(self) -> bytes:
        """As it is stored."""
        return json.dumps(asdict(self), allow_nan=False, indent=1).encode()

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Manifest:
        """The manifest of a plain form; what a newer writer added is ignored.

        Raises:
            ValueError, KeyError, TypeError: this is none, or it names files outside the checkpoint.
        """
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
        """The manifest as it is stored; `where` is for the message.

        Raises:
            CorruptCheckpointError: this is none.
        """
        try:
            return Manifest.from_json(json.loads(data))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(f"{where}: no manifest ({type(error).__name__}: {error})") from error


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a committed checkpoint.

    Raises:
        CorruptCheckpointError: it cannot be read.
    """
    path = directory / MANIFEST
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_MANIFEST_BYTES)
    except OSError as error:
        raise CorruptCheckpointError(f"{path}: {error.strerror}") from error
    return Manifest.from_bytes(data, str(path))


def committed(directory: str | os.PathLike[str]) -> bool:
    """Whether this is a committed checkpoint: neither a draft nor some other directory."""
    path = Path(directory)
    return not path.name.startswith((DRAFT_PREFIX, REMOVED_PREFIX)) and (path / MANIFEST).is_file()


def verify(directory: str | os.PathLike[str], *, on_bytes: Callable[[int], None] | None = None) -> Manifest:
    """Read every file of a committed checkpoint and compare it with the manifest.

    Args:
        directory: the checkpoint.
        on_bytes: told how many more bytes were read; from several threads.

    Raises:
        CorruptCheckpointError: names the first file that is missing or differs.
    """
    path = Path(directory)
    manifest = read_manifest(path)
    with ThreadPoolExecutor(max_workers=THREADS) as pool:
        for _ in pool.map(lambda file: _compare(path / manifest.data, file, on_bytes), manifest.files):
            pass
    return manifest


def require_space(directory: Path, expected_bytes: int) -> None:
    """Return when there is room for so many bytes.

    Raises:
        OSError: there is not; it says how much is missing.
    """
    free = shutil.disk_usage(directory).free
    if expected_bytes > free:
        raise OSError(
            errno.ENOSPC,
            f"No space left on device for a checkpoint: it takes {_size(expected_bytes)}, {_size(free)} are free, "
            f"{_size(expected_bytes - free)} are missing; nothing was written",
            str(directory),
        )


def describe(
    directory: Path, *, known_digests: Mapping[str, str] | None = None, flush: bool = True
) -> tuple[ManifestFile, ...]:
    """Size and digest of all that a draft holds, flushed to the disk unless `flush` is false.

    Args:
        directory: the draft.
        known_digests: by path, the SHA-256 of files that were hashed while they were written: not read again.
        flush: whether all of it has to be on the disk afterwards.

    Raises:
        ValueError: the draft holds something that cannot be part of a checkpoint.
    """
    files, directories = _contents(directory)
    known = known_digests or {}
    with ThreadPoolExecutor(max_workers=THREADS) as pool:
        described = tuple(pool.map(lambda file: _describe(directory, file, known, flush=flush), files))
    if flush:
        for inner in directories:
            flush_path(inner)
    return described


def seal(directory: Path, manifest: Manifest, *, known_digests: Mapping[str, str] | None = None) -> Manifest:
    """Flush all that a draft holds and write its manifest, with every file's size and digest, last.

    Raises:
        ValueError: the draft holds something that cannot be part of a checkpoint.
    """
    sealed = replace(manifest, files=describe(directory, known_digests=known_digests))
    with open(directory / MANIFEST, "xb") as target:
        target.write(sealed.to_bytes())
        target.flush()
        os.fsync(target.fileno())
    flush_path(directory)
    return sealed


def publish(directory: Path, target: Path) -> None:
    """Rename a sealed draft to its final name, and make that last.

    Raises:
        FileExistsError: something lies there already.
    """
    try:
        os.rename(directory, target)
    except OSError as error:
        # A committed checkpoint is never empty, so that the rename itself refuses to replace it.
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise FileExistsError(errno.EEXIST, "a checkpoint is never replaced", str(target)) from error
        raise
    flush_path(target.parent)


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
    """Return when a file is what was committed.

    Raises:
        CorruptCheckpointError: it is not.
    """
    if (size, sha256) != (expected.size, expected.sha256):
        raise CorruptCheckpointError(
            f"{where}: {size} bytes with digest {sha256[:12]}…, "
            f"but {expected.size} bytes with digest {expected.sha256[:12]}… were committed"
        )


def check_path(rel_path: str | os.PathLike[str], *, empty: bool = False) -> str:
    """A path below a root in its plain form.

    Raises:
        ValueError: it leaves the root, is no path, or has a part that begins with a dot: those are the protocol's.
    """
    text = os.fspath(rel_path)
    parts = PurePosixPath(text).parts
    wrong = text.startswith("/") or any(part.startswith(".") or not part.isprintable() for part in parts)
    if wrong or "\\" in text or not (parts or empty):
        raise ValueError(f"{text!r} is no path below a root: plain names joined by '/', none beginning with a dot")
    return "/".join(parts)


def _inner(path: str) -> str:
    """A path that stays inside the checkpoint; anybody may have written this manifest."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or "\0" in path or ".." in parts:
        raise ValueError(f"{path!r} is no path inside a checkpoint")
    return path


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 10**7 else f"{count} bytes"


def flush_path(path: str | Path) -> None:
    """Flush the bytes of a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(directory: str | Path) -> None:
    """Flush a directory and all files in it to the disk. Links are not followed."""
    for parent, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(parent, name)
            if os.path.isfile(path) and not os.path.islink(path):
                flush_path(path)
        flush_path(parent)

"""Where checkpoints lie: one interface over directories and object stores.

Every path below a root is relative, with forward slashes: `checkpoint-10`, or `project/group/name/steps/10`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from trainmaster.jobs import drafts
from trainmaster.jobs.checkpoint import (
    MANIFEST,
    CorruptCheckpointError,
    Manifest,
    check_path,
    committed,
    flush_path,
    publish,
    read_manifest,
    require_same,
    seal,
    verify,
)
from trainmaster.jobs.lock import Lock, file_lock
from trainmaster.jobs.object_root import ObjectRoot
from trainmaster.jobs.objects import S3_SCHEME

ANOTHER_SAVE = "-attempt-"
"""Follows the name in the names of later saves to the same path; then comes a number or two."""


class Root(Protocol):
    """Below which checkpoints are committed, found, read and removed. All methods may be called from any thread."""

    uri: str
    """The absolute path of a directory, or `s3://bucket/prefix`."""

    def locate(self, rel_path: str) -> str:
        """The absolute path or URI of what lies at `rel_path`; `open_checkpoint` leads back."""

    def draft(
        self, rel_path: str, *, job_id: str, attempt: int, expected_bytes: int = 0
    ) -> AbstractContextManager[Path]:
        """A local directory to write a checkpoint into, which is gone afterwards unless it was committed.

        What dead saves left near `rel_path` is removed first.

        Raises:
            OSError: with ENOSPC when there is less room than `expected_bytes`; nothing was written.
        """

    def commit(
        self,
        draft: Path,
        rel_path: str,
        manifest: Manifest,
        *,
        check_owner: Callable[[], None],
        known_digests: Mapping[str, str] | None = None,
    ) -> Manifest:
        """Make a draft the checkpoint at `rel_path`; returns its manifest with all files.

        Args:
            draft: from `draft`, with everything in it.
            rel_path: where it will be found.
            manifest: what is known of it; `files` are filled in.
            check_owner: called as the last thing before; what it raises, nothing is committed after.
            known_digests: SHA-256 by path of files that were hashed while they were written.

        Raises:
            FileExistsError: something is committed there already. The draft may be committed elsewhere.
            ValueError: the draft holds something that is no plain file.
        """

    def manifest(self, rel_path: str) -> Manifest | None:
        """Of a committed checkpoint; None when nothing is committed there.

        Raises:
            CorruptCheckpointError: it is there and cannot be read.
        """

    def read(self, rel_path: str, name: str) -> bytes:
        """One file of a committed checkpoint, checked.

        Raises:
            FileNotFoundError: nothing is committed there, or it has no such file.
            CorruptCheckpointError: the file is not what was committed.
        """

    def verify(self, rel_path: str, *, on_bytes: Callable[[int], None] | None = None) -> Manifest:
        """Read every file of a committed checkpoint and compare it with the manifest; nothing is kept.

        Raises:
            FileNotFoundError: nothing is committed there.
            CorruptCheckpointError: names a file that is missing or is not what was committed.
        """

    def fetch(
        self, rel_path: str, *, verify: bool = True, on_bytes: Callable[[int], None] | None = None
    ) -> AbstractContextManager[Path]:
        """A local directory with the files of a committed checkpoint, for reading, until the block ends.

        Args:
            rel_path: which one.
            verify: whether every file is read and compared. What has to be downloaded always is.
            on_bytes: told how many more bytes were read; from several threads.

        Raises:
            FileNotFoundError: nothing is committed there.
            CorruptCheckpointError: a file is missing or is not what was committed.
        """

    def names(self, rel_dir: str) -> list[str]:
        """The names of all directories directly in `rel_dir`, committed or not; none where it does not exist."""

    def committed(self, below: str = "") -> list[str]:
        """The committed checkpoints below a path, the oldest first."""

    def remove(self, rel_path: str) -> None:
        """Remove a checkpoint; nothing happens when there is none. It is no longer listed before its files go."""

    def pointer(self, rel_dir: str, name: str) -> str | None:
        """What a pointer such as `latest` says; None when it was never set."""

    def point(self, rel_dir: str, name: str, target: str) -> None:
        """Set a pointer. Readers see the old text or the new one."""

    def lock(self, rel_dir: str, owner: str, *, wait_s: float = 0.0) -> AbstractContextManager[Lock]:
        """Exclude others from `rel_dir` while the block lasts; it binds those who ask for the lock, too.

        Args:
            rel_dir: what is locked.
            owner: who it is, for the others' message.
            wait_s: how long to wait for others.

        Raises:
            LockedError: somebody else has it.
        """


def open_root(where: str | os.PathLike[str]) -> Root:
    """The root at a path, or at `s3://bucket/prefix`. Nothing is made or asked for yet.

    Raises:
        ImportError: an object store needs a package that is not installed.
        ValueError: this is neither.
    """
    text = os.fspath(where)
    if text.startswith(S3_SCHEME):
        return ObjectRoot(text)
    if "://" in text:
        raise ValueError(f"{text}: checkpoints lie in a directory or below s3://bucket/prefix")
    return LocalRoot(Path(text))


def open_checkpoint(where: str | os.PathLike[str]) -> tuple[Root, str]:
    """The root and the relative path of the checkpoint at an absolute path or URI, such as the one to go on from.

    Raises:
        ImportError: an object store needs a package that is not installed.
        ValueError: no checkpoint can lie there.
    """
    text = os.fspath(where).rstrip("/")
    if not text.startswith(S3_SCHEME):
        text = os.path.abspath(text or "/")
    parent, _, name = text.rpartition("/")
    if not name or parent in ("s3:", "s3:/"):
        raise ValueError(f"{os.fspath(where)}: this is the place of no checkpoint")
    return open_root(parent or "/"), name


def commit_beside(
    root: Root,
    draft: Path,
    rel_path: str,
    manifest: Manifest,
    *,
    check_owner: Callable[[], None],
    known_digests: Mapping[str, str] | None = None,
) -> tuple[str, Manifest]:
    """Commit a draft as the newest save to a path, and say where it lies. See `Root.commit`.

    Where something is committed at the path already, it lies beside it: nothing that is committed is ever changed.
    `checkpoint_lookup.find` leads from the path to the newest save.
    """
    name = rel_path.rpartition("/")[2]
    manifest = replace(manifest, saved_as=name, generation=_next_generation(root, rel_path))
    beside = f"{rel_path}{ANOTHER_SAVE}{manifest.attempt}"
    for place in itertools.chain((rel_path, beside), (f"{beside}-{number}" for number in itertools.count(2))):
        with contextlib.suppress(FileExistsError):
            committed = root.commit(draft, place, manifest, check_owner=check_owner, known_digests=known_digests)
            return place, committed
    raise AssertionError("names never end")


def _next_generation(root: Root, rel_path: str) -> int:
    home, _, name = rel_path.rpartition("/")
    generations = [0]
    for each in root.names(home):
        if each == name or each.startswith(f"{name}{ANOTHER_SAVE}"):
            with contextlib.suppress(CorruptCheckpointError):
                manifest = root.manifest(f"{home}/{each}".lstrip("/"))
                generations.append(manifest.generation if manifest is not None else 0)
    return max(generations) + 1


# Checkpoints in a directory: committed by a rename on the same file system.

_LOCK = ".lock"


class LocalRoot:
    """A root that is a directory, which need not exist. See `Root` for what the methods promise."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self.uri = str(self._path)

    def locate(self, rel_path: str) -> str:
        """The absolute path of what lies at `rel_path`."""
        return str(self._at(rel_path))

    @contextlib.contextmanager
    def draft(self, rel_path: str, *, job_id: str, attempt: int, expected_bytes: int = 0) -> Iterator[Path]:
        """A hidden directory beside the final place."""
        target = self._at(rel_path)
        for above in target.relative_to(self._path).parents:
            if committed(self._path / above):
                raise FileExistsError(f"{self._path / above} is a checkpoint: no other can lie below it")
        _make_lasting(target.parent)
        with drafts.draft(target.parent, job_id=job_id, attempt=attempt, expected_bytes=expected_bytes) as directory:
            yield directory

    def commit(
        self,
        draft: Path,
        rel_path: str,
        manifest: Manifest,
        *,
        check_owner: Callable[[], None],
        known_digests: Mapping[str, str] | None = None,
    ) -> Manifest:
        """Flush, seal and rename a draft."""
        target = self._at(rel_path)
        if os.path.lexists(target / MANIFEST):
            raise FileExistsError(f"{target}: a checkpoint is never replaced")
        sealed = seal(draft, manifest, known_digests=known_digests)
        check_owner()
        try:
            publish(draft, target)
        except FileExistsError:
            (draft / MANIFEST).unlink()
            raise
        return sealed

    def manifest(self, rel_path: str) -> Manifest | None:
        """Of a committed checkpoint."""
        directory = self._at(rel_path)
        return read_manifest(directory) if committed(directory) else None

    def read(self, rel_path: str, name: str) -> bytes:
        """One file, checked."""
        directory = self._at(rel_path)
        manifest = self._require(rel_path)
        file = next((file for file in manifest.files if file.path == name), None)
        if file is None:
            raise FileNotFoundError(f"{directory} has no file {name}")
        try:
            data = (directory / manifest.data / name).read_bytes()
        except OSError as error:
            raise CorruptCheckpointError(f"{directory / name}: {error.strerror}") from error
        require_same(str(directory / name), file, len(data), hashlib.sha256(data).hexdigest())
        return data

    def verify(self, rel_path: str, *, on_bytes: Callable[[int], None] | None = None) -> Manifest:
        """Several files at a time."""
        self._require(rel_path)
        return verify(self._at(rel_path), on_bytes=on_bytes)

    @contextlib.contextmanager
    def fetch(
        self, rel_path: str, *, verify: bool = True, on_bytes: Callable[[int], None] | None = None
    ) -> Iterator[Path]:
        """The checkpoint itself, which nobody may write to."""
        manifest = self.verify(rel_path, on_bytes=on_bytes) if verify else self._require(rel_path)
        yield self._at(rel_path) / manifest.data

    def names(self, rel_dir: str) -> list[str]:
        """The visible directories there."""
        try:
            with os.scandir(self._path / check_path(rel_dir, empty=True)) as entries:
                return [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def committed(self, below: str = "") -> list[str]:
        """All that were renamed to their place; nothing lies below a checkpoint."""
        found = []
        for parent, inner, _ in os.walk(self._path / check_path(below, empty=True)):
            if committed(parent) and Path(parent) != self._path:
                found.append((_age(Path(parent)), Path(parent).relative_to(self._path).as_posix()))
                inner.clear()
            inner[:] = [name for name in inner if not name.startswith(".")]
        return [rel_path for _, rel_path in sorted(found)]

    def remove(self, rel_path: str) -> None:
        """Rename it away, then remove it file by file."""
        if committed(directory := self._at(rel_path)):
            drafts.discard(directory)

    def pointer(self, rel_dir: str, name: str) -> str | None:
        """Read the small file of that name."""
        try:
            return self._pointer(rel_dir, name).read_text().strip() or None
        except FileNotFoundError:
            return None

    def point(self, rel_dir: str, name: str, target: str) -> None:
        """Replace the small file of that name."""
        path = self._pointer(rel_dir, name)
        _make_lasting(path.parent)
        new = path.with_name(f"{path.name}.new")
        with _alone(new) as descriptor:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{target}\n".encode(), 0)
            os.fsync(descriptor)
            os.replace(new, path)
        flush_path(path.parent)

    def lock(self, rel_dir: str, owner: str, *, wait_s: float = 0.0) -> AbstractContextManager[Lock]:
        """Held by the kernel until the block ends or the process dies."""
        return file_lock(self._path / check_path(rel_dir, empty=True) / _LOCK, owner, wait_s=wait_s)

    def _at(self, rel_path: str) -> Path:
        return self._path / check_path(rel_path)

    def _pointer(self, rel_dir: str, name: str) -> Path:
        # With a dot, as no checkpoint has: one may be called `latest`.
        return self._path / check_path(rel_dir, empty=True) / f".{check_path(name)}"

    def _require(self, rel_path: str) -> Manifest:
        manifest = self.manifest(rel_path)
        if manifest is None:
            raise FileNotFoundError(f"{self._at(rel_path)}: no checkpoint is committed there")
        return manifest


def _age(directory: Path) -> float:
    try:
        return read_manifest(directory).created_at
    except CorruptCheckpointError:
        # Listed still, so that it is found to be corrupt.
        with contextlib.suppress(OSError):
            return (directory / MANIFEST).stat().st_mtime
        return 0.0


def _make_lasting(directory: Path) -> None:
    """Make a directory and those above it, and make their names last."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        flush_path(path.parent)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[int]:
    """A file to write that nobody else writes meanwhile; one that the dead left is taken over."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Whoever had the lock before may have renamed the file.
            if path.exists() and os.path.samestat(os.stat(path), os.fstat(descriptor)):
                yield descriptor
                return
        finally:
            os.close(descriptor)

"""Where checkpoints are stored: directories or object stores. Paths are relative to a root, with forward slashes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from trainmaster.jobs import checkpoint
from trainmaster.jobs.checkpoint import MANIFEST, CorruptCheckpointError, Manifest, check_path, flush_path
from trainmaster.jobs.lock import Lock, file_lock
from trainmaster.jobs.object_root import ObjectRoot
from trainmaster.jobs.objects import S3_SCHEME
from trainmaster.jobs.parts import DeliveredParts, PartDelivery
from trainmaster.protocol.account_files import closing
from trainmaster.protocol.attempt_files import AttemptFileUrl, FileArea, is_url

_OBJECT_SCHEMES = (S3_SCHEME, "http://", "https://")
ANOTHER_SAVE = "-attempt-"
"""A later save to a path is named after the path's last part, this, and one or two numbers."""


class Root(Protocol):
    """The place below which checkpoints are committed, found, read and removed. Thread-safe."""

    uri: str
    """The absolute path of a directory, `s3://bucket/prefix`, or the address of a job's files at its server."""
    is_directory: bool
    """Whether checkpoints are directories, which `locate` names, and need not be downloaded."""
    is_retained: bool
    """Whether a job's server removes what lies there, as the job's retention says; nobody does on an object store."""

    def locate(self, rel_path: str) -> str:
        """The absolute path or URI of `rel_path`; the inverse of `open_checkpoint`."""

    def draft(
        self, rel_path: str, *, job_id: str, attempt: int, expected_bytes: int = 0
    ) -> AbstractContextManager[Path]:
        """A local directory to write a checkpoint into, which is removed afterwards unless it was committed.

        Leftovers of dead saves nearby are removed first. Raises OSError if there is no space for `expected_bytes`.
        """

    def commit(
        self,
        draft: Path,
        rel_path: str,
        manifest: Manifest,
        *,
        check_owner: Callable[[], None],
        known_digests: Mapping[str, str] | None = None,
        parts: DeliveredParts | None = None,
    ) -> Manifest:
        """Commit a draft with a manifest that has no `files` yet; returns the complete manifest.

        `check_owner` is called right before the commit, which it prevents by raising. `known_digests` has the SHA-256,
        by path, of files that were hashed while they were written; `parts`, what ranks elsewhere delivered. Raises
        FileExistsError if a checkpoint is committed there already; the draft may be committed elsewhere.
        """

    def delivery(self, rel_path: str, save: str) -> PartDelivery | None:
        """How other machines contribute to a save, named as its draft is; None if all must write into the draft."""

    def manifest(self, rel_path: str) -> Manifest | None:
        """The manifest of a committed checkpoint, or None; raises CorruptCheckpointError if it cannot be read."""

    def read(self, rel_path: str, name: str) -> bytes:
        """Read one file of a committed checkpoint, and compare it with the manifest.

        Like `verify` and `fetch`, raises FileNotFoundError if there is none, and CorruptCheckpointError if it differs.
        """

    def verify(self, rel_path: str, *, on_bytes: Callable[[int], None] | None = None) -> Manifest:
        """Read every file of a committed checkpoint and compare it with the manifest."""

    def fetch(
        self, rel_path: str, *, verify: bool = True, on_bytes: Callable[[int], None] | None = None
    ) -> AbstractContextManager[Path]:
        """A local directory with the files of a committed checkpoint, for reading, until the block ends.

        With `verify`, every file is read and compared; downloaded files always are. `on_bytes` is called with the
        number of bytes read since the last call, from several threads.
        """

    def names(self, rel_dir: str) -> list[str]:
        """The names of all directories directly in `rel_dir`, committed or not; none where it does not exist."""

    def committed(self, below: str = "") -> list[str]:
        """The committed checkpoints below a path, the oldest first."""

    def remove(self, rel_path: str) -> None:
        """Remove a checkpoint if there is one. It disappears from listings before its files go."""

    def pointer(self, rel_dir: str, name: str) -> str | None:
        """The target of a pointer such as `latest`; None when it was never set."""

    def point(self, rel_dir: str, name: str, target: str) -> None:
        """Set a pointer. Readers see either the old target or the new one."""

    def lock(self, rel_dir: str, owner: str, *, wait_s: float = 0.0) -> AbstractContextManager[Lock]:
        """Hold the advisory lock of `rel_dir` for the block; others raise LockedError, which names the `owner`."""


def open_root(where: str | os.PathLike[str]) -> Root:
    """Open the root at a path, at `s3://bucket/prefix` or at a server, without touching it; ValueError for others."""
    text = os.fspath(where)
    if text.startswith(_OBJECT_SCHEMES):
        return ObjectRoot(text)
    if is_url(text):
        raise ValueError(f"{text}: checkpoints are stored in a directory or below s3://bucket/prefix")
    return LocalRoot(Path(text))


def open_checkpoint(where: str | os.PathLike[str]) -> tuple[Root, str]:
    """The root and the relative path of the checkpoint at an absolute path or URI; ValueError if none can be there."""
    text = os.fspath(where).rstrip("/")
    if not text.startswith(_OBJECT_SCHEMES):
        text = os.path.abspath(text or "/")
    parent, _, name = text.rpartition("/")
    if not name or parent in ("s3:", "s3:/"):
        raise ValueError(f"{os.fspath(where)}: no checkpoint can be there")
    return open_root(parent or "/"), name


def found_again(root: Root, where: str, job_id: str | None) -> str:
    """Where a checkpoint is found now whose place this very job noted, perhaps in another attempt or on a machine that
    shares other files. The place is unchanged unless it lies in the job's own directory for checkpoints, the `root`."""
    named = AttemptFileUrl.parse(where)
    if job_id is None:
        return where
    if named is not None and named.area is FileArea.CHECKPOINTS and named.attempt_id.rpartition(".")[0] == job_id:
        return root.locate(named.path)
    # As the server lays its directories out.
    _, here, rel_path = where.partition(f"/{job_id}/checkpoints/")
    return root.locate(rel_path) if here and not root.is_directory and not is_url(where) else where


def commit_beside(
    root: Root,
    draft: Path,
    rel_path: str,
    manifest: Manifest,
    *,
    check_owner: Callable[[], None],
    known_digests: Mapping[str, str] | None = None,
    parts: DeliveredParts | None = None,
) -> tuple[str, Manifest]:
    """Commit a draft as the newest save to a path, beside older ones, which never change; returns where, and what."""
    manifest = replace(manifest, saved_as=rel_path.rpartition("/")[2], generation=_next_generation(root, rel_path))
    beside = f"{rel_path}{ANOTHER_SAVE}{manifest.attempt}"
    for place in itertools.chain((rel_path, beside), (f"{beside}-{number}" for number in itertools.count(2))):
        with contextlib.suppress(FileExistsError):
            return place, root.commit(
                draft, place, manifest, check_owner=check_owner, known_digests=known_digests, parts=parts
            )
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


_LOCK = ".lock"


class LocalRoot:
    """A root that is a directory, which need not exist. The rename of a draft to its final name commits it."""

    is_directory = True
    is_retained = True

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self.uri = str(self._path)

    def locate(self, rel_path: str) -> str:
        return str(self._at(rel_path))

    @contextlib.contextmanager
    def draft(self, rel_path: str, *, job_id: str, attempt: int, expected_bytes: int = 0) -> Iterator[Path]:
        target = self._at(rel_path)
        for above in target.relative_to(self._path).parents:
            if checkpoint.committed(self._path / above):
                raise FileExistsError(f"{self._path / above} is a checkpoint: no other checkpoint can be below it")
        _make_directories(target.parent)
        made = checkpoint.draft_directory(target.parent, job_id=job_id, attempt=attempt, expected_bytes=expected_bytes)
        with made as directory:
            yield directory

    def commit(
        self,
        draft: Path,
        rel_path: str,
        manifest: Manifest,
        *,
        check_owner: Callable[[], None],
        known_digests: Mapping[str, str] | None = None,
        parts: DeliveredParts | None = None,
    ) -> Manifest:
        assert parts is None, "nothing is delivered here: every rank writes into the draft"
        target = self._at(rel_path)
        if os.path.lexists(target / MANIFEST):
            raise FileExistsError(f"{target}: a checkpoint is never replaced")
        complete = replace(manifest, files=checkpoint.describe(draft, known_digests=known_digests))
        with open(draft / MANIFEST, "xb") as file:
            file.write(complete.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        flush_path(draft)
        check_owner()
        try:
            os.rename(draft, target)
        except OSError as error:
            (draft / MANIFEST).unlink()
            # A committed checkpoint is never empty, so the rename itself refuses to replace it.
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise FileExistsError(errno.EEXIST, "a checkpoint is never replaced", str(target)) from error
            raise
        flush_path(target.parent)
        return complete

    def delivery(self, rel_path: str, save: str) -> None:  # noqa: ARG002 - the protocol's
        return None

    def manifest(self, rel_path: str) -> Manifest | None:
        directory = self._at(rel_path)
        return checkpoint.read_manifest(directory) if checkpoint.committed(directory) else None

    def read(self, rel_path: str, name: str) -> bytes:
        directory, manifest = self._at(rel_path), self._require(rel_path)
        file = manifest.file(name)
        try:
            data = (directory / manifest.data / name).read_bytes()
        except OSError as error:
            raise CorruptCheckpointError(f"{directory / name}: {error.strerror}") from error
        checkpoint.require_same(str(directory / name), file, len(data), hashlib.sha256(data).hexdigest())
        return data

    def verify(self, rel_path: str, *, on_bytes: Callable[[int], None] | None = None) -> Manifest:
        self._require(rel_path)
        return checkpoint.verify(self._at(rel_path), on_bytes=on_bytes)

    @contextlib.contextmanager
    def fetch(
        self, rel_path: str, *, verify: bool = True, on_bytes: Callable[[int], None] | None = None
    ) -> Iterator[Path]:
        manifest = self.verify(rel_path, on_bytes=on_bytes) if verify else self._require(rel_path)
        yield self._at(rel_path) / manifest.data

    def names(self, rel_dir: str) -> list[str]:
        try:
            with os.scandir(self._path / check_path(rel_dir, empty=True)) as entries:
                return [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def committed(self, below: str = "") -> list[str]:
        found = []
        for parent, inner, _ in os.walk(self._path / check_path(below, empty=True)):
            if checkpoint.committed(parent) and Path(parent) != self._path:
                found.append((_age(Path(parent)), Path(parent).relative_to(self._path).as_posix()))
                inner.clear()
            inner[:] = [name for name in inner if not name.startswith(".")]
        return [rel_path for _, rel_path in sorted(found)]

    def remove(self, rel_path: str) -> None:
        if checkpoint.committed(directory := self._at(rel_path)):
            doomed = directory.with_name(f"{checkpoint.REMOVED_PREFIX}{os.urandom(4).hex()}")
            with contextlib.suppress(FileNotFoundError):
                os.rename(directory, doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def pointer(self, rel_dir: str, name: str) -> str | None:
        try:
            return self._pointer(rel_dir, name).read_text().strip() or None
        except FileNotFoundError:
            return None

    def point(self, rel_dir: str, name: str, target: str) -> None:
        path = self._pointer(rel_dir, name)
        _make_directories(path.parent)
        new = path.with_name(f"{path.name}.new")
        with _open_locked(new) as descriptor:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{target}\n".encode(), 0)
            os.fsync(descriptor)
            os.replace(new, path)
        flush_path(path.parent)

    def lock(self, rel_dir: str, owner: str, *, wait_s: float = 0.0) -> AbstractContextManager[Lock]:
        return file_lock(self._path / check_path(rel_dir, empty=True) / _LOCK, owner, wait_s=wait_s)

    def _at(self, rel_path: str) -> Path:
        return self._path / check_path(rel_path)

    def _pointer(self, rel_dir: str, name: str) -> Path:
        # The dot distinguishes it from a checkpoint that is called `latest`.
        return self._path / check_path(rel_dir, empty=True) / f".{check_path(name)}"

    def _require(self, rel_path: str) -> Manifest:
        return checkpoint.required(self.manifest(rel_path), self.locate(rel_path))


def _age(directory: Path) -> float:
    try:
        return checkpoint.read_manifest(directory).created_at
    except CorruptCheckpointError:
        # Listed all the same, so that readers find it to be corrupt.
        with contextlib.suppress(OSError):
            return (directory / MANIFEST).stat().st_mtime
        return 0.0


def _make_directories(directory: Path) -> None:
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        flush_path(path.parent)


@contextlib.contextmanager
def _open_locked(path: Path) -> Iterator[int]:
    """Open a file for writing under an exclusive lock; a dead writer's file is taken over."""
    while True:
        with closing(os.open(path, os.O_RDWR | os.O_CREAT, 0o644)) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The holder of the lock before may have renamed the file.
            if checkpoint.is_at(path, descriptor):
                yield descriptor
                return

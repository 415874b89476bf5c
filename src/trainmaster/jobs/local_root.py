"""Checkpoints in a directory: committed by a rename on the same file system."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from trainmaster.jobs import drafts
from trainmaster.jobs.checkpoint import (
    MANIFEST,
    CorruptCheckpointError,
    Manifest,
    committed,
    flush_path,
    publish,
    read_manifest,
    require_same,
    seal,
    verify,
)
from trainmaster.jobs.lock import Lock, file_lock
from trainmaster.jobs.roots import checked

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
            with os.scandir(self._path / checked(rel_dir, empty=True)) as entries:
                return [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def committed(self, below: str = "") -> list[str]:
        """All that were renamed to their place; nothing lies below a checkpoint."""
        found = []
        for parent, inner, _ in os.walk(self._path / checked(below, empty=True)):
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
        return file_lock(self._path / checked(rel_dir, empty=True) / _LOCK, owner, wait_s=wait_s)

    def _at(self, rel_path: str) -> Path:
        return self._path / checked(rel_path)

    def _pointer(self, rel_dir: str, name: str) -> Path:
        # With a dot, as no checkpoint has: one may be called `latest`.
        return self._path / checked(rel_dir, empty=True) / f".{checked(name)}"

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

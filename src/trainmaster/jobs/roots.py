"""Where checkpoints lie: one interface over directories and object stores.

Every path below a root is relative, with forward slashes: `checkpoint-10`, or `project/group/name/steps/10`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Protocol

from trainmaster.jobs.checkpoint import CorruptCheckpointError, Manifest
from trainmaster.jobs.lock import Lock
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
        from trainmaster.jobs.object_root import ObjectRoot

        return ObjectRoot(text)
    if "://" in text:
        raise ValueError(f"{text}: checkpoints lie in a directory or below s3://bucket/prefix")
    from trainmaster.jobs.local_root import LocalRoot

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


def checked(rel_path: str | os.PathLike[str], *, empty: bool = False) -> str:
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

"""Roots: Trainmaster stores every path as a root and a relative path, and this module alone resolves them.

With the setting `object_root`, the files of ended jobs lie below the same paths on an object store (`server.archive`).
What is in the directory counts, and the object store only has what is not there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from trainmaster.protocol import account_files
from trainmaster.protocol.run_directory import Gap, RunDirectory
from trainmaster.server.archive import Archive, StoredStreams

RUNS = "runs"
ARTIFACTS = "artifacts"
BLOBS = "blobs"
URI = "uri"
"""Not a directory of ours: the path is a whole URI, such as `s3://bucket/key`, and we never remove its files."""


class OutsideRootError(ValueError):
    """The path leads outside its root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """The name of a root and the path of a file or directory below it."""

    root: str
    path: str

    @property
    def uri(self) -> str:
        return self.path if self.root == URI else f"{self.root}:{self.path}"


class Roots:
    """Named directories, and the object store with what was moved from them, if the server has one."""

    def __init__(self, directories: Mapping[str, Path], archive: Archive | None = None) -> None:
        self.archive = archive
        self._directories = {name: path.absolute() for name, path in directories.items()}
        for path in self._directories.values():
            path.mkdir(parents=True, exist_ok=True)

    def path(self, root: str, relative: str) -> Path:
        """The local path of a file below a root; OutsideRootError when it is absolute or climbs out."""
        parts = PurePosixPath(relative)
        if parts.is_absolute() or ".." in parts.parts:
            raise OutsideRootError(f"{relative!r} leads outside root {root!r}")
        return self._directories[root] / parts

    def locate(self, absolute: str | Path) -> Location:
        """The location of a local path, or of one on our object store; OutsideRootError when no root holds it."""
        if self.archive is not None and self.stores(str(absolute)):
            path = str(absolute).removeprefix(f"{self.archive.uri(ARTIFACTS)}/")
            self.path(ARTIFACTS, path)
            return Location(root=ARTIFACTS, path=path)
        plain = os.path.normpath(absolute)
        for root, directory in self._directories.items():
            if plain.startswith(f"{directory}{os.sep}"):
                return Location(root=root, path=plain[len(str(directory)) + 1 :])
        raise OutsideRootError(f"{absolute} lies in none of the configured roots")

    def stores(self, uri: str) -> bool:
        """Whether this is the URI of an artifact on our object store."""
        return self.archive is not None and uri.startswith(f"{self.archive.uri(ARTIFACTS)}/")

    def stored_uri(self, location: Location) -> str | None:
        """Where something lies that is only on the object store; None if it is here, or there is no such store."""
        if self.archive is None or self.exists(location):
            return None
        return self.archive.uri(f"{location.root}/{location.path}")

    def remove(self, location: Location) -> None:
        """Remove a file or a whole directory, if it exists; what was moved to the object store stays."""
        account_files.remove(self._directories[location.root], self._below(location))

    def purge(self, location: Location) -> None:
        """Remove a file or a whole directory, wherever it is."""
        self.remove(location)
        self.forget(location)

    def forget(self, location: Location) -> None:
        """Remove what was moved to the object store."""
        if self.archive is not None:
            self.archive.remove(f"{location.root}/{location.path}")

    def move(self, location: Location, path: str) -> bool:
        """Move a file or directory to another path below its root; False when it is not there."""
        return account_files.move(self._directories[location.root], self._below(location), path)

    def exists(self, location: Location) -> bool:
        return account_files.exists(self._directories[location.root], self._below(location))

    def stored_size_of(self, location: Location) -> int:
        """The bytes that were moved to the object store."""
        return self.archive.size_of(f"{location.root}/{location.path}") if self.archive is not None else 0

    def stored_since(self, location: Location) -> float:
        """When the newest of what was moved to the object store came there."""
        return self.archive.newest_in(f"{location.root}/{location.path}") if self.archive is not None else 0.0

    def size_of(self, location: Location) -> int:
        """The disk space of a directory, as far as it can be read; 0 when it does not exist."""
        return account_files.size_of(self._directories[location.root], self._below(location))

    def _below(self, location: Location) -> str:
        return str(self.path(location.root, location.path).relative_to(self._directories[location.root]))


def run_directory(roots: Roots, job_id: str, attempt: int) -> RunDirectory:
    return RunDirectory(roots.path(RUNS, f"{job_id}/{attempt}"))


class StreamStatus(Protocol):
    @property
    def st_size(self) -> int: ...

    @property
    def st_mtime(self) -> float: ...


class Streams(Protocol):
    """The streams of an attempt, to be read: the methods of a `RunDirectory`."""

    def streams(self) -> Iterator[tuple[str, int]]: ...

    def status(self, stream: str) -> StreamStatus | None: ...

    def read(self, stream: str, offset: int, limit: int = 1 << 20) -> bytes: ...

    def gap(self, stream: str) -> Gap | None: ...


def streams_of(roots: Roots, job_id: str, attempt: int, *, ended: bool) -> Streams:
    """The streams of an attempt. They can only have been moved if the job has `ended`, or a later attempt began."""
    directory = run_directory(roots, job_id, attempt)
    if roots.archive is None or not ended:
        return directory
    return _MovedStreams(directory, StoredStreams(roots.archive, f"{RUNS}/{job_id}/{attempt}"))


class _MovedStreams:
    """Streams that may be moved between two calls."""

    def __init__(self, here: RunDirectory, stored: StoredStreams) -> None:
        self._here = here
        self._stored = stored

    def streams(self) -> Iterator[tuple[str, int]]:
        found = list(self._here.streams())
        yield from found if self._is_here() else self._stored.streams()

    def status(self, stream: str) -> StreamStatus | None:
        found = self._here.status(stream)
        return found if self._is_here() else self._stored.status(stream)

    def read(self, stream: str, offset: int, limit: int = 1 << 20) -> bytes:
        found = self._here.read(stream, offset, limit)
        return found if found or self._is_here() else self._stored.read(stream, offset, limit)

    def gap(self, stream: str) -> Gap | None:
        found = self._here.gap(stream)
        return found if self._is_here() else self._stored.gap(stream)

    def _is_here(self) -> bool:
        """Asked after a look: what was moved before it is not there any more."""
        return self._here.path.exists()


def checkpoints_path(job_id: str) -> str:
    """The directory of a job's checkpoints below the artifacts' root."""
    return f"{job_id}/checkpoints"


def output_path(job_id: str) -> str:
    """The directory of a job's results below the artifacts' root."""
    return f"{job_id}/output"


def class_checkpoints_path(account_id: str, *, confined: bool) -> str:
    """The directory of the checkpoints of an account's job classes, which has one below by project, group and name.

    Users of the machine pass through `classes` to their own directory. Root in a container can open its account's
    directory and leave setuid programs there, so accounts that run only in containers (`confined`) have theirs below a
    directory that stays closed.
    """
    return f"{'confined-classes' if confined else 'classes'}/{account_id}"


def blob_path(account_id: str, sha256: str) -> str:
    return f"{account_id}/{sha256}"

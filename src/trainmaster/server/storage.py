"""Roots: Trainmaster stores every path as a root and a relative path, and this module alone resolves them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from trainmaster.protocol import account_files
from trainmaster.protocol.run_directory import RunDirectory

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
    """Named directories."""

    def __init__(self, directories: Mapping[str, Path]) -> None:
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
        """The location of a local path; OutsideRootError when no root holds it."""
        plain = os.path.normpath(absolute)
        for root, directory in self._directories.items():
            if plain.startswith(f"{directory}{os.sep}"):
                return Location(root=root, path=plain[len(str(directory)) + 1 :])
        raise OutsideRootError(f"{absolute} lies in none of the configured roots")

    def remove(self, location: Location) -> None:
        """Remove a file or a whole directory, if it exists."""
        account_files.remove(self._directories[location.root], self._below(location))

    def move(self, location: Location, path: str) -> bool:
        """Move a file or directory to another path below its root; False when it is not there."""
        return account_files.move(self._directories[location.root], self._below(location), path)

    def exists(self, location: Location) -> bool:
        return account_files.exists(self._directories[location.root], self._below(location))

    def size_of(self, location: Location) -> int:
        """The disk space of a directory, as far as it can be read; 0 when it does not exist."""
        return account_files.size_of(self._directories[location.root], self._below(location))

    def _below(self, location: Location) -> str:
        return str(self.path(location.root, location.path).relative_to(self._directories[location.root]))


def run_directory(roots: Roots, job_id: str, attempt: int) -> RunDirectory:
    return RunDirectory(roots.path(RUNS, f"{job_id}/{attempt}"))


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

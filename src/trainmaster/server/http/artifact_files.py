"""The files that a job leaves: those in its output directory, and those of its committed checkpoints.

Their paths are `output/<path there>` or `checkpoints/<checkpoint_id>/<path there>`. A link counts as a file when it
leads to one in the same directory; other links are ignored. What is not in the server's directory any more is read from
its object store.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trainmaster.protocol.account_files import directory_below, exists, files_in_order, has_entries, open_inside
from trainmaster.server.archive import PIECE, Archive, ObjectStoreAwayError, StoredFile
from trainmaster.server.core.errors import NotFoundError, StoreUnavailableError
from trainmaster.server.core.job import Job
from trainmaster.server.core.reports import MAX_ID
from trainmaster.server.storage import ARTIFACTS, Roots
from trainmaster.server.store.page_tokens import bad_token, decode_position, is_text

OUTPUT = "output"
CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
_CHUNK = 1 << 20
MAX_MANIFEST_BYTES = 4 << 20
MAX_MISSED = 20_000
"""A list ends after so many pipes, outside links and the like: to look at 100,000 of them takes seconds."""

Position = tuple[str, ...]
"""The kind of place, the checkpoint, and the names on the way to a file; without names, before all its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactPlace:
    """A directory whose files are artifacts."""

    top: Path
    """A directory of the server's."""
    directory: str
    """A path below `top`; if a link is on the way, the place has no files."""
    checkpoint_id: str | None = None
    """None: it is the output directory."""
    archive: Archive | None = None
    """Where its files are if they were moved, or were saved there."""

    @property
    def kind(self) -> Literal["output", "checkpoint"]:
        return "output" if self.checkpoint_id is None else "checkpoint"

    @property
    def prefix(self) -> str:
        return f"{OUTPUT}/" if self.checkpoint_id is None else f"{CHECKPOINTS}/{self.checkpoint_id}/"

    @property
    def position(self) -> Position:
        return (self.kind, self.checkpoint_id or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    place: ArtifactPlace
    path: str
    size: int
    modified_at: float
    etag: str
    sha256: str | None

    @property
    def position(self) -> Position:
        return (*self.place.position, *self.path.removeprefix(self.place.prefix).split("/"))


class OpenArtifact(NamedTuple):
    """An open file, which the owner of this object closes."""

    artifact: Artifact
    read: Callable[[int, int], bytes]
    """Bytes from an offset up to another; empty if the file became shorter."""
    close: Callable[[], None]
    piece_bytes: int


def opened_here(descriptor: int, artifact: Artifact) -> OpenArtifact:
    def read(begin: int, end: int) -> bytes:
        return os.pread(descriptor, end - begin, begin)

    return OpenArtifact(artifact, read, functools.partial(os.close, descriptor), _CHUNK)


def checkpoint_place(roots: Roots, checkpoint_id: str, path: str) -> ArtifactPlace:
    return ArtifactPlace(
        top=roots.path(ARTIFACTS, ""), directory=path, checkpoint_id=checkpoint_id, archive=roots.archive
    )


def output_place(roots: Roots, job: Job) -> ArtifactPlace:
    archive = roots.archive if job.attempt is None else None
    return ArtifactPlace(top=roots.path(ARTIFACTS, ""), directory=f"{job.job_id}/{OUTPUT}", archive=archive)


def checkpoints_on_the_way(path: str) -> list[str]:
    """The ids of checkpoints that may have a file of this path; ids may have slashes."""
    top, _, rest = path.partition("/")
    ends = [at for at, character in enumerate(rest[: MAX_ID + 1]) if character == "/"]
    return [rest[:end] for end in ends] if top == CHECKPOINTS else []


def has_output(roots: Roots, job: Job) -> bool:
    """False also if the object store, which may have it, cannot be asked."""
    if has_entries(roots.path(ARTIFACTS, ""), f"{job.job_id}/{OUTPUT}"):
        return True
    with contextlib.suppress(ObjectStoreAwayError):
        return bool(_stored_files(output_place(roots, job)))
    return False


def files(place: ArtifactPlace, after: Position = ()) -> Iterator[Artifact]:
    """The files of a place, sorted by name, after a position if it is in this place."""
    rest = after[2:] if place.position == after[:2] else ()
    if place.archive is None:
        yield from _files_here(place, rest)
        return
    if exists(place.top, place.directory):
        yield from _files_here(place, rest)
        if not exists(place.top, place.directory):
            raise StoreUnavailableError("the files were moved to the object store in this very moment; ask again")
        return
    stored = _stored_files(place)
    for names in sorted(tuple(name.split("/")) for name in stored):
        if names > rest:
            yield _stored_artifact(place, "/".join(names), stored["/".join(names)])


def _stored_files(place: ArtifactPlace) -> Mapping[str, StoredFile]:
    if place.archive is None:
        return {}
    if place.checkpoint_id is not None:
        unit = place.archive.checkpoint(f"{ARTIFACTS}/{place.directory}")
        return unit.files if unit is not None else {}
    home, _, below = place.directory.partition("/")
    unit = place.archive.unit(f"{ARTIFACTS}/{home}")
    found = unit.files.items() if unit is not None else ()
    return {name.removeprefix(f"{below}/"): file for name, file in found if name.startswith(f"{below}/")}


def _stored_file(archive: Archive, place: ArtifactPlace, name: str) -> StoredFile | None:
    """A file as it is now on the store, where it may be damaged or gone."""
    if (file := _stored_files(place).get(name)) is None or file.content is not None:
        return file
    size = archive.size_at(file.key)
    return file if size == file.size else None if size is None else replace(file, size=size, sha256=None)


def _stored_artifact(place: ArtifactPlace, name: str, file: StoredFile) -> Artifact:
    return Artifact(
        place=place,
        path=place.prefix + name,
        size=file.size,
        modified_at=file.modified_at,
        etag=f'"{file.sha256 or f"{file.modified_at:.6f}-{file.size:x}"}"',
        sha256=file.sha256,
    )


def _files_here(place: ArtifactPlace, rest: tuple[str, ...]) -> Iterator[Artifact]:
    with contextlib.suppress(FileNotFoundError), directory_below(place.top, place.directory) as directory:
        manifest = _manifest(place, directory)
        missed = 0
        with contextlib.suppress(OSError):  # a job that moves directories meanwhile shortens its own list
            for names in files_in_order(directory, rest):
                if (opened := _open(directory, "/".join(names))) is not None:
                    os.close(opened[0])
                    yield _artifact(place, "/".join(names), opened[1], manifest)
                elif (missed := missed + 1) >= MAX_MISSED:
                    return


def open_file(found: Sequence[ArtifactPlace], path: str) -> OpenArtifact:
    for place in found:
        name = path.removeprefix(place.prefix)
        if name == path or any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
            continue
        with contextlib.suppress(FileNotFoundError), directory_below(place.top, place.directory) as directory:
            if (opened := _open(directory, name)) is not None:
                return opened_here(opened[0], _artifact(place, name, opened[1], _manifest(place, directory)))
        if place.archive is not None and (file := _stored_file(place.archive, place, name)) is not None:
            read = functools.partial(place.archive.read, file)
            return OpenArtifact(_stored_artifact(place, name, file), read, _nothing_to_close, PIECE)
    raise NotFoundError(f"the job has no file {path!r}")


def _nothing_to_close() -> None:
    pass


def position_of_token(token: str) -> Position:
    with contextlib.suppress(ValueError, TypeError):
        position = decode_position(token)
        if len(position) > 1 and position[0] in ("checkpoint", "output") and all(map(is_text, position)):
            return tuple(position)
    raise bad_token()


def _open(directory: int, name: str) -> tuple[int, os.stat_result] | None:
    """A descriptor of a plain file, and its status; None when there is none."""
    try:
        descriptor = open_inside(directory, name)
    except FileNotFoundError:
        return None
    return descriptor, os.fstat(descriptor)


def _artifact(
    place: ArtifactPlace, name: str, status: os.stat_result, manifest: Mapping[str, tuple[int, str]]
) -> Artifact:
    size, sha256 = manifest.get(name, (None, None))
    known = sha256 if size == status.st_size else None
    return Artifact(
        place=place,
        path=place.prefix + name,
        size=status.st_size,
        modified_at=status.st_mtime,
        etag=f'"{known or f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"}"',
        sha256=known,
    )


def _manifest(place: ArtifactPlace, directory: int) -> dict[str, tuple[int, str]]:
    """Size and digest of a checkpoint's files, as they were committed."""
    if place.kind != "checkpoint" or (opened := _open(directory, MANIFEST)) is None:
        return {}
    with open(opened[0], "rb") as file:
        data = file.read(MAX_MANIFEST_BYTES)
    try:
        described: Any = json.loads(data)["files"]
        return {str(each["path"]): (int(each["size"]), str(each["sha256"])) for each in described}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}

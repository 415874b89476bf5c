"""The files that a job leaves: those in its output directory, and those of its committed checkpoints.

Their paths are `output/<path there>` or `checkpoints/<checkpoint_id>/<path there>`. A link counts as a file when it
leads to one in the same directory; other links are ignored.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainmaster.protocol.account_files import directory_below, files_in_order, has_entries, open_inside
from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.core.job import Job
from trainmaster.server.core.reports import MAX_ID
from trainmaster.server.storage import ARTIFACTS, Roots
from trainmaster.server.store.page_tokens import bad_token, decode_position, is_text

OUTPUT = "output"
CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 4 << 20
MAX_MISSED = 20_000
"""A list ends after so many pipes, outside links and the like: to look at 100,000 of them takes seconds."""

Position = tuple[str, ...]
"""A position in a list: the kind of place, the checkpoint, and the names on the way to a file; without names, before
all files of that place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactPlace:
    """A directory whose files are artifacts."""

    kind: Literal["output", "checkpoint"]
    prefix: str
    """The beginning of their paths."""
    top: Path
    """A directory of the server's."""
    directory: str
    """A path below `top`; if a link is on the way, the place has no files."""
    checkpoint_id: str | None = None

    @property
    def position(self) -> Position:
        return (self.kind, self.checkpoint_id or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A file, as it was when it was opened."""

    place: ArtifactPlace
    path: str
    size: int
    modified_at: float
    etag: str
    sha256: str | None
    position: Position


@dataclass(slots=True)
class OpenArtifact:
    """An open file, which the owner of this object closes."""

    descriptor: int
    artifact: Artifact = field(compare=False)


def checkpoint_place(roots: Roots, checkpoint_id: str, path: str) -> ArtifactPlace:
    return ArtifactPlace(
        kind="checkpoint",
        prefix=f"{CHECKPOINTS}/{checkpoint_id}/",
        top=roots.path(ARTIFACTS, ""),
        directory=path,
        checkpoint_id=checkpoint_id,
    )


def output_place(roots: Roots, job: Job) -> ArtifactPlace:
    return ArtifactPlace(
        kind="output", prefix=f"{OUTPUT}/", top=roots.path(ARTIFACTS, ""), directory=f"{job.job_id}/{OUTPUT}"
    )


def checkpoints_on_the_way(path: str) -> list[str]:
    """The ids of checkpoints that may have a file of this path; ids may have slashes."""
    top, _, rest = path.partition("/")
    ends = [at for at, character in enumerate(rest[: MAX_ID + 1]) if character == "/"]
    return [rest[:end] for end in ends] if top == CHECKPOINTS else []


def has_output(roots: Roots, job: Job) -> bool:
    """Whether the output directory of a job has any entry."""
    return has_entries(roots.path(ARTIFACTS, ""), f"{job.job_id}/{OUTPUT}")


def files(place: ArtifactPlace, after: Position = ()) -> Iterator[Artifact]:
    """The files of a place, sorted by name, after a position if it is in this place."""
    rest = after[2:] if place.position == after[:2] else ()
    with _opened(place) as directory:
        if directory is None:
            return
        manifest = _manifest(place, directory)
        missed = 0
        # A job that moves directories meanwhile shortens its own list.
        with contextlib.suppress(OSError):
            for names in files_in_order(directory, rest):
                if (opened := _open(directory, "/".join(names))) is not None:
                    os.close(opened[0])
                    yield _artifact(place, "/".join(names), opened[1], manifest, (*place.position, *names))
                elif (missed := missed + 1) >= MAX_MISSED:
                    return


def open_file(found: Sequence[ArtifactPlace], path: str) -> OpenArtifact:
    """Open the file of a path.

    Raises:
        NotFoundError: there is none, or it leads somewhere else.
    """
    for place in found:
        name = path.removeprefix(place.prefix)
        if name == path or any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
            continue
        with _opened(place) as directory:
            opened = None if directory is None else _open(directory, name)
            if directory is not None and opened is not None:
                position = (*place.position, *name.split("/"))
                manifest = _manifest(place, directory)
                return OpenArtifact(opened[0], _artifact(place, name, opened[1], manifest, position))
    raise NotFoundError(f"the job has no file {path!r}")


def position_of_token(token: str) -> Position:
    """The position that a page token stands for.

    Raises:
        SpecError: no server of ours made it.
    """
    with contextlib.suppress(ValueError, TypeError):
        position = decode_position(token)
        if len(position) > 1 and position[0] in ("checkpoint", "output") and all(map(is_text, position)):
            return tuple(position)
    raise bad_token()


@contextlib.contextmanager
def _opened(place: ArtifactPlace) -> Iterator[int | None]:
    """A descriptor of the directory; None where it does not exist."""
    with contextlib.ExitStack() as stack:
        try:
            directory = stack.enter_context(directory_below(place.top, place.directory))
        except FileNotFoundError:
            yield None
            return
        yield directory


def _open(directory: int, name: str) -> tuple[int, os.stat_result] | None:
    """A descriptor of a plain file, and its status; None when there is none."""
    try:
        descriptor = open_inside(directory, name)
    except FileNotFoundError:
        return None
    return descriptor, os.fstat(descriptor)


def _artifact(
    place: ArtifactPlace, name: str, status: os.stat_result, manifest: Mapping[str, tuple[int, str]], position: Position
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
        position=position,
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

"""The files that a job leaves: those in its output directory, and those of its committed checkpoints.

A path of ours is `output/<path there>` or `checkpoints/<checkpoint_id>/<path there>`. A link is a file when it leads to
one in the same directory; nothing else is reached by one.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainmaster.protocol.account_files import directory_below, files_in_order, has_entries, open_inside
from trainmaster.server.core.errors import NotFoundError, Problem, SpecError
from trainmaster.server.core.job import Job
from trainmaster.server.core.reports import MAX_ID
from trainmaster.server.storage import ARTIFACTS, Roots
from trainmaster.server.store.page_tokens import is_text

OUTPUT = "output"
CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 4 << 20
MAX_MISSED = 20_000
"""Pipes, links that lead elsewhere and the like, after which a list ends: to look at 100,000 of them takes seconds."""

Position = tuple[str, ...]
"""Where a list stands: the place, the checkpoint, and the names on the way to a file; without names, before all files
of that place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A directory whose files are artifacts."""

    kind: Literal["output", "checkpoint"]
    prefix: str
    """What their paths begin with."""
    top: Path
    """A directory of the server's."""
    directory: str
    """Below that; where a link is on the way, there are no files."""
    checkpoint_id: str | None = None

    @property
    def position(self) -> Position:
        """Where the place comes in a list."""
        return (self.kind, self.checkpoint_id or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A file, as it was seen."""

    place: Place
    path: str
    size: int
    modified_at: float
    etag: str
    sha256: str | None
    position: Position


@dataclass(slots=True)
class OpenArtifact:
    """A file that is open, to be read from its descriptor; whoever has it closes it."""

    descriptor: int
    artifact: Artifact = field(compare=False)


def checkpoint_place(roots: Roots, checkpoint_id: str, path: str) -> Place:
    """Where the files of a checkpoint lie whose directory is below the artifacts."""
    return Place(
        kind="checkpoint",
        prefix=f"{CHECKPOINTS}/{checkpoint_id}/",
        top=roots.path(ARTIFACTS, ""),
        directory=path,
        checkpoint_id=checkpoint_id,
    )


def output_place(roots: Roots, job: Job) -> Place:
    """Where the output of a job lies."""
    return Place(kind="output", prefix=f"{OUTPUT}/", top=roots.path(ARTIFACTS, ""), directory=f"{job.job_id}/{OUTPUT}")


def checkpoints_on_the_way(path: str) -> list[str]:
    """The ids of checkpoints that a path may name a file of: an id may have slashes in it."""
    top, _, rest = path.partition("/")
    ends = [at for at, character in enumerate(rest[: MAX_ID + 1]) if character == "/"]
    return [rest[:end] for end in ends] if top == CHECKPOINTS else []


def has_output(roots: Roots, job: Job) -> bool:
    """Whether a job left anything in its output directory; what lies deeper is not looked at."""
    return has_entries(roots.path(ARTIFACTS, ""), f"{job.job_id}/{OUTPUT}")


def files(place: Place, after: Position = ()) -> Iterator[Artifact]:
    """The files of a place, by their names, after a position where that is in this place."""
    rest = after[2:] if place.position == after[:2] else ()
    with _opened(place) as directory:
        if directory is None:
            return
        manifest = _manifest(place, directory)
        missed = 0
        # A job that moves directories meanwhile cuts its own list short.
        with contextlib.suppress(OSError):
            for names in files_in_order(directory, rest):
                if (opened := _open(directory, "/".join(names))) is not None:
                    os.close(opened[0])
                    yield _artifact(place, "/".join(names), opened[1], manifest, (*place.position, *names))
                elif (missed := missed + 1) >= MAX_MISSED:
                    return


def open_file(found: Sequence[Place], path: str) -> OpenArtifact:
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


def encode(position: Position) -> str:
    """A position as clients hold it."""
    return base64.urlsafe_b64encode(json.dumps(position).encode()).decode().rstrip("=")


def decode(token: str) -> Position:
    """The position that a client sent.

    Raises:
        SpecError: no server of ours made it.
    """
    try:
        position = json.loads(base64.b64decode(token + "=" * (-len(token) % 4), b"-_", validate=True))
        if len(position) > 1 and position[0] in ("checkpoint", "output") and all(map(is_text, position)):
            return tuple(position)
    except (ValueError, TypeError, RecursionError):
        pass
    raise SpecError([Problem(field="page_token", message="is not a token that this server gave out")])


@contextlib.contextmanager
def _opened(place: Place) -> Iterator[int | None]:
    """A descriptor of a place; None where there is no such directory."""
    with contextlib.ExitStack() as stack:
        try:
            directory = stack.enter_context(directory_below(place.top, place.directory))
        except FileNotFoundError:
            yield None
            return
        yield directory


def _open(directory: int, name: str) -> tuple[int, os.stat_result] | None:
    """A descriptor of a plain file of a place, and its status; None when there is none."""
    try:
        descriptor = open_inside(directory, name)
    except FileNotFoundError:
        return None
    return descriptor, os.fstat(descriptor)


def _artifact(
    place: Place, name: str, status: os.stat_result, manifest: Mapping[str, tuple[int, str]], position: Position
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


def _manifest(place: Place, directory: int) -> dict[str, tuple[int, str]]:
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

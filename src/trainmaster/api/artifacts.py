"""The files that a job leaves: those in its output directory, and those of its committed checkpoints.

A path of ours is `output/<path there>` or `checkpoints/<checkpoint_id>/<path there>`. What is opened lies below the
directory that it was named in, links followed, at the moment at which it is open.
"""

from __future__ import annotations

import base64
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainmaster.core.errors import NotFoundError, Problem, SpecError
from trainmaster.core.job import Checkpoint, Job
from trainmaster.storage import ARTIFACTS, Roots

OUTPUT = "output"
CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 4 << 20

Position = tuple[str, ...]
"""Where a list stands: the place, the checkpoint, and the names on the way to a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A directory whose files are artifacts."""

    kind: Literal["output", "checkpoint"]
    prefix: str
    """What their paths begin with."""
    directory: Path
    """Without a link on the way: what is a link where a directory should be holds nothing."""
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


def places(roots: Roots, job: Job, checkpoints: Sequence[Checkpoint]) -> list[Place]:
    """Where the files of a job lie, in the order of lists."""
    # Jobs fill the directories in there; the way to the root is ours, and may have links.
    root = Path(os.path.realpath(roots.path(ARTIFACTS, "")))
    found = [
        Place(
            kind="checkpoint",
            prefix=f"{CHECKPOINTS}/{checkpoint.checkpoint_id}/",
            directory=root / checkpoint.path,
            checkpoint_id=checkpoint.checkpoint_id,
        )
        for checkpoint in checkpoints
        if checkpoint.root == ARTIFACTS
    ]
    output = Place(kind="output", prefix=f"{OUTPUT}/", directory=root / job.job_id / OUTPUT)
    return [*sorted(found, key=lambda place: place.position), output]


def has_output(roots: Roots, job: Job) -> bool:
    """Whether a job left anything in its output directory; what lies deeper is not looked at."""
    directory = os.path.join(os.path.realpath(roots.path(ARTIFACTS, "")), job.job_id, OUTPUT)
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        with os.scandir(descriptor) as entries:
            return next(entries, None) is not None
    finally:
        os.close(descriptor)


def files(place: Place, after: Position = ()) -> Iterator[Artifact]:
    """The files of a place, by their names, after a position."""
    if after and place.position < after[:2]:
        return
    rest = after[2:] if place.position == after[:2] else ()
    manifest = _manifest(place)
    for names, path in _walk(place.directory, rest):
        # A link is a file when it leads to one inside.
        if (opened := _open(place, path)) is None:
            continue
        os.close(opened[0])
        yield _artifact(place, "/".join(names), opened[1], manifest, (*place.position, *names))


def open_file(found: Sequence[Place], path: str) -> OpenArtifact:
    """Open the file of a path.

    Raises:
        NotFoundError: there is none, or it leads somewhere else.
    """
    for place in found:
        name = path.removeprefix(place.prefix)
        if name == path or any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
            continue
        opened = _open(place, place.directory / name)
        if opened is not None:
            position = (*place.position, *name.split("/"))
            return OpenArtifact(opened[0], _artifact(place, name, opened[1], _manifest(place), position))
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
        if len(position) > 2 and all(isinstance(part, str) for part in position):
            return tuple(position)
    except (ValueError, TypeError, RecursionError):
        pass
    raise SpecError([Problem(field="page_token", message="is not a token that this server gave out")])


def _walk(directory: Path, after: Position) -> Iterator[tuple[Position, Path]]:
    """All files below a directory, by their names; of directories only real ones are entered."""
    try:
        if directory.is_symlink():
            return
        with os.scandir(directory) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return
    for entry in ordered:
        if (after and entry.name < after[0]) or not _is_text(entry.name):
            continue
        rest = after[1:] if after and entry.name == after[0] else ()
        if entry.is_dir(follow_symlinks=False):
            for names, path in _walk(Path(entry.path), rest):
                yield (entry.name, *names), path
        elif not (after and (entry.name,) == after):
            yield (entry.name,), Path(entry.path)


def _open(place: Place, path: Path) -> tuple[int, os.stat_result] | None:
    """A descriptor of a plain file that lies in a place; None when it does not."""
    try:
        # Only found, and not opened yet: a link may lead to a device, which does something when it is opened.
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    found = f"/proc/self/fd/{handle}"
    try:
        status = os.fstat(handle)
        # Where it really is, asked of what was found: a name may lead elsewhere a moment later.
        if stat.S_ISREG(status.st_mode) and os.readlink(found).startswith(f"{place.directory}{os.sep}"):
            return os.open(found, os.O_RDONLY | os.O_CLOEXEC), status
    except OSError:
        pass
    finally:
        os.close(handle)
    return None


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


def _manifest(place: Place) -> dict[str, tuple[int, str]]:
    """Size and digest of a checkpoint's files, as they were committed."""
    if place.kind != "checkpoint" or (opened := _open(place, place.directory / MANIFEST)) is None:
        return {}
    with open(opened[0], "rb") as file:
        data = file.read(MAX_MANIFEST_BYTES)
    try:
        described: Any = json.loads(data)["files"]
        return {str(each["path"]): (int(each["size"]), str(each["sha256"])) for each in described}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}


def _is_text(name: str) -> bool:
    """Whether JSON can carry a name; others are left out."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True

"""Artifacts: list and download the files that a job leaves."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response
from fastapi import Path as PathParameter
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from trainmaster.protocol.account_files import directory_below, files_in_order, has_entries, open_inside
from trainmaster.schema.reports import ArtifactPage, ArtifactResource
from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.core.job import Job
from trainmaster.server.core.reports import MAX_ID
from trainmaster.server.http.auth import Viewer
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import ok, resource
from trainmaster.server.http.errors import UnsatisfiableRangeError
from trainmaster.server.http.requests import PREFIX
from trainmaster.server.http.router import BINARY, BINARY_CONTENT, JobId, PageToken, PlainText, StrictRoute, answers
from trainmaster.server.storage import ARTIFACTS, Roots
from trainmaster.server.store import checkpoints, jobs
from trainmaster.server.store.page_tokens import bad_token, decode_position, encode_position, is_text
from trainmaster.server.store.scope import Scope

# The files that a job leaves: those in its output directory, and those of its committed checkpoints.
#
# Their paths are `output/<path there>` or `checkpoints/<checkpoint_id>/<path there>`. A link counts as a file when it
# leads to one in the same directory; other links are ignored.

OUTPUT = "output"
CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
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

    descriptor: int
    artifact: Artifact


def checkpoint_place(roots: Roots, checkpoint_id: str, path: str) -> ArtifactPlace:
    return ArtifactPlace(top=roots.path(ARTIFACTS, ""), directory=path, checkpoint_id=checkpoint_id)


def output_place(roots: Roots, job: Job) -> ArtifactPlace:
    return ArtifactPlace(top=roots.path(ARTIFACTS, ""), directory=f"{job.job_id}/{OUTPUT}")


def checkpoints_on_the_way(path: str) -> list[str]:
    """The ids of checkpoints that may have a file of this path; ids may have slashes."""
    top, _, rest = path.partition("/")
    ends = [at for at, character in enumerate(rest[: MAX_ID + 1]) if character == "/"]
    return [rest[:end] for end in ends] if top == CHECKPOINTS else []


def has_output(roots: Roots, job: Job) -> bool:
    return has_entries(roots.path(ARTIFACTS, ""), f"{job.job_id}/{OUTPUT}")


def files(place: ArtifactPlace, after: Position = ()) -> Iterator[Artifact]:
    """The files of a place, sorted by name, after a position if it is in this place."""
    rest = after[2:] if place.position == after[:2] else ()
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
                return OpenArtifact(opened[0], _artifact(place, name, opened[1], _manifest(place, directory)))
    raise NotFoundError(f"the job has no file {path!r}")


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


router = APIRouter(prefix=PREFIX, route_class=StrictRoute, tags=["artifacts"])

MAX_PLACES = 1000
"""Directories of checkpoints that one page reads: a job may have tens of thousands, most of them empty."""
_CHUNK = 1 << 20
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_FILE: dict[int | str, dict[str, Any]] = {
    200: {"description": "The content.", "content": BINARY_CONTENT},
    206: {"description": "The part of it that was asked for with `Range`.", "content": BINARY_CONTENT},
}


@router.get("/jobs/{job_id}/artifacts", **answers(ArtifactPage, 404))
async def list_artifacts(
    principal: Viewer,
    context: Context,
    job_id: JobId,
    kind: Annotated[str | None, Query(pattern="^(output|checkpoint)$", description="Only these.")] = None,
    checkpoint_id: Annotated[PlainText | None, Query(description="Only files of this checkpoint.")] = None,
    page_size: Annotated[int, Query(ge=1, le=1000)] = 100,
    page_token: PageToken = None,
) -> Response:
    """List the files that a job left: its output so far, and its committed checkpoints; also of a deleted one.

    Of a job with very many checkpoints a page may be short, also empty, and not be the last.
    """
    after = position_of_token(page_token) if page_token else ()

    def find(connection: Connection) -> tuple[list[ArtifactPlace], str | None]:
        job = jobs.get(connection, principal.scope, job_id, deleted=True)
        return _places(context.roots, connection, principal.scope, job, kind, checkpoint_id, after)

    places, following = await context.read(find)

    def take_snapshot() -> list[Artifact]:
        every = itertools.chain.from_iterable(files(place, after) for place in places)
        return list(itertools.islice(every, page_size + 1))

    found = await run_in_threadpool(take_snapshot)
    if len(found) > page_size:
        following = encode_position(found[page_size - 1].position)
    shown = [
        resource(
            ArtifactResource, each, kind=each.place.kind, checkpoint_id=each.place.checkpoint_id, size_bytes=each.size
        )
        for each in found[:page_size]
    ]
    return ok(ArtifactPage(artifacts=shown, next_page_token=following))


def _places(
    roots: Roots,
    connection: Connection,
    scope: Scope,
    job: Job,
    kind: str | None,
    checkpoint_id: str | None,
    after: Position,
) -> tuple[list[ArtifactPlace], str | None]:
    """The directories that one page reads, and the token of the next page if there are more."""
    found: list[tuple[str, str]] = []
    start = after[1] if after and after[0] == "checkpoint" else ""
    if kind == "output" or (after and after[0] == "output"):
        pass
    elif checkpoint_id is not None:
        named = checkpoints.named(connection, scope, job.job_id, [checkpoint_id])
        found = [(each.checkpoint_id, each.path) for each in named if each.root == ARTIFACTS]
    else:
        found = checkpoints.paths(connection, scope, job.job_id, root=ARTIFACTS, start=start, limit=MAX_PLACES + 1)
    places = [checkpoint_place(roots, *each) for each in found]
    if len(places) > MAX_PLACES:
        return places[:MAX_PLACES], encode_position(places[MAX_PLACES].position)
    if kind in (None, "output") and checkpoint_id is None:
        places.append(output_place(roots, job))
    return places, None


@router.get("/jobs/{job_id}/artifacts/{path:path}", **answers(None, 404, 416, also=_FILE))
async def get_artifact(
    request: Request,
    principal: Viewer,
    context: Context,
    job_id: JobId,
    path: Annotated[str, PathParameter(max_length=4096, description="As the list has it.")],
) -> Response:
    """Fetch a file. A part of it with `Range`, and with `If-Range` only while it is what it was."""

    def find(connection: Connection) -> list[ArtifactPlace]:
        job = jobs.get(connection, principal.scope, job_id, deleted=True)
        ids = checkpoints_on_the_way(path)
        return [
            output_place(context.roots, job),
            *(
                checkpoint_place(context.roots, each.checkpoint_id, each.path)
                for each in checkpoints.named(connection, principal.scope, job.job_id, ids)
                if each.root == ARTIFACTS
            ),
        ]

    return await wanted_part(request, await context.read(find), path)


async def wanted_part(request: Request, places: Sequence[ArtifactPlace], path: str) -> Response:
    """The file of a path, or the part of it that a request asks for."""
    opened = await run_in_threadpool(open_file, places, path)
    try:
        begin, end = part_of(request, opened.artifact)
    except BaseException:
        os.close(opened.descriptor)
        raise
    return FileStream(opened, begin, end)


class FileStream(StreamingResponse):
    """Sends a part of an open file, and closes the file in any case."""

    def __init__(self, opened: OpenArtifact, begin: int, end: int) -> None:
        self._opened = opened
        artifact = opened.artifact
        name = artifact.path.rpartition("/")[2]
        headers = {
            "Accept-Ranges": "bytes",
            "Content-Length": str(end - begin),
            "Content-Disposition": f"attachment; filename*=utf-8''{quote(name, safe='')}",
            "ETag": artifact.etag,
        }
        partial = (begin, end) != (0, artifact.size)
        if partial:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{artifact.size}"
        status = HTTPStatus.PARTIAL_CONTENT if partial else HTTPStatus.OK
        super().__init__(read_part(opened, begin, end), status_code=status, headers=headers, media_type=BINARY)

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            os.close(self._opened.descriptor)


async def read_part(opened: OpenArtifact, begin: int, end: int) -> AsyncGenerator[bytes, None]:
    while begin < end:
        data = await run_in_threadpool(os.pread, opened.descriptor, min(_CHUNK, end - begin), begin)
        if not data:
            # The head of the answer said how long it is: the client sees that it broke off.
            raise OSError(f"{opened.artifact.path} became shorter while it was sent")
        begin += len(data)
        yield data


def part_of(request: Request, artifact: Artifact) -> tuple[int, int]:
    """Begin and end of the part that a request asks for; a malformed range means the whole file."""
    size = artifact.size
    wanted = _RANGE.fullmatch(request.headers.get("range", "").replace(" ", ""))
    if wanted is None or not any(wanted.groups()) or request.headers.get("if-range", artifact.etag) != artifact.etag:
        return 0, size
    first, last = wanted.groups()
    if not first:
        begin, end = max(0, size - int(last)), size
    else:
        begin, end = int(first), min(int(last) + 1, size) if last else size
        if last and int(last) < begin:
            return 0, size
    if begin >= size:
        raise UnsatisfiableRangeError(f"the file has {size} bytes")
    return begin, end

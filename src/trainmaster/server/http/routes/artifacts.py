"""Artifacts: list and download the files that a job leaves."""

from __future__ import annotations

import itertools
import re
from collections.abc import AsyncGenerator, Sequence
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response
from fastapi import Path as PathParameter
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from trainmaster.schema.reports import ArtifactPage, ArtifactResource
from trainmaster.server.core.job import Job
from trainmaster.server.http.artifact_files import (
    Artifact,
    ArtifactPlace,
    OpenArtifact,
    Position,
    checkpoint_place,
    checkpoints_on_the_way,
    files,
    open_file,
    output_place,
    position_of_token,
)
from trainmaster.server.http.auth import Viewer
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import ok, resource
from trainmaster.server.http.errors import UnsatisfiableRangeError
from trainmaster.server.http.requests import PREFIX
from trainmaster.server.http.router import BINARY, BINARY_CONTENT, JobId, PageToken, PlainText, StrictRoute, answers
from trainmaster.server.storage import ARTIFACTS, Roots
from trainmaster.server.store import checkpoints, jobs
from trainmaster.server.store.page_tokens import encode_position
from trainmaster.server.store.scope import Scope

router = APIRouter(prefix=PREFIX, route_class=StrictRoute, tags=["artifacts"])

MAX_PLACES = 1000
"""Directories of checkpoints that one page reads: a job may have tens of thousands, most of them empty."""
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
        opened.close()
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
            self._opened.close()


async def read_part(opened: OpenArtifact, begin: int, end: int) -> AsyncGenerator[bytes, None]:
    while begin < end:
        data = await run_in_threadpool(opened.read, begin, min(begin + opened.piece_bytes, end))
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

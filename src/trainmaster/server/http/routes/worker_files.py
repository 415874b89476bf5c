"""Routes by which the ranks of an attempt that runs elsewhere save and resume, and its workers deliver results.

A small object store for one attempt, valid while that attempt is the job's current one. `attempt_store` has the files;
here is who may ask, and the check at a commit, which one transaction makes together with the rename.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from email.utils import format_datetime
from http import HTTPStatus
from itertools import islice
from pathlib import Path as FilePath
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from sqlalchemy import Connection
from typing_extensions import TypedDict

from trainmaster.protocol.attempt_files import DRAFT, MOST_LISTED, MOST_OBJECT_BYTES, MOST_PIECE_BYTES, FileArea
from trainmaster.schema import Doc
from trainmaster.server import failpoints
from trainmaster.server.attempt_store import MANIFEST, FileStatus
from trainmaster.server.http.artifact_files import Artifact, ArtifactPlace, opened_here
from trainmaster.server.http.attempt_files import AttemptFiles, Files, answered, owning
from trainmaster.server.http.envelope import Nothing, ok
from trainmaster.server.http.errors import ForeignVersionError, wrong
from trainmaster.server.http.requests import PREFIX, read_body
from trainmaster.server.http.router import (
    BINARY,
    BINARY_CONTENT,
    BY_RANK_TOKEN,
    BY_TOKEN,
    MAX_OFFSET,
    StrictRoute,
    answers,
)
from trainmaster.server.http.routes.artifacts import FileStream, part_of
from trainmaster.server.store import jobs
from trainmaster.server.store.scope import Scope

router = APIRouter(prefix=f"{PREFIX}/worker/attempts/{{attempt_id}}/files", route_class=StrictRoute, tags=["worker"])


class StoredFile(TypedDict):
    """A file of an attempt."""

    path: str
    size: int
    version: Annotated[str, Doc("Another one after every change.")]
    modified_at: Annotated[float, Doc("Unix time.")]


class FilePage(TypedDict):
    """Files of an attempt, or directories of them."""

    files: Annotated[list[StoredFile], Doc("Sorted by the names in their paths.")]
    directories: Annotated[list[str], Doc("Names directly below the prefix, if they were asked for instead.")]
    next_after: Annotated[str | None, Doc("`after` of the next page; null on the last.")]


class FileVersion(TypedDict):
    """A file that was written."""

    version: str


class NextPiece(TypedDict):
    """Where the next piece of a file begins."""

    next_offset: int


RelativePath = Annotated[str, Path(max_length=4096, description="Relative to the area.")]
Upload = Annotated[
    str, Query(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="Chosen by the client, another one for each file.")
]


LOCK = ".lock"
"""The name of the locks of `jobs.lock`: processes of this machine lock the file, ranks elsewhere renew its content."""
_HELD_S = 60.0
_TOKENS = [*BY_RANK_TOKEN, *BY_TOKEN]
_RAW = {"content": BINARY_CONTENT}
_HEADERS = [
    {
        "name": name,
        "in": "header",
        "required": False,
        "description": description,
        "schema": {"type": "string"},
    }
    for name, description in (
        ("If-None-Match", "`*`: only if there is no such file."),
        ("If-Match", "Only if the file has this version, in quotes."),
    )
]
_CONTENT: dict[int | str, dict[str, Any]] = {
    200: {"description": "The content.", "content": BINARY_CONTENT},
    206: {"description": "The part of it that was asked for with `Range`.", "content": BINARY_CONTENT},
}


@router.get("/{area}", **answers(FilePage, 404, 410, security=BY_RANK_TOKEN))
async def list_files(
    files: Files,
    prefix: Annotated[str, Query(max_length=4096, description="The directory to list, with all below it.")] = "",
    after: Annotated[str, Query(max_length=4096, description="Only files after this path.")] = "",
    directories: Annotated[bool, Query(description="List only the directories directly in it.")] = False,
) -> Response:
    """List what an attempt may read. Files that are not committed are in no list."""
    _require_readable(files)
    store = files.store
    if directories:
        names = await files.do(lambda: store.directories(files.area, prefix))
        return ok(FilePage(files=[], directories=names, next_after=None))
    found = await files.do(lambda: list(islice(store.files(files.area, prefix, after), MOST_LISTED + 1)))
    page = [
        StoredFile(path=each.path, size=each.size, version=each.version, modified_at=each.modified_at)
        for each in found[:MOST_LISTED]
    ]
    following = page[-1]["path"] if len(found) > MOST_LISTED else None
    return ok(FilePage(files=page, directories=[], next_after=following))


@router.get("/{area}/{path:path}", **answers(None, 404, 410, 416, security=BY_RANK_TOKEN, also=_CONTENT))
async def get_file(request: Request, files: Files, path: RelativePath) -> Response:
    """Fetch a file. A part of it with `Range`, and with `If-Range` only while it is what it was."""
    _require_readable(files)
    if (owner := await _held_here(files, path)) is not None:
        # As a rank elsewhere would have written it; looked at again when it is wanted again.
        held = {"owner": owner, "expires_at": files.context.clock() + _HELD_S}
        return Response(json.dumps(held), headers={"ETag": '"held"'}, media_type=BINARY)
    descriptor, status = await files.do(lambda: files.store.open(files.area, path))
    opened = opened_here(descriptor, _artifact(status))
    try:
        begin, end = part_of(request, opened.artifact)
    except BaseException:
        os.close(descriptor)
        raise
    return FileStream(opened, begin, end)


@router.head(
    "/{area}/{path:path}",
    **answers(None, 404, 410, security=BY_RANK_TOKEN, also={HTTPStatus.OK: {"description": "It is here."}}),
)
async def head_file(files: Files, path: RelativePath) -> Response:
    """Ask for the size and the version of a file."""
    _require_readable(files)
    descriptor, status = await files.do(lambda: files.store.open(files.area, path))
    os.close(descriptor)
    modified = format_datetime(datetime.fromtimestamp(status.modified_at, UTC), usegmt=True)
    headers = {"Content-Length": str(status.size), "ETag": f'"{status.version}"', "Last-Modified": modified}
    return Response(headers=headers)


@router.put(
    "/{area}/{path:path}",
    **answers(None, 404, 409, 410, 412, 413, raw_body=_RAW, parameters=_HEADERS, security=_TOKENS),
)
async def put_file(
    request: Request,
    files: Files,
    path: RelativePath,
    upload: Upload | None = None,
    offset: Annotated[int | None, Query(ge=0, le=MAX_OFFSET, description="Where the piece begins.")] = None,
) -> Response:
    """Write a small file, or a piece of a large one.

    With `upload` and `offset` the body is a piece, at most 16 MiB, which nobody sees until POST commits the file. Bytes
    that are there already are passed over; 409 says where to continue. Without them, the body is a small file among the
    checkpoints. A manifest commits its save as a checkpoint, if no checkpoint is there yet and this attempt owns the
    job.
    """
    _require_writable(files)
    if (upload is None) != (offset is None):
        raise wrong("offset", "goes with upload, and upload with it")
    store = files.store
    if upload is not None and offset is not None:
        data = await read_body(request, MOST_PIECE_BYTES)
        found, begin = upload, offset
        return ok(NextPiece(next_offset=await files.do(lambda: store.append(files.area, path, found, begin, data))))
    if files.area is FileArea.OUTPUT:
        raise wrong("upload", "results are sent in pieces")
    data = await read_body(request, MOST_OBJECT_BYTES)
    create, version = _conditions(request)
    if path.rpartition("/")[2] == MANIFEST and not any(map(DRAFT.fullmatch, path.split("/"))):
        return await _commit(files, path, data, create=create)
    if await _held_here(files, path) is not None:
        raise ForeignVersionError
    written = await files.do(lambda: store.put(path, data, create=create, version=version))
    if written is None:
        raise ForeignVersionError
    return ok(FileVersion(version=written))


@router.post("/{area}/{path:path}", **answers(FileVersion, 404, 409, 410, security=_TOKENS))
async def finish_file(
    files: Files,
    path: RelativePath,
    upload: Upload,
    size: Annotated[int, Query(ge=0, le=MAX_OFFSET)],
    sha256: Annotated[str, Query(pattern=r"^[0-9a-f]{64}$", description="Of the whole file.")],
    node: Annotated[int | None, Query(ge=0, le=999_999, description="Of several nodes, which one left it.")] = None,
) -> Response:
    """Commit a file of which all pieces have arrived; may be repeated.

    Of results with the same path, the one of the node with the highest number stays.
    """
    _require_writable(files)
    if node is not None and files.area is not FileArea.OUTPUT:
        raise wrong("node", "is for results")
    failpoints.reach("file.before_finish")
    store = files.store
    version = await files.do(lambda: store.finish(files.area, path, upload, size=size, sha256=sha256, node=node))
    return ok(FileVersion(version=version))


@router.delete("/{area}/{path:path}", **answers(Nothing, 410, security=BY_RANK_TOKEN))
async def delete_file(files: Files, path: RelativePath) -> Response:
    """Remove a file, if it is there; by its manifest, a whole checkpoint."""
    if files.area is not FileArea.CHECKPOINTS:
        raise wrong("area", "only checkpoints can be removed")
    await files.do(lambda: files.store.delete(path))
    return ok(Nothing())


async def _held_here(files: AttemptFiles, path: str) -> str | None:
    """Who on this machine holds the lock that is asked for, if it is one; the lock of an attempt that is over goes."""
    if files.area is not FileArea.CHECKPOINTS or path.rpartition("/")[2] != LOCK:
        return None
    found = await files.do(lambda: files.store.lock_holder(path))
    if found is None or found.is_here:
        return found.owner if found is not None else None

    def is_over(connection: Connection) -> bool:
        job_id, _, number = found.owner.rpartition(".")
        known = next(iter(jobs.load(connection, Scope.everything(), [job_id])), None)
        return known is not None and (known.attempt is None or str(known.attempt.number) != number)

    if await files.context.read(is_over):
        await files.do(lambda: files.store.discard(path, found.version))
    return None


async def _commit(files: AttemptFiles, path: str, data: bytes, *, create: bool) -> Response:
    """Commit a save. The attempt owns its job in the very transaction that renames the files: no other attempt can be
    opened between the check and the rename."""
    if not create:
        raise wrong("If-None-Match", "must be *: a checkpoint is never replaced")
    save, sizes, manifest = await files.do(lambda: _manifest(data))
    commit = await files.do(lambda: files.store.prepare(path, save, sizes, manifest))
    failpoints.reach("file.before_commit")

    def work(connection: Connection) -> bool:
        owning(connection, files.job_id, files.number)
        with answered():
            return commit()

    if not await files.context.write(work):
        raise ForeignVersionError
    failpoints.reach("file.after_commit")
    await files.do(lambda: files.store.flush(path))
    return ok(FileVersion(version=""))


def _manifest(data: bytes) -> tuple[str, dict[str, int], bytes]:
    """The name of a save, its files with their sizes, and the manifest as it is stored: its files lie beside it then.

    The rest of it is for readers, who are tolerant.
    """
    try:
        document = json.loads(data)
        found = DRAFT.fullmatch(str(document["data"]))
        files = {str(each["path"]): int(each["size"]) for each in document["files"]}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise wrong("body", f"is no manifest: {type(error).__name__}: {error}") from None
    if found is None:
        raise wrong("body", "is no manifest of a save")
    return found["save"], files, json.dumps({**document, "data": ""}, indent=1).encode()


def _conditions(request: Request) -> tuple[bool, str | None]:
    create = request.headers.get("if-none-match")
    if create not in (None, "*"):
        raise wrong("If-None-Match", "must be *")
    version = request.headers.get("if-match")
    return create is not None, version.strip('"') if version is not None else None


def _require_readable(files: AttemptFiles) -> None:
    if files.area is FileArea.OUTPUT:
        raise wrong("area", "results are only written here")


def _require_writable(files: AttemptFiles) -> None:
    if files.area is FileArea.RESUME:
        raise wrong("area", "the checkpoint that is resumed from is only read")


def _artifact(status: FileStatus) -> Artifact:
    return Artifact(
        place=ArtifactPlace(top=FilePath(), directory=""),
        path=status.path,
        size=status.size,
        modified_at=status.modified_at,
        etag=f'"{status.version}"',
        sha256=None,
    )

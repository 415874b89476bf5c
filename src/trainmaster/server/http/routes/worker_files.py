"""Routes by which the ranks of an attempt that runs elsewhere save and resume, and its workers deliver results.

A small object store for one attempt, valid while that attempt is the job's current one. `attempt_store` has the files;
here is who may ask, and the check at a commit, which one transaction makes together with the rename.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import format_datetime
from http import HTTPStatus
from itertools import islice
from pathlib import Path as FilePath
from typing import Annotated, Any, NamedTuple, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool
from typing_extensions import TypedDict

from trainmaster.protocol.account_files import UnsafeFileError, User
from trainmaster.protocol.attempt_files import (
    DRAFT,
    MOST_LISTED,
    MOST_OBJECT_BYTES,
    MOST_PIECE_BYTES,
    FileArea,
)
from trainmaster.protocol.run_directory import StreamGapError
from trainmaster.schema import Doc
from trainmaster.server import failpoints
from trainmaster.server.attempt_store import (
    MANIFEST,
    AttemptStore,
    DigestError,
    FilePathError,
    FileStatus,
    IncompleteSaveError,
    ReadOnlyCheckpoint,
)
from trainmaster.server.coordinator.launch import checkpoints_home, is_confined
from trainmaster.server.core.errors import ConflictError, NotFoundError, StoreUnavailableError
from trainmaster.server.core.job import Attempt, Job
from trainmaster.server.http.auth import credential_of, guard
from trainmaster.server.http.context import ApiContext, Context
from trainmaster.server.http.envelope import Nothing, ok
from trainmaster.server.http.errors import (
    AttemptEndedError,
    ForeignVersionError,
    InvalidTokenError,
    StreamGapConflictError,
    wrong,
)
from trainmaster.server.http.requests import PREFIX, read_body
from trainmaster.server.http.router import BINARY_CONTENT, BY_RANK_TOKEN, BY_TOKEN, MAX_OFFSET, StrictRoute, answers
from trainmaster.server.http.routes.artifacts import Artifact, ArtifactPlace, FileStream, OpenArtifact, part_of
from trainmaster.server.storage import ARTIFACTS, URI, output_path
from trainmaster.server.store import accounts, attempts, checkpoints, jobs
from trainmaster.server.store.scope import Scope

T = TypeVar("T")

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


class Writer(NamedTuple):
    """An authenticated attempt and its files."""

    context: ApiContext
    attempt_id: str
    job_id: str
    number: int
    store: AttemptStore


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asker:
    """What of an attempt's files somebody asks for."""

    writer: Writer
    area: FileArea
    path: str

    async def do(self, work: Callable[[], T]) -> T:
        """Do file work in a thread, with its errors as answers."""

        def guarded() -> T:
            with _answered():
                return work()

        return await run_in_threadpool(guarded)


@contextlib.contextmanager
def _answered() -> Iterator[None]:
    try:
        yield
    except FilePathError as error:
        raise wrong("path", str(error)) from None
    except StreamGapError as gap:
        raise StreamGapConflictError(gap.next_offset) from None
    except DigestError as error:
        raise wrong("sha256", str(error)) from None
    except (IncompleteSaveError, UnsafeFileError) as error:
        raise ConflictError(str(error)) from None
    except FileNotFoundError:
        raise NotFoundError("there is no such file") from None
    except FileExistsError:
        raise ConflictError("there is a file in place of a directory, or a directory in place of the file") from None
    except OSError as error:
        # The client tries again: somebody has to make room.
        raise StoreUnavailableError(f"the server's artifacts cannot be read or written: {error.strerror}") from error


AttemptId = Annotated[str, Path(description="`<job_id>.<number>`", max_length=256)]
Area = Annotated[FileArea, Path(description="`checkpoints`, `resume` (read only) or `output` (write only).")]
RelativePath = Annotated[str, Path(max_length=4096, description="Relative to the area.")]
Upload = Annotated[
    str, Query(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="Chosen by the client, another one for each file.")
]


@guard
async def _asker(request: Request, context: Context, attempt_id: AttemptId, area: Area) -> _Asker:
    token = credential_of(request)

    def find(connection: Connection) -> Writer:
        try:
            attempt = attempts.get(connection, Scope.everything(), attempt_id)
        except NotFoundError:
            raise InvalidTokenError("this token is not valid for this attempt") from None
        valid = [attempt.rank_token, *([attempt.token] if area is FileArea.OUTPUT else [])]
        if not any(hmac.compare_digest(each.encode(), token.encode()) for each in valid):
            raise InvalidTokenError("this token is not valid for this attempt")
        job_id = attempt_id.rpartition(".")[0]
        job = _owning(connection, job_id, attempt.number)
        store = _store(context, connection, job, attempt, f"{job_id}.{attempt.number}")
        return Writer(context, store.attempt_id, job_id, attempt.number, store)

    return _Asker(writer=await context.read(find), area=area, path="")


@guard
async def _file(asker: Annotated[_Asker, Depends(_asker)], path: RelativePath) -> _Asker:
    return _Asker(writer=asker.writer, area=asker.area, path=path)


Listed = Annotated[_Asker, Depends(_asker)]
Named = Annotated[_Asker, Depends(_file)]


def _owning(connection: Connection, job_id: str, number: int) -> Job:
    """The job, if this attempt is its current one."""
    job = jobs.get(connection, Scope.everything(), job_id, deleted=True)
    if job.attempt is None or job.attempt.number != number:
        raise AttemptEndedError("another attempt owns this job now, or none: nothing more is taken for this one")
    return job


def _store(context: ApiContext, connection: Connection, job: Job, attempt: Attempt, attempt_id: str) -> AttemptStore:
    scope, resume = Scope(job.account_id), None
    if attempt.resume_checkpoint_id is not None:
        with contextlib.suppress(NotFoundError):
            found = checkpoints.get(connection, scope, attempt.resume_checkpoint_id)
            if found.root != URI:
                top = context.roots.path(found.root, "")
                resume = ReadOnlyCheckpoint(top=top, directory=found.path, name=FilePath(found.path).name)
    # As for a promotion: an account's files belong to the user that its jobs run as here, if there is one.
    account = accounts.get(connection, scope, job.account_id)
    uid = account.uid if os.geteuid() == 0 else None
    return AttemptStore(
        artifacts=context.roots.path(ARTIFACTS, ""),
        attempt_id=attempt_id,
        checkpoints=checkpoints_home(job, confined=is_confined(account, context.settings)),
        output=output_path(job.job_id),
        resume=resume,
        user=None if uid in (None, os.geteuid()) else User.of(uid),
    )


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
    asker: Listed,
    prefix: Annotated[str, Query(max_length=4096, description="The directory to list, with all below it.")] = "",
    after: Annotated[str, Query(max_length=4096, description="Only files after this path.")] = "",
    directories: Annotated[bool, Query(description="List only the directories directly in it.")] = False,
) -> Response:
    """List what an attempt may read. Files that are not committed are in no list."""
    _require_readable(asker)
    store = asker.writer.store
    if directories:
        names = await asker.do(lambda: store.directories(asker.area, prefix))
        return ok(FilePage(files=[], directories=names, next_after=None))
    found = await asker.do(lambda: list(islice(store.files(asker.area, prefix, after), MOST_LISTED + 1)))
    page = [StoredFile(**each._asdict()) for each in found[:MOST_LISTED]]
    following = page[-1]["path"] if len(found) > MOST_LISTED else None
    return ok(FilePage(files=page, directories=[], next_after=following))


@router.get("/{area}/{path:path}", **answers(None, 404, 410, 416, security=BY_RANK_TOKEN, also=_CONTENT))
async def get_file(request: Request, asker: Named) -> Response:
    """Fetch a file. A part of it with `Range`, and with `If-Range` only while it is what it was."""
    _require_readable(asker)
    descriptor, status = await asker.do(lambda: asker.writer.store.open(asker.area, asker.path))
    opened = OpenArtifact(descriptor, _artifact(status))
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
async def head_file(asker: Named) -> Response:
    """Ask for the size and the version of a file."""
    _require_readable(asker)
    descriptor, status = await asker.do(lambda: asker.writer.store.open(asker.area, asker.path))
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
    asker: Named,
    upload: Upload | None = None,
    offset: Annotated[int | None, Query(ge=0, le=MAX_OFFSET, description="Where the piece begins.")] = None,
) -> Response:
    """Write a small file, or a piece of a large one.

    With `upload` and `offset` the body is a piece, at most 16 MiB, which nobody sees until POST commits the file. Bytes
    that are there already are passed over; 409 says where to continue. Without them, the body is a small file among the
    checkpoints. A manifest commits its save as a checkpoint, if no checkpoint is there yet and this attempt owns the
    job.
    """
    _require_writable(asker)
    if (upload is None) != (offset is None):
        raise wrong("offset", "goes with upload, and upload with it")
    store = asker.writer.store
    if upload is not None and offset is not None:
        data = await read_body(request, MOST_PIECE_BYTES)
        found, begin = upload, offset
        return ok(
            NextPiece(next_offset=await asker.do(lambda: store.append(asker.area, asker.path, found, begin, data)))
        )
    if asker.area is FileArea.OUTPUT:
        raise wrong("upload", "results are sent in pieces")
    data = await read_body(request, MOST_OBJECT_BYTES)
    create, version = _conditions(request)
    if asker.path.rpartition("/")[2] == MANIFEST and not any(map(DRAFT.fullmatch, asker.path.split("/"))):
        return await _commit(asker, data, create=create)
    written = await asker.do(lambda: store.put(asker.path, data, create=create, version=version))
    if written is None:
        raise ForeignVersionError
    return ok(FileVersion(version=written))


@router.post("/{area}/{path:path}", **answers(FileVersion, 404, 409, 410, security=_TOKENS))
async def finish_file(
    asker: Named,
    upload: Upload,
    size: Annotated[int, Query(ge=0, le=MAX_OFFSET)],
    sha256: Annotated[str, Query(pattern=r"^[0-9a-f]{64}$", description="Of the whole file.")],
    node: Annotated[int | None, Query(ge=0, le=999_999, description="Of several nodes, which one left it.")] = None,
) -> Response:
    """Commit a file of which all pieces have arrived; may be repeated.

    Of results with the same path, the one of the node with the highest number stays.
    """
    _require_writable(asker)
    if node is not None and asker.area is not FileArea.OUTPUT:
        raise wrong("node", "is for results")
    failpoints.reach("file.before_finish")
    store = asker.writer.store
    version = await asker.do(lambda: store.finish(asker.area, asker.path, upload, size=size, sha256=sha256, node=node))
    return ok(FileVersion(version=version))


@router.delete("/{area}/{path:path}", **answers(Nothing, 410, security=BY_RANK_TOKEN))
async def delete_file(asker: Named) -> Response:
    """Remove a file, if it is there; by its manifest, a whole checkpoint."""
    if asker.area is not FileArea.CHECKPOINTS:
        raise wrong("area", "only checkpoints can be removed")
    await asker.do(lambda: asker.writer.store.delete(asker.path))
    return ok(Nothing())


async def _commit(asker: _Asker, data: bytes, *, create: bool) -> Response:
    """Commit a save. The attempt owns its job in the very transaction that renames the files: no other attempt can be
    opened between the check and the rename."""
    if not create:
        raise wrong("If-None-Match", "must be *: a checkpoint is never replaced")
    save, files, manifest = _manifest(data)
    writer = asker.writer
    commit = await asker.do(lambda: writer.store.prepare(asker.path, save, files, manifest))
    failpoints.reach("file.before_commit")

    def work(connection: Connection) -> bool:
        _owning(connection, writer.job_id, writer.number)
        with _answered():
            return commit()

    if not await writer.context.write(work):
        raise ForeignVersionError
    failpoints.reach("file.after_commit")
    await asker.do(lambda: writer.store.flush(asker.path))
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


def _require_readable(asker: _Asker) -> None:
    if asker.area is FileArea.OUTPUT:
        raise wrong("area", "results are only written here")


def _require_writable(asker: _Asker) -> None:
    if asker.area is FileArea.RESUME:
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

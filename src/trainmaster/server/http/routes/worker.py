"""Routes of workers that cannot reach the server's files: they report here and wait for control documents.

Workers and ranks have one token each, valid for their attempt; the ranks' only shows who owns the job. All may repeat.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse
from typing_extensions import TypedDict

from trainmaster.protocol.documents import read_document
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.run_directory import CONTROL, RENDEZVOUS, REQUEST, RunDirectory, StreamGapError
from trainmaster.protocol.secrets import Secrets
from trainmaster.schema import Doc
from trainmaster.server.core.errors import NotFoundError, StoreUnavailableError
from trainmaster.server.core.fields import MAX_INTEGER
from trainmaster.server.core.job import Attempt
from trainmaster.server.core.spec.documents import parse
from trainmaster.server.http.auth import credential_of, guard
from trainmaster.server.http.context import ApiContext, Context
from trainmaster.server.http.envelope import Nothing, ok, ok_document
from trainmaster.server.http.errors import AttemptEndedError, InvalidTokenError, StreamGapConflictError, wrong
from trainmaster.server.http.followers import followers_of
from trainmaster.server.http.requests import PREFIX, parse_json, read_body, read_model
from trainmaster.server.http.router import (
    BINARY,
    BINARY_CONTENT,
    BY_RANK_TOKEN,
    BY_TOKEN,
    MAX_OFFSET,
    StrictRoute,
    answers,
)
from trainmaster.server.storage import ARTIFACTS, run_directory
from trainmaster.server.store import attempts, jobs
from trainmaster.server.store.scope import Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenControl:
    """The control document of an attempt, as it was last seen."""

    stamp: tuple[int, int] | None = None
    """Identifies a version of the document without reading it."""
    document: dict[str, Any] | None = field(default=None, compare=False)

    def later_than(self, seq: int) -> dict[str, Any] | None:
        found = self.document
        return found if found is not None and int(found.get("seq", 0)) > seq else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSource:
    job_id: str
    attempt: int
    directory: RunDirectory = field(compare=False, repr=False)

    def take_snapshot(self, connection: Connection, before: SeenControl | None, *, changed: bool) -> SeenControl:  # noqa: ARG002 - the document is a file
        try:
            found = os.stat(self.directory.path / CONTROL)
        except (FileNotFoundError, NotADirectoryError):
            return SeenControl()
        stamp = (found.st_mtime_ns, found.st_ino)
        if before is not None and before.stamp == stamp:
            return before
        return SeenControl(stamp=stamp, document=self.directory.document(CONTROL))


Document = dict[str, Any]


class Claimant(BaseModel):
    """Who wants to run a node of an attempt. What a newer worker says beyond this is passed over."""

    model_config = ConfigDict(extra="ignore")

    nonce: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = Field(
        description="The same claimant sends the same one again."
    )
    pid: Annotated[int, Field(ge=1, le=MAX_INTEGER)]
    start_time: Annotated[int, Field(ge=0, le=2**63 - 1)]
    boot_id: Annotated[str, StringConstraints(max_length=128)]
    host: Annotated[str, StringConstraints(max_length=256)] = ""


class ExitDocument(BaseModel):
    """The least that the end of a node must say."""

    model_config = ConfigDict(extra="allow")

    reason: Reason
    message: str = ""
    ended_at: float


class Granted(TypedDict):
    """Whether the claimant has the node."""

    granted: bool


class NextOffset(TypedDict):
    """Where a stream ends now."""

    next_offset: int


class Ownership(TypedDict):
    """Whether an attempt may commit checkpoints of its job."""

    owner: bool


class SecretValues(TypedDict):
    """The secrets of a job, for the workers of its attempt alone."""

    environment: Annotated[dict[str, str], Doc("Variables of the job's processes.")]
    tokens: Annotated[
        dict[str, str], Doc("For the steps that prepare the job; the job's own processes do not see them.")
    ]


router = APIRouter(prefix=f"{PREFIX}/worker/attempts/{{attempt_id}}", route_class=StrictRoute, tags=["worker"])

T = TypeVar("T")

NOT_TO_BE_KEPT = {"Cache-Control": "no-store"}

_NODE = re.compile(r"nodes/(\d{1,6})/.*", re.DOTALL)
_ARCHIVE: dict[int | str, dict[str, Any]] = {200: {"description": "The archive.", "content": BINARY_CONTENT}}
_DOCUMENT_BODY = {"content": {"application/json": {"schema": {"type": "object"}}}, "required": True}

AttemptId = Annotated[str, Path(description="`<job_id>.<number>`", max_length=256)]
NodeNumber = Annotated[int, Path(ge=0, le=999_999)]
FilePath = Annotated[str, Path(max_length=256, description="Relative to the attempt's run directory.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteWorker:
    """An authenticated worker, and the server's replica of its run directory."""

    context: ApiContext
    attempt_id: str
    job_id: str
    number: int
    nodes: int
    directory: RunDirectory

    async def report(self, write: Callable[[], T]) -> T:
        """Write to the run directory, and hint the coordinator. Where the disk is full, the worker tries again."""

        def work() -> T:
            if not (self.directory.path / REQUEST).exists():
                raise NotFoundError("the run directory of this attempt is gone")
            try:
                return write()
            except OSError as error:
                raise StoreUnavailableError(f"the run directory cannot be written: {error.strerror}") from error

        answer = await run_in_threadpool(work)
        self.context.hint(self.attempt_id)
        return answer

    def check_node(self, name: str) -> None:
        """Refuse the name of a file of a node that the attempt does not have."""
        if (match := _NODE.fullmatch(name)) is not None and int(match[1]) >= self.nodes:
            raise wrong("path", f"the attempt has {self.nodes} nodes")


@guard
async def _remote_worker(request: Request, context: Context, attempt_id: AttemptId) -> RemoteWorker:
    attempt = await _attempt(request, context, attempt_id, lambda attempt: attempt.token)
    if attempt.ended_at is not None:
        # A worker sends its exit document last, so nothing that belongs to the attempt is refused here.
        raise AttemptEndedError
    job_id = attempt_id.rpartition(".")[0]
    return RemoteWorker(
        context=context,
        attempt_id=f"{job_id}.{attempt.number}",
        job_id=job_id,
        number=attempt.number,
        nodes=len(attempt.shares),
        directory=run_directory(context.roots, job_id, attempt.number),
    )


@guard
async def _rank(request: Request, context: Context, attempt_id: AttemptId) -> Attempt:
    return await _attempt(request, context, attempt_id, lambda attempt: attempt.rank_token)


async def _attempt(
    request: Request, context: ApiContext, attempt_id: str, token_of: Callable[[Attempt], str]
) -> Attempt:
    try:
        attempt = await context.read(attempts.get, Scope.everything(), attempt_id)
    except NotFoundError:
        raise InvalidTokenError("this token is not valid for this attempt") from None
    if not hmac.compare_digest(token_of(attempt).encode(), credential_of(request).encode()):
        raise InvalidTokenError("this token is not valid for this attempt")
    return attempt


Worker = Annotated[RemoteWorker, Depends(_remote_worker)]
Rank = Annotated[Attempt, Depends(_rank)]
"""The attempt of an authenticated rank, ended or not."""


@router.get("/request", **answers(Document, 404, 410, security=BY_TOKEN))
async def get_request(worker: Worker) -> Response:
    """Fetch what the attempt is asked to do."""
    # The server's own document, as large as the job's parameters and its list of files make it.
    if (document := await run_in_threadpool(read_document, worker.directory.path / REQUEST)) is None:
        raise NotFoundError("the run directory of this attempt is gone")
    return ok_document(document)


@router.get("/package", **answers(None, 404, 410, security=BY_TOKEN, also=_ARCHIVE))
async def get_package(worker: Worker, context: Context) -> Response:  # noqa: ARG001 - which has a valid token
    """Fetch the worker itself: an archive that Python 3.11 or newer runs, for nodes without Trainmaster."""
    return FileResponse(await run_in_threadpool(context.worker_package), media_type=BINARY)


@router.get("/secrets", **answers(SecretValues, 404, 410, security=BY_TOKEN))
async def get_secrets(worker: Worker, context: Context) -> Response:
    """Fetch the values of the job's secrets, to be kept in memory alone. Good for as long as the attempt lives."""

    def find(connection: Connection) -> Secrets:
        job = jobs.get(connection, Scope.everything(), worker.job_id, deleted=True)
        return context.vault.secrets_for(connection, job)

    secrets = await context.read(find)
    saves_at = (await run_in_threadpool(worker.directory.request)).checkpoint_dir
    if (archive := context.roots.archive) is not None and saves_at.startswith(f"{archive.uri(ARTIFACTS)}/"):
        secrets = replace(secrets, environment={**archive.credentials(), **secrets.environment})
    return ok(secrets.to_json(), headers=NOT_TO_BE_KEPT)


@router.post("/claims/{node}", **answers(Granted, 404, 409, 410, body=Claimant, required=True, security=BY_TOKEN))
async def claim(request: Request, worker: Worker, node: NodeNumber) -> Response:
    """Claim a node of the attempt, before anything of it runs. Only one claimant ever gets it."""
    claimant = await read_model(request, Claimant)
    if node >= worker.nodes:
        raise NotFoundError(f"the attempt has {worker.nodes} nodes")
    granted = await worker.report(lambda: worker.directory.claim(node, claimant.model_dump()))
    return ok(Granted(granted=granted))


@router.post(
    "/streams/{stream:path}",
    **answers(NextOffset, 404, 409, 410, 413, raw_body={"content": BINARY_CONTENT}, security=BY_TOKEN),
)
async def append(
    request: Request, worker: Worker, stream: FilePath, offset: Annotated[int, Query(ge=0, le=MAX_OFFSET)]
) -> Response:
    """Add bytes to a stream. Bytes that are there already are passed over."""
    worker.check_node(stream)
    data = await read_body(request)

    def write() -> int:
        try:
            return worker.directory.append(stream, offset, data)
        except StreamGapError as gap:
            raise StreamGapConflictError(gap.next_offset) from None
        except ValueError as error:
            raise wrong("stream", str(error)) from None

    return ok(NextOffset(next_offset=await worker.report(write)))


@router.put(
    "/documents/{document:path}", **answers(Nothing, 404, 409, 410, 413, raw_body=_DOCUMENT_BODY, security=BY_TOKEN)
)
async def put_document(request: Request, worker: Worker, document: FilePath) -> Response:
    """Replace a document."""
    worker.check_node(document)
    content = parse_json(await read_body(request))
    if not isinstance(content, dict):
        raise wrong("body", "must be an object")
    if document.endswith("/exit.json"):
        parse(ExitDocument, content)

    def write() -> None:
        try:
            worker.directory.put_document(document, content)
        except ValueError as error:
            raise wrong("document", str(error)) from None

    await worker.report(write)
    return ok(Nothing())


@router.get("/documents/{document:path}", **answers(Document, 404, 410, security=BY_TOKEN))
async def get_document(worker: Worker, document: FilePath) -> Response:
    """Fetch what another node wrote: where the ranks meet."""
    found = await run_in_threadpool(worker.directory.document, RENDEZVOUS) if document == RENDEZVOUS else None
    if found is None:
        raise NotFoundError("there is no such document (yet)")
    return ok_document(found)


@router.get("/control", **answers(Document | None, 404, 410, security=BY_TOKEN))
async def control(
    request: Request,
    worker: Worker,
    after: Annotated[
        int,
        Query(
            ge=0, le=MAX_OFFSET, description="The `seq` of the last control document that was received; 0 if none was."
        ),
    ] = 0,
    wait_s: Annotated[float, Query(ge=0, le=60, description="How long the answer may wait for a new one.")] = 0,
) -> Response:
    """Hear what is wanted of the attempt; null when there is nothing new."""
    source = ControlSource(job_id=worker.job_id, attempt=worker.number, directory=worker.directory)
    deadline = time.monotonic() + wait_s
    followers = followers_of(request)
    async with followers.watching(source) as watch:
        while True:
            changed = watch.changed
            seen: SeenControl = watch.seen()
            found = seen.later_than(after)
            left_s = deadline - time.monotonic()
            if found is not None or left_s <= 0 or followers.closed:
                return ok_document(found)
            try:
                await asyncio.wait_for(changed.wait(), left_s)
            except TimeoutError:
                continue


@router.get("/owner", **answers(Ownership, 404, security=BY_RANK_TOKEN))
async def owner(rank: Rank, context: Context, attempt_id: AttemptId) -> Response:
    """Ask whether this attempt may commit checkpoints of its job: only the current one may. Its ranks' token is due."""

    def ask(connection: Connection) -> bool:
        job = jobs.get(connection, Scope.everything(), attempt_id.rpartition(".")[0], deleted=True)
        return job.attempt is not None and job.attempt.number == rank.number

    return ok(Ownership(owner=await context.read(ask)))

"""Blobs: files that clients upload by content hash, for the jobs that name them."""

from __future__ import annotations

import hashlib
import os
import secrets
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse

from trainmaster.schema.reports import BlobResource
from trainmaster.server.coordinator.restoring import bring_blob
from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.errors import NotFoundError, StoreUnavailableError
from trainmaster.server.http.auth import Manager, Principal, credential_of, guard, require
from trainmaster.server.http.context import ApiContext, Context
from trainmaster.server.http.envelope import Ok, ok
from trainmaster.server.http.errors import InvalidTokenError, wrong
from trainmaster.server.http.requests import PREFIX, bounded_pieces
from trainmaster.server.http.router import BINARY, BINARY_CONTENT, BY_KEY_OR_TOKEN, Sha256, StrictRoute, answers
from trainmaster.server.storage import BLOBS, blob_path
from trainmaster.server.store import attempts, job_inputs, jobs
from trainmaster.server.store.job_inputs import Blob
from trainmaster.server.store.scope import Scope

router = APIRouter(prefix=PREFIX, route_class=StrictRoute, tags=["blobs"])

_BUFFER_BYTES = 1 << 20
"""How much is received before a thread writes it: a thread for each packet would cost more than the writing."""
_FILE: dict[int | str, dict[str, Any]] = {200: {"description": "The content.", "content": BINARY_CONTENT}}


@router.put(
    "/blobs/{sha256}",
    **answers(
        BlobResource,
        413,
        raw_body={"required": True, "content": BINARY_CONTENT},
        also={HTTPStatus.CREATED: {"model": Ok[BlobResource], "description": "It was not here before."}},
    ),
)
async def put_blob(request: Request, principal: Manager, context: Context, sha256: Sha256) -> Response:
    """Ship a file. Shipping it again changes nothing; a file that no job uses is removed after a day."""
    target = blob_file(context, principal.account_id, sha256)
    temporary = target.with_name(f".{sha256}.{secrets.token_hex(8)}")
    try:
        size = await _take(request, temporary, sha256, context.settings.max_blob_bytes)
        await run_in_threadpool(_store, context, principal.account_id, sha256, temporary)
        await run_in_threadpool(os.replace, temporary, target)
    finally:
        await run_in_threadpool(temporary.unlink, missing_ok=True)

    def record(connection: Connection) -> bool:
        known = job_inputs.get_blob(connection, principal.scope, sha256) is not None
        job_inputs.put_blob(connection, principal.scope, sha256, size, context.clock())
        return known

    known = await context.write(record)
    if not await run_in_threadpool(target.exists):
        raise StoreUnavailableError("the file was collected in the very moment it was shipped; ship it again")
    return ok(BlobResource(sha256=sha256, size_bytes=size), HTTPStatus.OK if known else HTTPStatus.CREATED)


@router.get("/blobs/{sha256}", **answers(None, 404, security=BY_KEY_OR_TOKEN, also=_FILE))
@guard
async def get_blob(request: Request, context: Context, sha256: Sha256) -> Response:
    """Fetch a file. A worker's token is good for the files that its job names."""
    return await _file(request, context, sha256)


@router.head(
    "/blobs/{sha256}",
    **answers(None, 404, security=BY_KEY_OR_TOKEN, also={HTTPStatus.OK: {"description": "It is here."}}),
)
@guard
async def head_blob(request: Request, context: Context, sha256: Sha256) -> Response:
    """Ask whether a file is here."""
    return await _file(request, context, sha256)


async def _file(request: Request, context: ApiContext, sha256: str) -> Response:
    principal: Principal | None = request.scope["state"]["principal"]
    if principal is not None:
        require(request, KeyScope.VIEW)

    def find(connection: Connection) -> Blob | None:
        scope = principal.scope if principal else _scope_of_token(connection, credential_of(request), sha256)
        return job_inputs.get_blob(connection, scope, sha256)

    blob = await context.read(find)
    if blob is None or not await run_in_threadpool(bring_blob, context.roots, blob.account_id, sha256):
        raise NotFoundError("there is no such blob")
    return FileResponse(blob_file(context, blob.account_id, sha256), media_type=BINARY, headers={"ETag": f'"{sha256}"'})


def _scope_of_token(connection: Connection, token: str, sha256: str) -> Scope:
    """The account of an attempt whose launch names a blob."""
    everything = Scope.everything()
    if (job_id := attempts.job_of_token(connection, everything, token)) is None:
        raise InvalidTokenError
    job = jobs.get(connection, everything, job_id, deleted=True)
    files = (job.spec.get("workload") or {}).get("files") or ()
    if all(file.get("sha256") != sha256 for file in files):
        raise NotFoundError("the job names no such blob")
    return Scope(job.account_id)


def _store(context: ApiContext, account_id: str, sha256: str, path: Path) -> None:
    """Put a file on the object store, if there is one: other servers find it there."""
    if (archive := context.roots.archive) is not None:
        with open(path, "rb") as file:
            archive.send(f"{BLOBS}/{blob_path(account_id, sha256)}", file.fileno())


async def _take(request: Request, path: Path, sha256: str, limit: int) -> int:
    """Write the body to a file and check its digest."""
    pieces = bounded_pieces(request, limit)
    await run_in_threadpool(path.parent.mkdir, parents=True, exist_ok=True)
    digest = hashlib.sha256()
    size = 0
    with await run_in_threadpool(open, path, "xb") as file:

        def write(pieces: list[bytes]) -> None:
            for piece in pieces:
                digest.update(piece)
                file.write(piece)

        def finish() -> None:
            file.flush()
            os.fsync(file.fileno())

        waiting: list[bytes] = []
        held = 0
        async for piece in pieces:
            size += len(piece)
            waiting.append(piece)
            held += len(piece)
            if held >= _BUFFER_BYTES:
                await run_in_threadpool(write, waiting)
                waiting, held = [], 0
        await run_in_threadpool(write, waiting)
        if digest.hexdigest() != sha256:
            raise wrong("sha256", f"the content has the digest {digest.hexdigest()}, not {sha256}; was it cut off?")
        await run_in_threadpool(finish)
    return size


def blob_file(context: ApiContext, account_id: str, sha256: str) -> Path:
    return context.roots.path(BLOBS, blob_path(account_id, sha256))

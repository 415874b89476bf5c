"""Downloads of saved weights through signed URLs. They need no trainer.

Whoever has a signed URL can fetch those files until it expires, without a key. The signature covers the path, which
names one checkpoint and at most one of its files, the account, and the time of expiry. Its key is derived from the
server's secret key, so every server of a cluster checks what another one signed.
"""

from __future__ import annotations

import itertools
import tarfile
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import APIRouter
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.errors import ForbiddenError, NotFoundError, RefusedError
from trainmaster.server.core.job import CheckpointRecord
from trainmaster.server.doors.futures import ok
from trainmaster.server.doors.tinker.door import TinkerDoor, path_of
from trainmaster.server.doors.tinker.router import answer
from trainmaster.server.doors.tinker.runs import CHECKPOINT, weights_of
from trainmaster.server.doors.tinker.wire import instant
from trainmaster.server.http import artifact_files
from trainmaster.server.http.auth import SIGNED_PATHS, Principal, guard
from trainmaster.server.http.context import ApiContext, context_of
from trainmaster.server.http.routes import artifacts
from trainmaster.server.settings.encryption import Sealer
from trainmaster.server.storage import ARTIFACTS
from trainmaster.server.store import checkpoints, jobs
from trainmaster.server.store.scope import Scope

GOOD_FOR_S = 3600
"""Clients ask for new ones five minutes before they expire."""
ARCHIVE = "archive"
FILES = "files"
_MOST_DIGITS = 12


def url_of(
    request: Request, sealer: Sealer, account_id: str, checkpoint: CheckpointRecord, rest: str, expires: int
) -> str:
    """At the host that the client asked."""
    path = f"{SIGNED_PATHS}{checkpoint.job_id}/{checkpoint.checkpoint_id}/{rest}"
    signature = sealer.sign(_covered(path, account_id, str(expires)))
    query = {"account": account_id, "expires": str(expires), "signature": signature}
    host = request.headers.get("host") or request.url.netloc
    return f"{request.url.scheme}://{host}{quote(path)}?{urlencode(query)}"


def require_signed(request: Request, sealer: Sealer, now: float) -> str:
    """The account of a signed URL. Raises ForbiddenError where the signature is wrong, or has expired."""
    account_id, expires, signature = (
        request.query_params.get(name, "") for name in ("account", "expires", "signature")
    )
    covered = _covered(str(request.scope["path"]), account_id, expires)
    if len(expires) > _MOST_DIGITS or not expires.isdecimal() or not sealer.signed(covered, signature):
        raise ForbiddenError("this address is not one that the server signed")
    if now > int(expires):
        raise ForbiddenError("this address has expired: ask for a new one")
    return account_id


def _covered(path: str, account_id: str, expires: str) -> str:
    return "\n".join((path, account_id, expires))


MAX_FILES = 10_000
"""Of a checkpoint that is downloaded: all of them are held in memory."""
_COMPLETE = "checkpoint_complete"
"""An empty file that clients look for in an archive."""
_END = bytes(2 * tarfile.BLOCKSIZE)

router = APIRouter(prefix=SIGNED_PATHS.rstrip("/"), include_in_schema=False)


@answer("GET", f"{CHECKPOINT}/archive", KeyScope.VIEW, note="a signed URL of a tar file, valid for one hour")
async def archive(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    checkpoint, account_id = await _readable(request, door, principal)
    expires = int(door.context.clock()) + GOOD_FOR_S
    url = url_of(request, door.context.vault.sealer, account_id, checkpoint, ARCHIVE, expires)
    return ok({"url": url, "expires": instant(expires)})


@answer("GET", f"{CHECKPOINT}/external_weights_urls", KeyScope.VIEW, note="a signed URL per file, valid for one hour")
async def external_weights_urls(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    checkpoint, account_id = await _readable(request, door, principal)
    place = await _place(door.context, Scope(account_id), checkpoint.job_id, checkpoint.checkpoint_id)
    expires = int(door.context.clock()) + GOOD_FOR_S
    sealer = door.context.vault.sealer

    def sign() -> dict[str, str]:
        names = [_name(each) for each in _all_files(place)]
        return {
            name: url_of(request, sealer, account_id, checkpoint, f"{FILES}/{name}", expires)
            for name in names
            if name != artifact_files.MANIFEST
        }

    return ok({"urls": await run_in_threadpool(sign), "expires": instant(expires)})


@router.get("/{job_id}/{checkpoint_id}/archive")
@guard
async def download_archive(request: Request, job_id: str, checkpoint_id: str) -> Response:
    """The tar file is written while it is sent."""
    context = context_of(request)
    account_id = require_signed(request, context.vault.sealer, context.clock())
    place = await _place(context, Scope(account_id), job_id, checkpoint_id)
    found = await run_in_threadpool(_all_files, place)
    headers = {
        "Content-Length": str(await run_in_threadpool(_archive_size, found)),
        "Content-Disposition": f'attachment; filename="{quote(checkpoint_id)}.tar"',
    }
    return StreamingResponse(_archived(place, found), media_type="application/x-tar", headers=headers)


@router.get("/{job_id}/{checkpoint_id}/files/{name:path}")
@guard
async def download_file(request: Request, job_id: str, checkpoint_id: str, name: str) -> Response:
    context = context_of(request)
    account_id = require_signed(request, context.vault.sealer, context.clock())
    place = await _place(context, Scope(account_id), job_id, checkpoint_id)
    return await artifacts.wanted_part(request, [place], place.prefix + name)


async def _readable(request: Request, door: TinkerDoor, principal: Principal) -> tuple[CheckpointRecord, str]:
    """The checkpoint that a path names, if it is the account's own or public; and whose it is."""
    found = await weights_of(request, door, principal)
    checkpoint = found.checkpoint
    if checkpoint.root != ARTIFACTS:
        raise RefusedError(f"{path_of(checkpoint)} lies on an object store: fetch it from {checkpoint.path}")
    return checkpoint, found.run.account_id


async def _place(context: ApiContext, scope: Scope, job_id: str, checkpoint_id: str) -> artifact_files.ArtifactPlace:
    """Where the files of a checkpoint lie; it may have been deleted since its address was signed."""

    def find(connection: Connection) -> list[CheckpointRecord]:
        job = jobs.get(connection, scope, job_id, deleted=True)
        return checkpoints.named(connection, scope, job.job_id, [checkpoint_id])

    for found in await context.read(find):
        if found.root == ARTIFACTS:
            return artifact_files.checkpoint_place(context.roots, found.checkpoint_id, found.path)
    raise NotFoundError(f"job {job_id} has no checkpoint {checkpoint_id} any more")


def _all_files(place: artifact_files.ArtifactPlace) -> list[artifact_files.Artifact]:
    found = list(itertools.islice(artifact_files.files(place), MAX_FILES + 1))
    if len(found) > MAX_FILES:
        raise RefusedError(
            f"the checkpoint has more than {MAX_FILES} files: list its job's artifacts, and fetch those you need"
        )
    return found


def _archive_size(found: Sequence[artifact_files.Artifact]) -> int:
    size = sum(len(_header(_name(each), each.size)) + _padded(each.size) for each in found)
    return size + len(_header(_COMPLETE, 0)) + len(_END)


async def _archived(
    place: artifact_files.ArtifactPlace, found: Sequence[artifact_files.Artifact]
) -> AsyncIterator[bytes]:
    for artifact in found:
        yield _header(_name(artifact), artifact.size)
        opened = await run_in_threadpool(artifact_files.open_file, [place], artifact.path)
        try:
            async for data in artifacts.read_part(opened, 0, artifact.size):
                yield data
        finally:
            opened.close()
        yield bytes(_padded(artifact.size) - artifact.size)
    yield _header(_COMPLETE, 0) + _END


def _name(artifact: artifact_files.Artifact) -> str:
    return artifact.path.removeprefix(artifact.place.prefix)


def _header(name: str, size: int) -> bytes:
    member: Any = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    header: bytes = member.tobuf(tarfile.PAX_FORMAT)
    return header


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE

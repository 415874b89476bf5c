"""Downloads of a job's files: parallel, resumable and verified; and the verification of a checkpoint on the server.

A file appears under its name only when it is whole. Until then it is `.<name>.<its version>.part` beside it, so that a
download that is started again continues with the same version of the file, never with another.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

import httpx

from trainmaster.client.connection import RETRY_DELAYS_S, Connection, job_path
from trainmaster.client.errors import ApiError, DownloadError, NotFoundError, UnavailableError, UnreachableError
from trainmaster.client.types import Artifact

THREADS = 4
"""Files at a time: a single one does not fill a fast network."""
_CHUNK = 1 << 20
_RANGE_NOT_SATISFIABLE = 416

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadTarget:
    """A file to fetch, and where it goes."""

    artifact: Artifact
    path: Path


def targets(artifacts: Iterator[Artifact], directory: Path, patterns: Sequence[str] = ()) -> list[DownloadTarget]:
    """Where the files go that some patterns choose; without patterns, all.

    A pattern is a path as it will be below the directory, with `*` and `?`, or a directory on the way to it.
    """
    chosen = []
    for artifact in artifacts:
        # `output/` or `checkpoints/<id>/` goes: the directory holds one or the other.
        prefix = "output/" if artifact["checkpoint_id"] is None else f"checkpoints/{artifact['checkpoint_id']}/"
        name = artifact["path"].removeprefix(prefix)
        plain = [pattern.rstrip("/") for pattern in patterns]
        if not plain or any(fnmatch.fnmatchcase(name, each) or name.startswith(f"{each}/") for each in plain):
            chosen.append(DownloadTarget(artifact=artifact, path=directory / _inside(name)))
    return chosen


def download(
    connection: Connection,
    job: str,
    wanted: Sequence[DownloadTarget],
    directory: Path,
    *,
    progress: Progress = lambda _: None,
) -> None:
    """Fetch files into a directory. What is there already, whole, is left as it is.

    `progress` is called, from any thread, with the number of bytes that are there in addition.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DownloadError(f"cannot make {directory}: {error.strerror}") from error
    home = directory.resolve()
    pool = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="download")
    try:
        tasks = [pool.submit(_fetch, connection, job, target, home, progress) for target in wanted]
        wait(tasks, return_when=FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _fetch(connection: Connection, job: str, target: DownloadTarget, home: Path, progress: Progress) -> None:
    try:
        target.path.parent.mkdir(parents=True, exist_ok=True)
        if not target.path.parent.resolve().is_relative_to(home):
            raise DownloadError(f"{target.path} leads out of {home}, by a link; nothing is written there")
        if _is_here(target):
            progress(target.artifact["size_bytes"])
            return
        version = hashlib.sha256(target.artifact["etag"].encode()).hexdigest()[:12]
        part = target.path.with_name(f".{target.path.name}.{version}.part")
        _fetch_part(connection, job, target.artifact, part, progress)
        modified = datetime.fromisoformat(target.artifact["modified_at"]).timestamp()
        os.utime(part, (modified, modified))
        os.replace(part, target.path)
    except OSError as error:
        raise DownloadError(f"{target.path}: {error.strerror}") from error


def _fetch_part(connection: Connection, job: str, artifact: Artifact, part: Path, progress: Progress) -> None:
    """Bring a file on until it is whole; as often as it takes while there is progress."""
    route = job_path(job, f"artifacts/{quote(artifact['path'])}")
    have = min(part.stat().st_size, artifact["size_bytes"]) if part.exists() else 0
    progress(have)
    losses = 0
    while have < artifact["size_bytes"]:
        before = have
        try:
            headers = {"Range": f"bytes={have}-", "If-Range": artifact["etag"]} if have else {}
            with connection.fetch(route, headers=headers) as response:
                if response.headers.get("ETag") != artifact["etag"]:
                    raise _changed(artifact)
                if have and response.status_code != httpx.codes.PARTIAL_CONTENT:
                    progress(-have)  # Somebody on the way does not pass ranges on.
                    have = 0
                for size in _append(response, part, have):
                    progress(size)
                    have += size
        except (UnreachableError, UnavailableError):
            losses = 0 if have > before else losses + 1
            if losses > len(RETRY_DELAYS_S):
                raise
            time.sleep(RETRY_DELAYS_S[max(losses - 1, 0)])
            connection.find_again()
        except ApiError as error:
            if error.status == _RANGE_NOT_SATISFIABLE:
                raise _changed(artifact) from error
            raise
    if not part.exists():
        part.touch()
    _verify(artifact, part)


def _append(response: httpx.Response, part: Path, have: int) -> Iterator[int]:
    """Write what comes; the number of bytes that came."""
    with part.open("r+b" if part.exists() else "wb") as file:
        file.truncate(have)
        file.seek(have)
        for data in response.iter_bytes(_CHUNK):
            file.write(data)
            yield len(data)


def _verify(artifact: Artifact, part: Path) -> None:
    size = part.stat().st_size
    if size != artifact["size_bytes"]:
        part.unlink()
        raise DownloadError(f"{artifact['path']} came with {size} bytes, not {artifact['size_bytes']}; try again")
    if artifact["sha256"] is not None and digest_of(part) != artifact["sha256"]:
        part.unlink()
        raise DownloadError(f"{artifact['path']} is not what was committed: its digest differs from the manifest's")


def _is_here(target: DownloadTarget) -> bool:
    """Whether the file was fetched before, and is the same."""
    try:
        status = target.path.stat()
    except OSError:
        return False
    artifact = target.artifact
    if status.st_size != artifact["size_bytes"]:
        return False
    if artifact["sha256"] is not None:
        return digest_of(target.path) == artifact["sha256"]
    return abs(status.st_mtime - datetime.fromisoformat(artifact["modified_at"]).timestamp()) < 1e-3


def digest_of(path: Path) -> str:
    """The sha256 of a file, by which the server knows it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _changed(artifact: Artifact) -> DownloadError:
    return DownloadError(f"{artifact['path']} was changed while it was fetched; the job still writes it: try again")


def _inside(name: str) -> Path:
    parts = name.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise DownloadError(f"the server names a file {name!r}, which would lead out of the directory")
    return Path(*parts)


MANIFEST = "manifest.json"


def checkpoint_problems(
    connection: Connection, job: str, checkpoint_id: str, artifacts: Iterator[Artifact], *, progress: Progress
) -> list[str]:
    """What is wrong with a checkpoint, a line for each file; empty when all is as it was committed."""
    home = job_path(job, f"artifacts/checkpoints/{quote(checkpoint_id, safe='')}")
    there = {artifact["path"].removeprefix(f"checkpoints/{checkpoint_id}/") for artifact in artifacts}
    if MANIFEST not in there:
        return [f"{MANIFEST}: it is not there"]
    try:
        with connection.fetch(f"{home}/{MANIFEST}") as response:
            listed = json.loads(response.read())["files"]
            files = [(str(file["path"]), int(file["size"]), str(file["sha256"])) for file in listed]
    except (ValueError, KeyError, TypeError) as error:
        return [f"{MANIFEST}: it cannot be read ({error})"]

    def problem(expected: tuple[str, int, str]) -> str | None:
        path, size, sha256 = expected
        if path not in there:
            return f"{path}: it is not there"
        try:
            found = _digest_of_response(connection, f"{home}/{quote(path)}", progress)
        except NotFoundError:
            return f"{path}: it is not there"
        return None if found == (size, sha256) else f"{path}: {found[0]} bytes that are not those committed ({size})"

    with ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="verify") as pool:
        return [found for found in pool.map(problem, files) if found is not None]


def _digest_of_response(connection: Connection, route: str, progress: Progress) -> tuple[int, str]:
    size, digest = 0, hashlib.sha256()
    with connection.fetch(route) as response:
        for data in response.iter_bytes(_CHUNK):
            size += len(data)
            digest.update(data)
            progress(len(data))
    return size, digest.hexdigest()

"""What jobs leave and what they used: artifacts, checkpoints, usage, and collecting what nobody keeps.

Downloads are parallel, resumable and verified. A file appears under its name only when it is whole. Until then it is
`.<name>.<its version>.part` beside it, so that a download that is started again continues with the same version of the
file, never with another.
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
from typing import cast
from urllib.parse import quote

import httpx

from trainmaster.client.connection import RETRY_DELAYS_S, Connection, job_path
from trainmaster.client.errors import ApiError, DownloadError, NotFoundError, UnavailableError, UnreachableError
from trainmaster.client.route_groups import RouteGroup
from trainmaster.client.types import Artifact, Collection, JobCheckpoints, Tombstone, Usage

PAGE_SIZE = 1000
LATEST, BEST = "latest", "best"
THREADS = 4
"""Files at a time: a single one does not fill a fast network."""
_CHUNK = 1 << 20
_RANGE_NOT_SATISFIABLE = 416
_MANIFEST = "manifest.json"

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadTarget:
    artifact: Artifact
    path: Path


class Results(RouteGroup):
    """Files of jobs, their checkpoints, and their usage. A job is named by its id or its handle.

    Files and checkpoints of a deleted job are there until it is purged; of several that had a handle, the last.
    """

    def artifacts(
        self, job: str, *, kind: str | None = None, checkpoint_id: str | None = None, page_size: int = PAGE_SIZE
    ) -> Iterator[Artifact]:
        """The files that a job left: `kind` is "output" or "checkpoint"."""
        path = job_path(job, "artifacts")
        for page in self._connection.pages(path, kind=kind, checkpoint_id=checkpoint_id, page_size=page_size):
            yield from page["artifacts"]

    def download(
        self,
        job: str,
        directory: str | Path,
        *,
        patterns: Sequence[str] = (),
        checkpoint: str | None = None,
        progress: Progress = lambda _: None,
    ) -> list[Path]:
        """Fetch the output of a job, or a checkpoint of it, into a directory; returns where the files are.

        Args:
            directory: where to; it is made. What is there whole is left as it is; an interrupted download continues.
            patterns: only these, such as `*.safetensors` or a directory.
            checkpoint: an id, `latest` or `best`.
            progress: called with the number of bytes that came in addition, from any thread.

        Raises DownloadError if a file cannot be written, or is not what it should be.
        """
        wanted = self.targets(job, directory, patterns=patterns, checkpoint=checkpoint)
        self.fetch(job, wanted, directory, progress=progress)
        return [target.path for target in wanted]

    def targets(
        self, job: str, directory: str | Path, *, patterns: Sequence[str] = (), checkpoint: str | None = None
    ) -> list[DownloadTarget]:
        """What `download` would fetch, and where it goes; without patterns, all.

        A pattern is a path as it will be below the directory, with `*` and `?`, or a directory on the way to it.
        """
        chosen = None if checkpoint is None else self.checkpoint_id(job, checkpoint)
        # `output/` or `checkpoints/<id>/` goes: the directory holds one or the other.
        prefix = "output/" if chosen is None else f"checkpoints/{chosen}/"
        kind = "output" if checkpoint is None else None
        plain = [pattern.rstrip("/") for pattern in patterns]
        wanted = []
        for artifact in self.artifacts(job, kind=kind, checkpoint_id=chosen):
            name = artifact["path"].removeprefix(prefix)
            if not plain or any(fnmatch.fnmatchcase(name, each) or name.startswith(f"{each}/") for each in plain):
                wanted.append(DownloadTarget(artifact=artifact, path=Path(directory) / _inside(name)))
        return wanted

    def fetch(self, job: str, wanted: Sequence[DownloadTarget], directory: str | Path, *, progress: Progress) -> None:
        """Fetch what `targets` has found. What is there already, whole, is left as it is."""
        home = Path(directory)
        try:
            home.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DownloadError(f"cannot make {home}: {error.strerror}") from error
        home = home.resolve()
        pool = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="download")
        try:
            tasks = [pool.submit(_fetch, self._connection, job, target, home, progress) for target in wanted]
            wait(tasks, return_when=FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def checkpoint_id(self, job: str, name: str) -> str:
        """The id of a checkpoint that is named by its id, or as `latest` or `best`. DownloadError: the job has none."""
        if name not in (LATEST, BEST):
            return name
        page = self._first_checkpoint(job)
        found = page["latest_checkpoint_id"] if name == LATEST else page["best_checkpoint_id"]
        if found is None:
            raise DownloadError(f"the job has no {name} checkpoint")
        return str(found)

    def verify_checkpoint(self, job: str, checkpoint_id: str, *, progress: Progress = lambda _: None) -> list[str]:
        """Read every file of a checkpoint; returns what is wrong, a line for each file. `progress` as of `download`."""
        artifacts = self.artifacts(job, checkpoint_id=checkpoint_id)
        home = job_path(job, f"artifacts/checkpoints/{quote(checkpoint_id, safe='')}")
        there = {artifact["path"].removeprefix(f"checkpoints/{checkpoint_id}/") for artifact in artifacts}
        if _MANIFEST not in there:
            return [f"{_MANIFEST}: it is not there"]
        try:
            with self._connection.fetch(f"{home}/{_MANIFEST}") as response:
                listed = json.loads(response.read())["files"]
                files = [(str(file["path"]), int(file["size"]), str(file["sha256"])) for file in listed]
        except (ValueError, KeyError, TypeError) as error:
            return [f"{_MANIFEST}: it cannot be read ({error})"]

        def problem(expected: tuple[str, int, str]) -> str | None:
            path, size, sha256 = expected
            if path not in there:
                return f"{path}: it is not there"
            try:
                found = _digest_of_response(self._connection, f"{home}/{quote(path)}", progress)
            except NotFoundError:
                return f"{path}: it is not there"
            same = found == (size, sha256)
            return None if same else f"{path}: {found[0]} bytes that are not those committed ({size})"

        with ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="verify") as pool:
            return [found for found in pool.map(problem, files) if found is not None]

    def checkpoints(self, job: str, *, checkpoint_id: str | None = None, page_size: int = PAGE_SIZE) -> JobCheckpoints:
        """The committed checkpoints of a job, all of them, the oldest first; with `checkpoint_id`, only that one."""
        path = job_path(job, "checkpoints")
        pages: list[JobCheckpoints] = list(
            self._connection.pages(path, checkpoint_id=checkpoint_id, page_size=page_size)
        )
        return {**pages[-1], "checkpoints": [each for page in pages for each in page["checkpoints"]]}

    def has_checkpoints(self, job: str) -> bool:
        return bool(self._first_checkpoint(job)["checkpoints"])

    def tombstones(self, *, job: str | None = None, page_size: int = 100) -> Iterator[Tombstone]:
        """Deleted jobs with files left, the last deleted first; with `job`, only those of this handle or id prefix."""
        for page in self._connection.pages("/v1/tombstones", job=job, page_size=page_size):
            yield from page["tombstones"]

    def pin(self, job: str, checkpoint_id: str) -> JobCheckpoints:
        """Keep a checkpoint until it is unpinned; returns the first page of the job's checkpoints."""
        return self._change("POST", job, checkpoint_id, "/pin")

    def unpin(self, job: str, checkpoint_id: str) -> JobCheckpoints:
        """Treat a checkpoint like all others again; returns the first page of the job's checkpoints."""
        return self._change("POST", job, checkpoint_id, "/unpin")

    def delete_checkpoint(self, job: str, checkpoint_id: str) -> JobCheckpoints:
        """Delete a checkpoint that is not pinned and that no job needs; returns the first page of those left."""
        return self._change("DELETE", job, checkpoint_id)

    def usage(
        self,
        *,
        since: str | None = None,
        until: str | None = None,
        group_by: str = "queue",
        all_accounts: bool = False,
        limit: int | None = None,
    ) -> Usage:
        """What attempts used in an interval, by `job`, `attempt`, `queue`, `account`, `day` or `label:KEY`."""
        every = "true" if all_accounts else None
        params = {"group_by": group_by, "from": since, "to": until, "limit": limit, "all_accounts": every}
        return cast(Usage, self._connection.call("GET", "/v1/usage", params=params))

    def collect(self, *, dry_run: bool = False, orphans: bool = False) -> Collection:
        """Remove what the server's settings do not keep any longer, or only tell what would go."""
        return cast(Collection, self._connection.call("POST", "/v1/gc", json={"dry_run": dry_run, "orphans": orphans}))

    def _first_checkpoint(self, job: str) -> JobCheckpoints:
        return cast(JobCheckpoints, next(self._connection.pages(job_path(job, "checkpoints"), page_size=1)))

    def _change(self, method: str, job: str, checkpoint_id: str, command: str = "") -> JobCheckpoints:
        path = job_path(job, f"checkpoints/{quote(checkpoint_id, safe='')}{command}")
        return cast(JobCheckpoints, self._connection.change(method, path))


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
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _changed(artifact: Artifact) -> DownloadError:
    return DownloadError(f"{artifact['path']} was changed while it was fetched; the job still writes it: try again")


def _inside(name: str) -> Path:
    parts = name.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise DownloadError(f"the server names a file {name!r}, which would lead out of the directory")
    return Path(*parts)


def _digest_of_response(connection: Connection, route: str, progress: Progress) -> tuple[int, str]:
    size, digest = 0, hashlib.sha256()
    with connection.fetch(route) as response:
        for data in response.iter_bytes(_CHUNK):
            size += len(data)
            digest.update(data)
            progress(len(data))
    return size, digest.hexdigest()

"""Brings files back from the object store that a launch needs as files: the checkpoint that a job resumes from, results
of other jobs that it names, and uploaded files. A job that ended never runs again, so its own files stay where they
are; services may, and theirs are not moved."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from trainmaster.backends.base import LaunchError, NotYetError
from trainmaster.protocol import account_files
from trainmaster.protocol.account_files import User, closing, open_below
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.request import AttemptRequest
from trainmaster.protocol.run_directory import SEARCH_ONLY
from trainmaster.server.archive import Archive, StoredFile
from trainmaster.server.core.errors import NotFoundError, StoreUnavailableError
from trainmaster.server.core.job import CheckpointRecord, Job
from trainmaster.server.core.spec.documents import load_stored
from trainmaster.server.core.training.sources import LeftByJob, ModelSource, left_by_job
from trainmaster.server.core.workloads.trainer import configs_of, is_training, models_from
from trainmaster.server.storage import ARTIFACTS, BLOBS, Location, Roots, blob_path
from trainmaster.server.store import accounts, checkpoints
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

DRAFTS = ".restoring"
KEPT = ".restored"
"""In the directory of a job whose results another job names, which may need them for long: they are not moved."""
KEPT_S = 24 * 3600.0
BLOB_HERE_S = 3600.0
"""How long an uploaded file stays in its directory after its last launch, although the object store has it."""
AGAIN_S = 10.0


class DamagedError(OSError):
    """An object is not what was stored; asking again does not help."""


def keep_here(roots: Roots, job_id: str) -> None:
    account_files.make_directories(roots.path(ARTIFACTS, ""), job_id)
    mark = f"{job_id}/{KEPT}"
    with closing(open_below(roots.path(ARTIFACTS, ""), mark, os.O_WRONLY | os.O_CREAT)) as descriptor:
        os.utime(descriptor)


def is_kept_here(roots: Roots, job_id: str, now: float) -> bool:
    status = account_files.status_below(roots.path(ARTIFACTS, ""), f"{job_id}/{KEPT}")
    return status is not None and status.st_mtime > now - KEPT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class _Needed:
    """What a launch lacks here."""

    checkpoint: CheckpointRecord | None = None
    results: tuple[LeftByJob, ...] = ()
    blobs: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.checkpoint or self.results or self.blobs)


@dataclass(eq=False)
class Restores:
    """Brings files back in threads of its own: a launch waits for them, and others do not."""

    database: Database
    roots: Roots
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "restore"), init=False)
    _running: dict[str, Future[None]] = field(default_factory=dict, init=False)
    _done: dict[str, frozenset[str]] = field(default_factory=dict, init=False)
    """Attempt -> the jobs whose results it names."""
    _stopping: threading.Event = field(default_factory=threading.Event, init=False)

    def require(self, job: Job, request: AttemptRequest) -> None:
        """Raise NotYetError while something is on its way that the current attempt of a job needs, and LaunchError if
        it is damaged."""
        archive, attempt_id = self.roots.archive, f"{job.job_id}.{job.live.number}"
        if archive is None:
            return
        if (named := self._done.get(attempt_id)) is not None:
            for job_id in named:  # it may wait in the queue of a cluster for days
                keep_here(self.roots, job_id)
            return
        results = tuple(_named_results(job))
        running = self._running.get(attempt_id)
        if running is not None and not running.done():
            raise NotYetError("its files are brought back from the object store", running, again_in_s=AGAIN_S)
        if running is not None:
            del self._running[attempt_id]
            error = running.exception()
            if error is None:
                self._done[attempt_id] = frozenset(each.job_id for each in results)
                return
            if isinstance(error, DamagedError):
                raise LaunchError(str(error), Reason.LAUNCH_REFUSED)
            if not isinstance(error, StoreUnavailableError | OSError):
                raise error
            raise NotYetError(f"its files cannot be brought back yet: {error}", Future(), again_in_s=AGAIN_S)
        for each in results:
            keep_here(self.roots, each.job_id)  # before it is looked for: its job may have ended a moment ago
        if needed := self._needed(job, request, results):
            running = self._running[attempt_id] = self._pool.submit(self._bring, archive, job, needed)
            raise NotYetError("its files are brought back from the object store", running, again_in_s=AGAIN_S)
        self._done[attempt_id] = frozenset(each.job_id for each in results)

    def close(self) -> None:
        """Break off; the next leader begins again with what is not there."""
        self._stopping.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def forget(self, attempt_id: str) -> None:
        self._done.pop(attempt_id, None)
        self._running.pop(attempt_id, None)

    def _needed(self, job: Job, request: AttemptRequest, results: Iterable[LeftByJob]) -> _Needed:
        """Looks into the server's own directories only: a job that was never moved starts without the store."""
        resume: CheckpointRecord | None = None
        resume_id = job.live.resume_checkpoint_id
        if resume_id is not None and not self.roots.stores(request.resume_from or ""):
            with self.database.read() as connection, contextlib.suppress(NotFoundError):
                resume = checkpoints.get(connection, Scope(job.account_id), resume_id)
        return _Needed(
            checkpoint=resume if resume is not None and self._lacks(resume) else None,
            results=tuple(each for each in results if not self._is_here(f"{each.job_id}/{each.path}")),
            blobs=tuple(sha256 for sha256 in _named_blobs(job) if not has_blob(self.roots, job.account_id, sha256)),
        )

    def _lacks(self, checkpoint: CheckpointRecord) -> bool:
        return checkpoint.root == ARTIFACTS and not self._is_here(checkpoint.path)

    def _is_here(self, path: str) -> bool:
        return self.roots.exists(Location(root=ARTIFACTS, path=path))

    def _bring(self, archive: Archive, job: Job, needed: _Needed) -> None:
        with self.database.read() as connection:
            account = accounts.get(connection, Scope.everything(), job.account_id)
        uid = account.uid if os.geteuid() == 0 else None
        back = _WayBack(self.roots, archive, None if uid in (None, os.geteuid()) else User.of(uid), self._stopping)
        for sha256 in needed.blobs:
            bring_blob(self.roots, job.account_id, sha256)
        for result in needed.results:
            back.bring_rest(result.job_id)
        if (checkpoint := needed.checkpoint) is not None:
            keep_here(self.roots, checkpoint.job_id)
            back.bring_checkpoint(checkpoint.path)


def has_blob(roots: Roots, account_id: str, sha256: str) -> bool:
    """Whether an uploaded file is here; it then stays for who asks."""
    try:
        os.utime(roots.path(BLOBS, blob_path(account_id, sha256)))
    except FileNotFoundError:
        return False
    return True


def bring_blob(roots: Roots, account_id: str, sha256: str) -> bool:
    """Whether an uploaded file is here, or could be brought here."""
    if has_blob(roots, account_id, sha256):
        return True
    key = f"{BLOBS}/{blob_path(account_id, sha256)}"
    if roots.archive is None or (size := roots.archive.size_at(key)) is None:
        return False
    file = StoredFile(key=key, size=size, modified_at=0.0, sha256=sha256)
    target = roots.path(BLOBS, blob_path(account_id, sha256))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{sha256}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as written:
            _receive(roots.archive, file, written.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return True


@dataclass(frozen=True, slots=True)
class _WayBack:
    roots: Roots
    archive: Archive
    user: User | None
    stopping: threading.Event

    @property
    def _artifacts(self) -> Path:
        return self.roots.path(ARTIFACTS, "")

    def bring_checkpoint(self, path: str) -> None:
        unit = self.archive.checkpoint(f"{ARTIFACTS}/{path}")
        if unit is not None:
            self._bring(path, unit.files)

    def bring_rest(self, job_id: str) -> None:
        """What a job left beside its checkpoints: a directory or file of its own appears at once, and completely."""
        unit = self.archive.unit(f"{ARTIFACTS}/{job_id}")
        parts: dict[str, dict[str, StoredFile]] = {}
        for name, file in unit.files.items() if unit is not None else ():
            names = name.split("/")
            depth = 1 if names[0] == "output" else 2
            parts.setdefault("/".join(names[:depth]), {})["/".join(names[depth:])] = file
        for part, files in parts.items():
            self._bring(f"{job_id}/{part}", files)

    def _bring(self, path: str, files: Mapping[str, StoredFile]) -> None:
        if account_files.exists(self._artifacts, path):
            return
        account_files.claim_directory(self._artifacts, DRAFTS, mode=0o700)
        draft = f"{DRAFTS}/{secrets.token_hex(8)}"
        try:
            account_files.make_directories(self._artifacts, draft)
            for name, file in files.items():
                if self.stopping.is_set():
                    raise OSError("the server stops")
                below = f"{draft}/part/{name}".rstrip("/")
                account_files.make_directories(self._artifacts, below.rpartition("/")[0])
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                with closing(open_below(self._artifacts, below, flags)) as descriptor:
                    _receive(self.archive, file, descriptor)
                    os.utime(descriptor, (file.modified_at, file.modified_at))
            account_files.seal_tree(self._artifacts, draft, self.user)
            self._make_way(path)
            try:
                account_files.move(self._artifacts, f"{draft}/part", path)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # unless somebody else has brought it meanwhile
                    raise
        finally:
            account_files.remove(self._artifacts, draft)

    def _make_way(self, path: str) -> None:
        """Make the directories above a path: the job's is the server's own, and those in it are the user's."""
        home, *way, _ = path.split("/")
        if way:
            account_files.make_directories_for(self.user, self._artifacts, f"{home}/{way[0]}", "/".join(way[1:]))
        else:
            mode = SEARCH_ONLY if self.user is not None else 0o700
            account_files.claim_directory(self._artifacts, home, mode=mode)


def _receive(archive: Archive, file: StoredFile, descriptor: int) -> None:
    """Write a stored file to an empty one. Raises DamagedError, ObjectStoreAwayError, and OSError of the local disk."""
    where = archive.uri(file.key)
    if file.content is None and archive.size_at(file.key) != file.size:
        raise DamagedError(f"{where} is not what was stored there: it is gone, or was changed")
    digest = hashlib.sha256()
    for piece in _pieces_of(archive, file):
        digest.update(piece)
        left = memoryview(piece)
        while left:
            left = left[os.write(descriptor, left) :]
    os.fsync(descriptor)
    if file.sha256 is not None and file.content is None and digest.hexdigest() != file.sha256:
        raise DamagedError(f"{where} is not what was stored there: it was changed or damaged")


def _pieces_of(archive: Archive, file: StoredFile) -> Iterator[bytes]:
    try:
        yield from archive.pieces(file)
    except FileNotFoundError as error:
        raise DamagedError(str(error)) from error


def _named_results(job: Job) -> Iterator[LeftByJob]:
    request = load_stored(job.spec_version, job.spec)
    if is_training(request.workload):
        training, data = configs_of(request)
        for _, name in models_from(ModelSource.ARTIFACTS, training.base_model, data):
            yield left_by_job(name)


def _named_blobs(job: Job) -> list[str]:
    return [str(file["sha256"]) for file in (job.spec.get("workload") or {}).get("files") or ()]

"""Moves the files of ended jobs, and uploaded files, to the server's object store.

Every server does so with what lies in its own directories, whether or not it leads. A file is removed here only after
what commits it was written there; a crash in between is made good by the next round, which sends again only what was
not committed. A job that cannot be moved does not stop the others, and is tried less and less often; while the store is
away, everything stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection

from trainmaster.protocol import account_files
from trainmaster.protocol.account_files import closing, directory_below, open_below, open_inside
from trainmaster.server import failpoints
from trainmaster.server.archive import Archive, ObjectStoreAwayError, StoredFile, StoredUnit, key_of
from trainmaster.server.attempt_store import MANIFEST
from trainmaster.server.coordinator.restoring import BLOB_HERE_S, KEPT, is_kept_here
from trainmaster.server.core import retention
from trainmaster.server.core.job import CheckpointRecord, Job
from trainmaster.server.storage import ARTIFACTS, BLOBS, RUNS, Location, Roots, blob_path, run_directory
from trainmaster.server.store import checkpoints, job_inputs, jobs
from trainmaster.server.store.database import Database
from trainmaster.server.store.records import portions
from trainmaster.server.store.scope import Scope

_log = logging.getLogger(__name__)
_EVERYTHING = Scope.everything()

EVERY_S = 2.0
AGAIN_S, AGAIN_AT_MOST_S = 10.0, 3600.0
"""When to try what could not be moved again, at first and at last: each try sends everything of it."""
SETTLED_S = 2.0
"""How long after a job's end its files stay at least: workers end, and readers finish."""
_JOB_DIRECTORY = re.compile(r"job-[0-9a-z]{1,64}")
_ATTEMPT = re.compile(r"[1-9][0-9]{0,8}")
_BLOB = re.compile(r"[0-9a-f]{64}")
_MOVED = ".moved-"
"""The prefix of directories whose files are on the object store, and that are about to be removed."""
_LOCK = ".moving"


@dataclass(eq=False)
class Mover:
    """Moves in a thread, every so often."""

    database: Database
    roots: Roots
    archive: Archive
    every_s: float = EVERY_S
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._is_away = False
        self._failed: dict[str, tuple[float, float]] = {}
        """What could not be moved -> when that is tried again, and how long after the last time."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="move to the object store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop; the next round, of whatever server, continues."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(self.every_s):
            try:
                self.move()
            except Exception:
                _log.exception("files of ended jobs could not be moved; this is tried again")

    def move(self) -> None:
        """Move what may go now; nothing if another server that shares the directories is doing so."""
        lock = self.roots.path(RUNS, _LOCK)
        with closing(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)) as descriptor:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            try:
                self._move_all()
            except ObjectStoreAwayError as error:
                if not self._is_away:
                    _log.warning("files of ended jobs stay on this server: %s", error.message)
                self._is_away = True
                return
            if self._is_away:
                _log.info("the object store %s can be used again", self.archive.place.uri)
                self._is_away = False

    def _move_all(self) -> None:
        for root in (RUNS, ARTIFACTS):
            for name in account_files.directories_in(self.roots.path(root, "")):
                if name.startswith(_MOVED):
                    self.roots.remove(Location(root=root, path=name))
        for job in self._ended_jobs():
            if self._stopping.is_set():
                return
            self._try(job.job_id, functools.partial(self._move_job, job))
        for account_id in account_files.directories_in(self.roots.path(BLOBS, "")):
            self._try(f"{BLOBS} of {account_id}", functools.partial(self._move_blobs, account_id))

    def _try(self, name: str, work: Callable[[], None]) -> None:
        """Do it unless it failed a short while ago. Raises ObjectStoreAwayError: then nothing else can be moved."""
        at, wait_s = self._failed.get(name, (0.0, 0.0))
        if self.clock() < at:
            return
        try:
            work()
        except ObjectStoreAwayError:
            # The next round begins with another one: this may be what the store does not take.
            self._failed[name] = (self.clock() + AGAIN_S, AGAIN_S)
            raise
        except Exception as error:
            if name not in self._failed:
                expected = isinstance(error, OSError)
                _log.warning("%s cannot be moved to the object store: %s", name, error, exc_info=not expected)
            wait_s = min(2 * wait_s or AGAIN_S, AGAIN_AT_MOST_S)
            self._failed[name] = (self.clock() + wait_s, wait_s)
        else:
            self._failed.pop(name, None)

    def _ended_jobs(self) -> Iterator[Job]:
        present = {
            name for root in (RUNS, ARTIFACTS) for name in account_files.directories_in(self.roots.path(root, ""))
        }
        for batch in portions(sorted(filter(_JOB_DIRECTORY.fullmatch, present))):
            with self.database.read() as connection:
                known = jobs.load(connection, _EVERYTHING, batch)
            yield from (job for job in known if self._may_move(job))

    def _may_move(self, job: Job) -> bool:
        # A deleted job keeps its files where they are: they may be purged at any moment.
        return job.deleted_at is None and retention.ended_before(job, self.clock() - SETTLED_S)

    def _move_job(self, job: Job) -> None:
        with self.database.read() as connection:
            moves_artifacts = self._moves_artifacts(connection, job)
            own = _in_own_directory(job, checkpoints.of_job(connection, _EVERYTHING, job.job_id))
        if not moves_artifacts and not self.roots.exists(Location(root=RUNS, path=job.job_id)):
            return
        sent: list[str] = []
        try:
            self._send_runs(job, sent)
            if moves_artifacts:
                self._send_checkpoints(own, sent)
                self._send_rest(job, [each.path for each in own], sent)
            failpoints.reach("move.committed")
            moved = self._take(job, moves_artifacts=moves_artifacts)
        except Exception:
            with contextlib.suppress(ObjectStoreAwayError):
                self._take_back(job, sent)
            raise
        if not moved:
            self._take_back(job, sent)

    def _take(self, job: Job, *, moves_artifacts: bool) -> bool:
        """Remove the files that were sent; False if they have to stay."""
        marks = {root: f"{_MOVED}{job.job_id}-{secrets.token_hex(4)}" for root in (RUNS, ARTIFACTS)}

        def take(connection: Connection) -> bool:
            fresh = jobs.get(connection, _EVERYTHING, job.job_id, deleted=True)
            # It may have been resumed, deleted, or named by another job meanwhile.
            if not self._may_move(fresh) or fresh.attempt_count != job.attempt_count:
                return False
            self.roots.move(Location(root=RUNS, path=job.job_id), marks[RUNS])
            if moves_artifacts and self._moves_artifacts(connection, fresh):
                self.roots.move(Location(root=ARTIFACTS, path=job.job_id), marks[ARTIFACTS])
            return True

        if not self.database.write_now(take):
            return False
        for root, mark in marks.items():
            self.roots.remove(Location(root=root, path=mark))
        return True

    def _take_back(self, job: Job, sent: Sequence[str]) -> None:
        """Remove from the store what was sent of a job that was deleted meanwhile: a purge may have come before it."""
        with self.database.read() as connection:
            deleted = jobs.get(connection, _EVERYTHING, job.job_id, deleted=True).deleted_at is not None
        for path in sent if deleted else ():
            self.archive.remove(path)

    def _moves_artifacts(self, connection: Connection, job: Job) -> bool:
        # A service may be resumed, and trainers load each other's checkpoints by their place on this machine.
        if job.is_service or not self.roots.exists(Location(root=ARTIFACTS, path=job.job_id)):
            return False
        if is_kept_here(self.roots, job.job_id, self.clock()):
            return False
        ids = [each.checkpoint_id for each in checkpoints.of_job(connection, _EVERYTHING, job.job_id)]
        return not checkpoints.users(connection, Scope(job.account_id), ids)

    def _send_runs(self, job: Job, sent: list[str]) -> None:
        for name in account_files.directories_in(self.roots.path(RUNS, ""), job.job_id):
            path = f"{RUNS}/{job.job_id}/{name}"
            if not _ATTEMPT.fullmatch(name) or self.archive.unit(path) is not None:
                continue
            sent.append(path)
            directory = run_directory(self.roots, job.job_id, int(name))
            files: dict[str, StoredFile] = {}
            for stream, _ in directory.streams():
                with contextlib.suppress(FileNotFoundError), closing(open_below(directory.path, stream)) as descriptor:
                    files[stream] = self.archive.send(f"{path}/{stream}", descriptor, gap=directory.gap(stream))
            self.archive.commit(path, StoredUnit(files=files, attempts=int(name)))

    def _send_checkpoints(self, own: Sequence[CheckpointRecord], sent: list[str]) -> None:
        top = self.roots.path(ARTIFACTS, "")
        for each in own:
            path = f"{ARTIFACTS}/{each.path}"
            if not account_files.exists(top, each.path) or self.archive.checkpoint(path) is not None:
                continue
            sent.append(path)
            with directory_below(top, each.path) as directory, closing(open_inside(directory, MANIFEST)) as manifest:
                for name, descriptor in _plain_files(directory):
                    if name != MANIFEST:
                        self.archive.send(key_of(path, name), descriptor)
                self.archive.send(f"{path}/{MANIFEST}", manifest)

    def _send_rest(self, job: Job, elsewhere: Sequence[str], sent: list[str]) -> None:
        """Send what a job left beside its checkpoints, unless that was done since its last attempt."""
        path = f"{ARTIFACTS}/{job.job_id}"
        before = self.archive.unit(path)
        if before is not None and before.attempts >= job.attempt_count:
            return
        sent.append(path)
        skipped = [(KEPT,), *(tuple(each.removeprefix(f"{job.job_id}/").split("/")) for each in elsewhere)]
        files: dict[str, StoredFile] = {}
        with directory_below(self.roots.path(ARTIFACTS, ""), job.job_id) as directory:
            for name, descriptor in _plain_files(directory, skipped):
                files[name] = self.archive.send(key_of(path, name), descriptor)
        self.archive.commit(path, StoredUnit(files=files, attempts=job.attempt_count))

    def _move_blobs(self, account_id: str) -> None:
        """Remove uploaded files that were not used for a while; they were sent when they came, or are sent now."""
        top = self.roots.path(BLOBS, account_id)
        with directory_below(top) as directory:
            found = [names[0] for names in account_files.files_in_order(directory) if len(names) == 1]
        for sha256 in filter(_BLOB.fullmatch, found):
            if not self._is_unused(top, sha256):
                continue
            path = blob_path(account_id, sha256)
            with self.database.read() as connection:
                is_known = job_inputs.get_blob(connection, Scope(account_id), sha256) is not None
            if is_known and self.archive.size_at(f"{BLOBS}/{path}") is None:
                with closing(open_below(top, sha256)) as descriptor:
                    self.archive.send(f"{BLOBS}/{path}", descriptor)
            if self._is_unused(top, sha256):  # a job may have been launched with it meanwhile
                self.roots.remove(Location(root=BLOBS, path=path))

    def _is_unused(self, top: Path, sha256: str) -> bool:
        status = account_files.status_below(top, sha256)
        return status is not None and status.st_mtime <= self.clock() - BLOB_HERE_S


def _in_own_directory(job: Job, records: Sequence[CheckpointRecord]) -> list[CheckpointRecord]:
    """Those that lie in the job's directory: checkpoints of job classes belong to the name of their run."""
    return [each for each in records if each.root == ARTIFACTS and each.path.startswith(f"{job.job_id}/")]


def _plain_files(directory: int, skipped: Sequence[tuple[str, ...]] = ()) -> Iterator[tuple[str, int]]:
    """The files that a list of artifacts would have, with a descriptor of each."""
    for names in account_files.files_in_order(directory):
        if any(names[: len(each)] == each for each in skipped):
            continue
        name = "/".join(names)
        with contextlib.suppress(FileNotFoundError), closing(open_inside(directory, name)) as descriptor:
            yield name, descriptor

"""Collects what has outlived its job, as `core.retention` decides. It is hidden first, in the transaction that says so
(a directory by a rename, a checkpoint by its row), and removed afterwards: several servers may collect at the same
time, and the next collection completes one that crashed. A job whose files cannot be read does not stop the others."""

from __future__ import annotations

import functools
import logging
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection

from trainmaster.protocol import account_files
from trainmaster.server.archive import ObjectStoreAwayError
from trainmaster.server.coordinator.checkpoints import left_beside
from trainmaster.server.coordinator.launch import checkpoints_homes
from trainmaster.server.coordinator.restoring import DRAFTS
from trainmaster.server.core import commands, retention
from trainmaster.server.core.errors import StoreUnavailableError
from trainmaster.server.core.job import CheckpointRecord, Job
from trainmaster.server.core.retention import RetentionPolicy
from trainmaster.server.core.workloads.job_class import KIND as JOB_CLASS
from trainmaster.server.settings.settings import Settings
from trainmaster.server.storage import ARTIFACTS, BLOBS, RUNS, Location, Roots, blob_path
from trainmaster.server.store import checkpoints, job_inputs, jobs
from trainmaster.server.store.database import Database
from trainmaster.server.store.job_inputs import Blob
from trainmaster.server.store.records import portions
from trainmaster.server.store.scope import Scope

_log = logging.getLogger(__name__)
_EVERYTHING = Scope.everything()

ORPHAN_AGE_S = 24 * 3600.0
"""Files without a job are kept for so long: a restored database may still learn of the job."""

_JOB_DIRECTORY = re.compile(r"job-[0-9a-z]{1,64}")
_SPOOLED = re.compile(r"(job-[0-9a-z]{1,64})\.(\d{1,9})\.\d{1,6}")
_GOING = ".going-"
"""The prefix of hidden directories, which are about to be removed."""
FAILED = "failed"
"""The kind of a `Collected` that could not be collected; its name says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Something that is removed, or would be."""

    what: str
    """`run directory`, `checkpoint`, `deleted job`, `cache`, `blob`, `orphan`, the record of a `session`, of a
    `training run` or of a `sampler`; or `failed`."""
    name: str
    size_bytes: int


Collect = Callable[[Database, RetentionPolicy, float, bool], Iterator[Collected]]
"""Collects the records of a foreign API; with True as the last argument, only reports them."""


def keep_from_settings(settings: Settings) -> RetentionPolicy:
    return RetentionPolicy(
        runs_s=settings.keep_runs_s,
        checkpoints_s=settings.keep_checkpoints_s,
        deleted_s=settings.keep_deleted_s,
        caches_s=settings.keep_caches_s,
        sessions_s=settings.keep_sessions_s,
        blobs_s=settings.blob_keep_s,
    )


class Collector:
    def __init__(
        self,
        database: Database,
        roots: Roots,
        keep: RetentionPolicy,
        *,
        spool: Path | None = None,
        also: Sequence[Collect] = (),
    ) -> None:
        self._also = also
        self._database = database
        self._roots = roots
        self._keep = keep
        self._spool = spool
        self._warned: set[str] = set()
        """Names of which a warning was logged; it is logged once."""

    def collect(self, now: float, *, dry_run: bool = False) -> Iterator[Collected]:
        """Hide what may go, and report it; with `dry_run` only report."""
        if self._keep.runs_s or self._keep.checkpoints_s or self._keep.deleted_s:
            for _, job in self._directories():
                if job is None:
                    continue
                if retention.deletion_expired(job, self._keep, now=now):
                    yield from self._alone(job.job_id, self._deleted(job, now, dry_run=dry_run))
                else:
                    yield from self._alone(job.job_id, self._checkpoints(job, now, dry_run=dry_run))
                    yield from self._alone(job.job_id, self._runs(job, now, dry_run=dry_run))
        yield from self._caches(now, dry_run=dry_run)
        yield from self._drafts(now, dry_run=dry_run)
        yield from self._blobs(now, dry_run=dry_run)
        for collect in self._also:
            yield from collect(self._database, self._keep, now, dry_run)

    def expire(self, now: float) -> Iterator[Collected]:
        """Hide checkpoints that have expired, and report them."""
        with self._database.read() as connection:
            jobs_with_some = {each.job_id for each in checkpoints.overdue(connection, _EVERYTHING, now)}

        for job_id in sorted(jobs_with_some):
            yield from self._alone(job_id, self._expire(job_id, now))

    def _expire(self, job_id: str, now: float) -> Iterator[Collected]:
        def choose(connection: Connection, job: Job) -> tuple[list[CheckpointRecord], list[CheckpointRecord]]:
            overdue = checkpoints.overdue(connection, _EVERYTHING, now, job_id=job_id)
            in_use = checkpoints.users(connection, Scope(job.account_id), [c.checkpoint_id for c in overdue])
            expired = retention.overdue_checkpoints(overdue, in_use=in_use, now=now)
            return expired, left_beside(connection, job, expired)

        for gone in self._hide_checkpoints(job_id, choose, now):
            yield Collected(what="checkpoint", name=gone.checkpoint_id, size_bytes=gone.size_bytes)

    def _hide_checkpoints(
        self,
        job_id: str,
        choose: Callable[[Connection, Job], tuple[list[CheckpointRecord], list[CheckpointRecord]]],
        now: float,
    ) -> list[CheckpointRecord]:
        """Hide checkpoints of a job; `choose` returns which of them, and the others."""

        def work(connection: Connection) -> list[CheckpointRecord]:
            job = jobs.get(connection, _EVERYTHING, job_id, deleted=True)
            expired, others = choose(connection, job)
            change = retention.expire_checkpoints(job, expired, others=others, now=now)
            if change is None or not jobs.apply(connection, _EVERYTHING, change):
                return []
            checkpoints.hide(connection, _EVERYTHING, job, [c.checkpoint_id for c in expired])
            return expired

        return self._database.write_now(work)

    def orphans(self, now: float, *, dry_run: bool = False) -> Iterator[Collected]:
        """Hide directories of unknown jobs that nobody touched for a day, and report them."""
        for name, job in self._directories():
            if job is None:
                yield from self._alone(name, self._orphans(name, now, dry_run=dry_run))

    def _alone(self, name: str, found: Iterator[Collected]) -> Iterator[Collected]:
        """What is found of one job; its errors do not keep the others from being collected."""
        try:
            yield from found
        except StoreUnavailableError:
            raise
        except Exception as error:
            if name not in self._warned:
                self._warned.add(name)
                _log.warning("%s cannot be collected: %s", name, error, exc_info=not isinstance(error, OSError))
            yield Collected(what=FAILED, name=f"{name}: {error}", size_bytes=0)

    def sweep(self) -> None:
        for root in (RUNS, ARTIFACTS):
            for name in account_files.directories_in(self._roots.path(root, "")):
                if name.startswith(_GOING):
                    self._remove(Location(root=root, path=name))
        with self._database.read() as connection:
            hidden = checkpoints.hidden(connection, _EVERYTHING)
        for checkpoint in hidden:
            try:
                self._remove_files(checkpoint)
                self._database.write_now(functools.partial(checkpoints.drop, scope=_EVERYTHING, checkpoint=checkpoint))
            except (OSError, ObjectStoreAwayError) as error:
                _log.warning("checkpoint %s cannot be removed: %s", checkpoint.checkpoint_id, error)

    def _remove(self, location: Location) -> None:
        try:
            self._roots.remove(location)
        except OSError as error:
            if location.path not in self._warned:
                _log.warning("%s cannot be removed, and keeps its room on the disk: %s", location.uri, error)
                self._warned.add(location.path)

    def purge_checkpoints(self, job_id: str) -> None:
        """Remove the checkpoints outside the directory of a purged job, except those that another job resumes from."""
        with self._database.read() as connection:
            job = jobs.get(connection, _EVERYTHING, job_id, deleted=True)
            if job.workload_kind != JOB_CLASS:
                return
            own = checkpoints.of_job(connection, _EVERYTHING, job_id)
            in_use = checkpoints.users(connection, Scope(job.account_id), [c.checkpoint_id for c in own])
        for checkpoint in own:
            if checkpoint.checkpoint_id not in in_use:
                self._remove_files(checkpoint)

    def _remove_files(self, checkpoint: CheckpointRecord) -> None:
        with self._database.read() as connection:
            job = jobs.get(connection, _EVERYTHING, checkpoint.job_id, deleted=True)
            others = checkpoints.overlapping(connection, _EVERYTHING, checkpoint)
            if job.workload_kind == JOB_CLASS:
                others += checkpoints.elsewhere(connection, Scope(job.account_id), checkpoint)
        if retention.owns_files(checkpoint, others, root=ARTIFACTS, homes=checkpoints_homes(job)):
            aside = f"{_GOING}{secrets.token_hex(8)}"
            if self._roots.move(Location(root=ARTIFACTS, path=checkpoint.path), aside):
                self._roots.remove(Location(root=ARTIFACTS, path=aside))
            self._roots.forget(Location(root=ARTIFACTS, path=checkpoint.path))

    def _directories(self) -> Iterator[tuple[str, Job | None]]:
        """The directories of jobs by name, here and on the object store, with the jobs that are known."""
        present = {
            name for root in (RUNS, ARTIFACTS) for name in account_files.directories_in(self._roots.path(root, ""))
        }
        if self._roots.archive is not None:
            present |= {name for root in (RUNS, ARTIFACTS) for name in self._roots.archive.directories(root)}
        for batch in portions(sorted(filter(_JOB_DIRECTORY.fullmatch, present))):
            with self._database.read() as connection:
                known = {job.job_id: job for job in jobs.load(connection, _EVERYTHING, batch)}
            yield from ((name, known.get(name)) for name in batch)

    def _runs(self, job: Job, now: float, *, dry_run: bool) -> Iterator[Collected]:
        location = Location(root=RUNS, path=job.job_id)
        if not retention.runs_expired(job, self._keep, now=now):
            return
        stored = self._roots.stored_size_of(location)
        if not stored and not account_files.exists(self._roots.path(RUNS, ""), job.job_id):
            return
        size = self._roots.size_of(location) + stored

        def work(connection: Connection) -> bool:
            fresh = jobs.get(connection, _EVERYTHING, job.job_id, deleted=True)
            # A service may have been resumed, and have a new attempt in there.
            if not retention.runs_expired(fresh, self._keep, now=now):
                return False
            change = retention.expire_runs(fresh, now=now)
            applied = change is not None and jobs.apply(connection, _EVERYTHING, change)
            return applied and (self._take(location) or bool(stored))

        if dry_run or self._database.write_now(work):
            if stored and not dry_run:
                self._roots.forget(location)
            yield Collected(what="run directory", name=job.job_id, size_bytes=size)

    def _checkpoints(self, job: Job, now: float, *, dry_run: bool) -> Iterator[Collected]:
        def choose(connection: Connection, fresh: Job) -> tuple[list[CheckpointRecord], list[CheckpointRecord]]:
            present = checkpoints.of_job(connection, _EVERYTHING, fresh.job_id)
            in_use = checkpoints.users(connection, Scope(fresh.account_id), [c.checkpoint_id for c in present])
            expired = retention.expired_checkpoints(fresh, present, in_use=in_use, keep=self._keep, now=now)
            return expired, retention.without(present, expired)

        if not self._keep.checkpoints_s or not retention.ended_before(job, now - self._keep.checkpoints_s):
            return
        with self._database.read() as connection:
            expired, _ = choose(connection, job)
        if expired and not dry_run:
            expired = self._hide_checkpoints(job.job_id, choose, now)
        for checkpoint in expired:
            yield Collected(what="checkpoint", name=checkpoint.checkpoint_id, size_bytes=checkpoint.size_bytes)

    def _deleted(self, job: Job, now: float, *, dry_run: bool) -> Iterator[Collected]:
        """Purge a deleted job, unless another one resumes from a checkpoint of it."""
        with self._database.read() as connection:
            names = [c.checkpoint_id for c in checkpoints.of_job(connection, _EVERYTHING, job.job_id)]
            if checkpoints.users(connection, Scope(job.account_id), names):
                return
        places = [Location(root=root, path=job.job_id) for root in (RUNS, ARTIFACTS)]
        size = sum(self._roots.size_of(each) + self._roots.stored_size_of(each) for each in places)

        def work(connection: Connection) -> bool:
            change = commands.delete(jobs.get(connection, _EVERYTHING, job.job_id, deleted=True), now=now, purge=True)
            return change is not None and jobs.apply(connection, _EVERYTHING, change)

        if dry_run or self._database.write_now(work):
            yield Collected(what="deleted job", name=job.job_id, size_bytes=size)

    def _orphans(self, name: str, now: float, *, dry_run: bool) -> Iterator[Collected]:
        for root in (RUNS, ARTIFACTS):
            location = Location(root=root, path=name)
            top = self._roots.path(root, "")
            if not account_files.exists(top, name) or account_files.newest_in(top, name) > now - ORPHAN_AGE_S:
                continue
            size = self._roots.size_of(location)
            if dry_run or self._take(location):
                yield Collected(what="orphan", name=f"{root}:{name}", size_bytes=size)
        for location in (Location(root=root, path=name) for root in (RUNS, ARTIFACTS)):
            size = self._roots.stored_size_of(location)
            if size and self._roots.stored_since(location) <= now - ORPHAN_AGE_S:
                if not dry_run:
                    self._roots.forget(location)
                yield Collected(what="orphan", name=f"{location.uri} on the object store", size_bytes=size)

    def _caches(self, now: float, *, dry_run: bool) -> Iterator[Collected]:
        """The spool directories of couriers whose attempt has ended."""
        if self._spool is None or not self._keep.caches_s:
            return
        for name in account_files.directories_in(self._spool):
            yield from self._alone(name, self._cache(self._spool, name, now, dry_run=dry_run))

    def _cache(self, spool: Path, name: str, now: float, *, dry_run: bool) -> Iterator[Collected]:
        named = _SPOOLED.fullmatch(name)
        if named is None or account_files.newest_in(spool, name) > now - self._keep.caches_s:
            return
        with self._database.read() as connection:
            job = next(iter(jobs.load(connection, _EVERYTHING, [named[1]])), None)
        if job is not None and job.attempt is not None and job.attempt.number <= int(named[2]):
            return
        size = account_files.size_of(spool, name)
        if not dry_run:
            account_files.remove(spool, name)
        yield Collected(what="cache", name=name, size_bytes=size)

    def _drafts(self, now: float, *, dry_run: bool) -> Iterator[Collected]:
        """What a server that was killed had begun to bring back from the object store."""
        top = self._roots.path(ARTIFACTS, "")
        for name in account_files.directories_in(top, DRAFTS):
            location = Location(root=ARTIFACTS, path=f"{DRAFTS}/{name}")
            if account_files.newest_in(top, location.path) <= now - ORPHAN_AGE_S:
                size = self._roots.size_of(location)
                if not dry_run:
                    self._remove(location)
                yield Collected(what="cache", name=location.path, size_bytes=size)

    def _blobs(self, now: float, *, dry_run: bool) -> Iterator[Collected]:
        """Delete blobs that no job uses: first the row, so that nobody relies on a file that goes."""
        before = now - self._keep.blobs_s
        with self._database.read() as connection:
            unused = job_inputs.unused_blobs(connection, _EVERYTHING, before)
        for blob in unused:
            location = Location(root=BLOBS, path=blob_path(blob.account_id, blob.sha256))

            def work(connection: Connection, blob: Blob = blob, location: Location = location) -> bool:
                # Inside the transaction: nobody can upload the same content between the two.
                if not job_inputs.delete_blob(connection, _EVERYTHING, blob, before):
                    return False
                self._roots.remove(location)
                return True

            # Asked first: while the store is away, nothing would remember what is still to be removed there.
            self._roots.stored_size_of(location)
            if dry_run or self._database.write_now(work):
                if not dry_run:
                    self._roots.forget(location)
                yield Collected(what="blob", name=blob.sha256, size_bytes=blob.size_bytes)

    def _take(self, location: Location) -> bool:
        """Hide a directory; False when somebody else did."""
        return self._roots.move(location, f"{_GOING}{location.path}-{secrets.token_hex(4)}")

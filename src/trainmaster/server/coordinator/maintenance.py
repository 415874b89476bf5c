"""The leader's maintenance: files of purged jobs, what has outlived its job, old idempotency keys."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import Connection

from trainmaster.server.archive import ObjectStoreAwayError
from trainmaster.server.coordinator.retention import FAILED, Collector
from trainmaster.server.storage import ARTIFACTS, RUNS, Location, Roots
from trainmaster.server.store import accounts, jobs
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

_log = logging.getLogger(__name__)
_EVERYTHING = Scope.everything()

IDEMPOTENCY_KEEP_S = 24 * 3600.0
"""How long a repeated request is recognised."""
COLLECT_EVERY_S = 600.0
"""Looking for what has outlived its job takes longer than the other tasks, and is less urgent."""
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back_memory() -> None:
    """Have the C library return to the system what was freed after a burst of requests, and what lies between blocks
    that are in use. glibc alone keeps that; a call takes milliseconds."""
    if _trim is not None:
        _trim(0)


@dataclass(eq=False)
class Maintenance:
    """Runs the maintenance in a thread every so often, while this server leads."""

    database: Database
    roots: Roots
    leads: Callable[[], bool]
    collector: Collector
    every_s: float = 30.0
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._collected_at: float | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="maintenance", daemon=True)

    def start(self) -> None:
        # The first collection is late: until then, settings that keep too little can be noticed and corrected.
        self._collected_at = self.clock()
        self._thread.start()

    def stop(self) -> None:
        """Stop; the next leader finishes what is under way."""
        self._stopping.set()

    def _run(self) -> None:
        # The first round comes soon: a server that starts has the most to tidy up.
        wait_s = 2.0
        while not self._stopping.wait(wait_s):
            wait_s = self.every_s
            if self.leads():
                try:
                    self.do()
                except Exception:
                    _log.exception("a chore failed; it is tried again")
            give_back_memory()

    def do(self) -> None:
        now = self.clock()
        self._purge_jobs()
        for gone in self.collector.expire(now):
            if gone.what != FAILED:  # which the collector has logged
                _log.info("checkpoint %s has expired, %d bytes", gone.name, gone.size_bytes)
        if self._collected_at is None or now >= self._collected_at + COLLECT_EVERY_S:
            last, self._collected_at = self._collected_at, now
            try:
                self._collect(now)
            except ObjectStoreAwayError as error:
                self._collected_at = last
                _log.warning("what is not kept any longer stays for now: %s", error.message)
        self.collector.sweep()
        self.database.write_now(
            lambda connection: accounts.forget_requests(connection, _EVERYTHING, now - IDEMPOTENCY_KEEP_S)
        )

    def _collect(self, now: float) -> None:
        for gone in self.collector.collect(now):
            if gone.what != FAILED:
                _log.info("collected %s %s, %d bytes", gone.what, gone.name, gone.size_bytes)
            if self._stopping.is_set():
                break

    def _purge_jobs(self) -> None:
        """Remove the files of jobs that were deleted with `purge`, then the mark."""
        with self.database.read() as connection:
            deleted = jobs.to_purge(connection, _EVERYTHING)
        gone = [job_id for job_id in deleted if self._remove_files(job_id)]

        def work(connection: Connection) -> None:
            for job_id in gone:
                jobs.purged(connection, _EVERYTHING, job_id)

        if gone:
            self.database.write_now(work)

    def _remove_files(self, job_id: str) -> bool:
        """Remove all files of a job; False when that failed, which does not stop the other jobs' removal."""
        try:
            self.collector.purge_checkpoints(job_id)
            for root in (ARTIFACTS, RUNS):
                self.roots.purge(Location(root=root, path=job_id))
        except (OSError, ObjectStoreAwayError) as error:
            _log.warning("the files of job %s cannot be removed; this is tried again: %s", job_id, error)
            return False
        return True

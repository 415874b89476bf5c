"""What the leader tidies up now and then: unused blobs, purged jobs, old idempotency keys."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from sqlalchemy import Connection

from trainmaster.storage import ARTIFACTS, BLOBS, RUNS, Location, Roots, blob_path
from trainmaster.store import blobs, idempotency, jobs
from trainmaster.store.blobs import Blob
from trainmaster.store.database import Database
from trainmaster.store.scope import Scope

_log = logging.getLogger(__name__)
_EVERYTHING = Scope.everything()

IDEMPOTENCY_KEEP_S = 24 * 3600.0
"""How long a repeated request is recognised."""


class Chores:
    """Done by a thread of its own every so often, while this server leads: removing much takes long."""

    def __init__(
        self,
        database: Database,
        roots: Roots,
        *,
        leads: Callable[[], bool],
        blob_keep_s: float,
        every_s: float = 30.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._roots = roots
        self._leads = leads
        self._blob_keep_s = blob_keep_s
        self._every_s = every_s
        self._clock = clock
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chores", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; what is under way is left to the next leader."""
        self._stopping.set()

    def _run(self) -> None:
        # The first round comes soon: a server that starts has the most to tidy up.
        wait_s = 2.0
        while not self._stopping.wait(wait_s):
            wait_s = self._every_s
            if self._leads():
                try:
                    self.do()
                except Exception:
                    _log.exception("a chore failed; it is tried again")

    def do(self) -> None:
        """Do what is due, once."""
        now = self._clock()
        self._purge_jobs()
        self._collect_blobs(now)
        self._database.write_now(
            lambda connection: idempotency.prune(connection, _EVERYTHING, now - IDEMPOTENCY_KEEP_S)
        )

    def _purge_jobs(self) -> None:
        """Remove the files of jobs that were deleted with `purge`: first the files, then the mark."""
        with self._database.read() as connection:
            buried = jobs.to_purge(connection, _EVERYTHING)
        for job_id in buried:
            for root in (ARTIFACTS, RUNS):
                self._roots.remove(Location(root=root, path=job_id))

        def work(connection: Connection) -> None:
            for job_id in buried:
                jobs.purged(connection, _EVERYTHING, job_id)

        if buried:
            self._database.write_now(work)

    def _collect_blobs(self, now: float) -> None:
        """Forget blobs that no job uses: first the record, so that nobody relies on a file that goes."""
        with self._database.read() as connection:
            unused = blobs.unused(connection, _EVERYTHING, now - self._blob_keep_s)
        for blob in unused:

            def work(connection: Connection, blob: Blob = blob) -> None:
                # Inside the transaction: nobody can upload the same content between the two.
                if blobs.delete(connection, _EVERYTHING, blob, now - self._blob_keep_s):
                    self._roots.remove(Location(root=BLOBS, path=blob_path(blob.account_id, blob.sha256)))

            self._database.write_now(work)

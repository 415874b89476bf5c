"""One leader at a time: a lease with a rising epoch, renewed by a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import Connection

from trainmaster.server.core.errors import TrainmasterError
from trainmaster.server.store import leases
from trainmaster.server.store.database import Database
from trainmaster.server.store.leases import Lease
from trainmaster.server.store.scope import Scope

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Leadership:
    """Takes the lease when it is free, and keeps it while the loop makes progress. The lease alone proves nothing:
    every transaction of the leader checks the epoch again."""

    database: Database
    holder: str
    url: str
    lease_s: float
    on_change: Callable[[], None]
    patience_s: float = 60.0
    """A loop that finishes no pass for so long is stuck, and another server should lead."""

    def __post_init__(self) -> None:
        self._lease: Lease | None = None
        self._progress_at = time.monotonic()
        self._not_before = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    @property
    def epoch(self) -> int | None:
        """The epoch in which this server leads; None when it does not."""
        lease = self._lease
        return lease.epoch if lease else None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Release the lease, so that another server need not wait for it to expire."""
        self._stopping.set()
        self._thread.join()
        lease, self._lease = self._lease, None
        if lease is not None:
            try:
                self._release(lease)
            except TrainmasterError:
                _log.warning("the lease could not be given back; it runs out by itself")

    def progressed(self) -> None:
        """The loop calls this after each pass."""
        self._progress_at = time.monotonic()

    def lost(self) -> None:
        """The loop calls this when a transaction found another epoch."""
        self._lease = None

    def _keep(self) -> None:
        while True:
            try:
                self._renew()
            except Exception as error:
                _log.warning("lease not renewed: %s", error)
                self._lease = None
            if self._stopping.wait(self.lease_s / 5):
                return

    def _release(self, lease: Lease) -> None:
        self.database.write_now(lambda connection: leases.release(connection, Scope.everything(), lease))

    def _renew(self) -> None:
        lease = self._lease
        if lease is not None and time.monotonic() - self._progress_at > self.patience_s:
            _log.error("the coordinator made no progress for %.0f s: giving up the lead", self.patience_s)
            self._lease = None
            # Another server has the time to take it.
            self._not_before = time.monotonic() + 2 * self.lease_s
            self._release(lease)
        if time.monotonic() < self._not_before:
            return
        before = self._lease

        def work(connection: Connection) -> Lease | None:
            scope = Scope.everything()
            now = leases.now(connection, scope)
            if before is not None:
                return leases.renew(connection, scope, before, now, self.lease_s)
            return leases.acquire(connection, scope, self.holder, self.url, now, self.lease_s)

        self._lease = self.database.write_now(work)
        if (before and before.epoch) != (self._lease and self._lease.epoch):
            _log.info("leads with epoch %d", self._lease.epoch) if self._lease else _log.info("leads no more")
            self._progress_at = time.monotonic()
            self.on_change()

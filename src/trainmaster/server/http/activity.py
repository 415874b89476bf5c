"""When services were last used: kept in memory, and written every second while one is in use."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future

from sqlalchemy import Connection

from trainmaster.server.http.context import ApiContext
from trainmaster.server.store import jobs
from trainmaster.server.store.scope import Scope

_log = logging.getLogger(__name__)

WRITE_EVERY_S = 1.0
"""Small against any sensible time after which a service is parked for want of use."""


class Activity:
    """Collects the use of services; belongs to one event loop."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._in_flight: Counter[str] = Counter()
        self._used: dict[str, float] = {}
        self._due: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def use(self, job_id: str) -> Iterator[None]:
        """A service is in use until this ends, however long that takes."""
        self._in_flight[job_id] += 1
        self._touch(job_id)
        try:
            yield
        finally:
            self._in_flight[job_id] -= 1
            if not self._in_flight[job_id]:
                del self._in_flight[job_id]
            self._touch(job_id)

    def _touch(self, job_id: str) -> None:
        self._used[job_id] = self._context.clock()
        if self._due is None:
            # The first use after a pause is written at once, so that nobody parks the service meanwhile.
            self._write()

    def _again(self) -> None:
        self._due = None
        self._used.update(dict.fromkeys(self._in_flight, self._context.clock()))
        if self._used:
            self._write()

    def _write(self) -> None:
        used, self._used = self._used, {}

        def work(connection: Connection) -> None:
            for job_id, at in used.items():
                jobs.record_use(connection, Scope.everything(), job_id, at)

        self._due = asyncio.get_running_loop().call_later(WRITE_EVERY_S, self._again)
        self._context.database.write(work).add_done_callback(_report)


def _report(written: Future[None]) -> None:
    if not written.cancelled() and (error := written.exception()) is not None:
        _log.warning("the use of services could not be recorded: %s", error)

"""Group commit: one thread that writes, and one flush to disk for everything that waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, RootTransaction
from sqlalchemy.exc import DBAPIError

from trainmaster.server import failpoints
from trainmaster.server.core.errors import StoreUnavailableError, TrainmasterError
from trainmaster.server.settings.telemetry import METERS

T = TypeVar("T")

GROUP_SIZE = 256
"""Bounds how long the first closure of a group waits for the last."""


@dataclass(slots=True)
class _Work:
    closure: Callable[[Connection], Any]
    future: Future[Any]
    value: Any = None
    error: BaseException | None = None


class Writer:
    """Runs closures one after another, and commits as many as are waiting at once.

    A closure that raises leaves nothing behind and does not disturb the others of its group. No future is resolved
    before what its closure wrote is on disk.
    """

    def __init__(self, engine: Engine, meaning: Callable[[BaseException], TrainmasterError | None]) -> None:
        """Take an engine whose transactions run one at a time, and what tells an error of the database by its name."""
        self._engine = engine
        self._meaning = meaning
        self._connection: Connection | None = None
        self._waiting: SimpleQueue[_Work | None] = SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    def submit(self, closure: Callable[[Connection], T]) -> Future[T]:
        """Queue a closure; its future has what it returned or raised."""
        future: Future[T] = Future()
        with self._closing:
            if self._closed:
                raise StoreUnavailableError("the database is closed")
            self._waiting.put(_Work(closure, future))
        return future

    def close(self) -> None:
        """Write what is queued, and stop."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        open_ = True
        while open_:
            group = [self._waiting.get()]
            while len(group) < GROUP_SIZE and group[-1] is not None:
                try:
                    group.append(self._waiting.get_nowait())
                except Empty:
                    break
            open_ = group[-1] is not None
            # A future that was cancelled while it waited is not run.
            works = [work for work in group if work is not None and work.future.set_running_or_notify_cancel()]
            if works:
                self._write(works)
        self._disconnect()

    def _write(self, works: list[_Work]) -> None:
        try:
            self._commit(works)
        except BaseException as error:
            # Nothing of the group was written, unless a failpoint struck after the commit.
            if self._is_failure(error) or (self._connection is not None and self._connection.in_transaction()):
                self._disconnect()
            for work in works:
                work.error = error
        for work in works:
            if work.error is None:
                work.future.set_result(work.value)
            else:
                work.future.set_exception(self._meaning(work.error) or work.error)

    def _commit(self, works: list[_Work]) -> None:
        with self._begin() as transaction:
            if len(works) == 1:
                works[0].value = works[0].closure(transaction.connection)
            else:
                self._run_apart(transaction.connection, works)
            failpoints.reach("store.before_commit")
        METERS.commit_sizes.observe(len(works))
        failpoints.reach("store.after_commit")

    def _begin(self) -> RootTransaction:
        if self._connection is not None:
            try:
                return self._connection.begin()
            except DBAPIError as error:
                if not error.connection_invalidated:
                    raise
                # It was lost while nobody wrote, for example because the database was restarted.
                self._disconnect()
        self._connection = self._engine.connect()
        return self._connection.begin()

    def _run_apart(self, connection: Connection, works: list[_Work]) -> None:
        # Savepoints by the driver's own cursor: SQLAlchemy's take longer than an insert.
        savepoint = connection.connection.cursor()
        for work in works:
            savepoint.execute("SAVEPOINT closure")
            try:
                work.value = work.closure(connection)
            except BaseException as error:
                work.error = error
                try:
                    savepoint.execute("ROLLBACK TO SAVEPOINT closure")
                except Exception as failure:
                    # After some errors, such as a full disk, the database gives up the whole transaction.
                    raise (failure if self._is_failure(failure) else error) from None
            savepoint.execute("RELEASE SAVEPOINT closure")

    def _is_failure(self, error: BaseException) -> bool:
        return isinstance(self._meaning(error), StoreUnavailableError)

    def _disconnect(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.invalidate()  # whatever state it is in
            connection.close()

"""Opens the database; reads from it on any thread, and writes to it on one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from sqlalchemy import Connection, Engine

from trainmaster.core.errors import StoreUnavailableError
from trainmaster.store import migrate, sqlite
from trainmaster.store.writer import Writer

T = TypeVar("T")


class Database:
    """An open database.

    Reading and writing raise `StoreUnavailableError` while the database is locked by another process, full or broken.
    """

    def __init__(self, *, writing: Engine, reading: Engine) -> None:
        self._reading = reading
        self._writer = Writer(writing)
        self._watch = reading.raw_connection()
        self._watch_lock = threading.Lock()

    @staticmethod
    def open(url: str, *, lock_timeout_s: float = 5.0) -> Database:
        """Open a database, made or migrated as needed; any number of processes may do so at the same time.

        Args:
            url: an SQLite file, such as `sqlite:////srv/trainmaster/trainmaster.db`.
            lock_timeout_s: how long a write waits for a lock that another process holds.

        Raises:
            RefusedError: no such database can be used, for example because it lies on a network file system.
            NewerDatabaseError: a newer version of Trainmaster has migrated it.
            StoreUnavailableError: it cannot be opened now.
        """
        path = sqlite.database_path(url)
        writing = sqlite.writing_engine(path, lock_timeout_s)
        reading = sqlite.reading_engine(path, lock_timeout_s)
        try:
            with sqlite.translated(), sqlite.setting_up(path):
                with reading.connect() as connection:
                    up_to_date = migrate.revision(connection) == migrate.HEAD
                if not up_to_date:
                    with writing.begin() as connection:
                        migrate.upgrade(connection)
            return Database(writing=writing, reading=reading)
        except BaseException as error:
            reading.dispose()
            if isinstance(error, OSError):
                raise StoreUnavailableError(f"the database {path} cannot be opened: {error.strerror}") from error
            raise

    def close(self) -> None:
        """Write what is queued, and let go of the database."""
        self._writer.close()
        self._watch.close()
        self._reading.dispose()

    def write(self, closure: Callable[[Connection], T]) -> Future[T]:
        """Queue a closure for the next transaction; its future is resolved when that is on disk.

        The closure runs on the writer's thread, together with others but apart from them: when it raises, what it
        wrote is taken back, and its future has the exception. It must not commit, nor wait for another write.
        """
        return self._writer.submit(closure)

    def write_now(self, closure: Callable[[Connection], T]) -> T:
        """Write, and wait until it is on disk."""
        return self.write(closure).result()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection for reading, on any thread: sees one state of the database from its first query to its end."""
        with sqlite.translated(), self._reading.connect() as connection:
            yield connection

    def data_version(self) -> int:
        """A number that changes whenever anything was committed, by this process or another; cheap to ask for."""
        with self._watch_lock, sqlite.translated():
            return sqlite.data_version(self._watch)

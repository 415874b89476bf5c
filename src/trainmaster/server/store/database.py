"""The database: opening and migrating it, reading on any thread, and writing on one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from sqlalchemy import URL, Connection, Engine, RootTransaction, insert, inspect, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError

from trainmaster.server import failpoints
from trainmaster.server.core.errors import NewerDatabaseError, RefusedError, StoreUnavailableError, TrainmasterError
from trainmaster.server.settings.telemetry import METERS
from trainmaster.server.store import postgres, queues, schema, sqlite
from trainmaster.server.store.scope import Scope

HEAD = "0008"
"""The newest revision under `migrations/versions`; written here too because Alembic is slow to import."""


def revision(connection: Connection) -> str | None:
    """The database's revision; None when it is empty."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def set_up(connection: Connection) -> None:
    """Create the tables in an empty database, or run the missing migrations, inside the connection's transaction."""
    if (present := revision(connection)) is not None:
        if present != HEAD:
            _migrate(connection, present)
        return
    schema.metadata.create_all(connection)
    connection.execute(insert(schema.queues), {"name": queues.DEFAULT, "created_at": time.time()})
    connection.execute(insert(schema.leader), {"id": 1, "epoch": 0, "url": "", "expires_at": 0.0})
    # As Alembic has it.
    key = "version_num VARCHAR(32) NOT NULL, CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)"
    connection.execute(text(f"CREATE TABLE alembic_version ({key})"))
    connection.execute(text("INSERT INTO alembic_version VALUES (:head)"), {"head": HEAD})


def _migrate(connection: Connection, present: str) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")).replace("%", "%%"))
    if present not in {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}:
        raise NewerDatabaseError(
            f"the database has revision {present}, which only a newer version of Trainmaster knows; upgrade this server"
        )
    command.upgrade(config, HEAD)


T = TypeVar("T")

PROBE_EVERY_S = 1.0
"""Health checks may come at any rate; a probe is shared for so long."""


class CommitWatch(Protocol):
    """A number that changes whenever anybody has committed."""

    def version(self) -> int: ...

    def close(self) -> None: ...


class Kind(Protocol):
    """What differs between kinds of database; `store.sqlite` and `store.postgres` say what each function does."""

    def checked(self, url: URL) -> URL: ...

    def setting_up(self, url: URL) -> AbstractContextManager[None]: ...

    def writing_engine(self, url: URL, lock_timeout_s: float) -> Engine: ...

    def reading_engine(self, url: URL, lock_timeout_s: float) -> Engine: ...

    def watch(self, url: URL, reading: Engine) -> CommitWatch: ...

    def meaning(self, error: BaseException) -> TrainmasterError | None: ...


_KINDS: dict[str, Kind] = {"sqlite": sqlite, "postgresql": postgres}


class Database:
    """An open database. Reading and writing raise `StoreUnavailableError` while it is held by another process, full,
    broken or out of reach; both go on by themselves when it is there again."""

    def __init__(self, kind: Kind, *, writing: Engine, reading: Engine, watch: CommitWatch) -> None:
        self._kind = kind
        self._reading = reading
        self._writer = Writer(writing, kind.meaning)
        self._watch = watch
        self._watch_lock = threading.Lock()
        self._probe: Future[None] | None = None
        self._probe_began = 0.0

    @staticmethod
    def open(url: str, *, lock_timeout_s: float = 5.0) -> Database:
        """Open a database, created or migrated as needed; any number of processes may do so at once. A write waits for
        `lock_timeout_s` for another process. RefusedError: it cannot be used; StoreUnavailableError: not now."""
        kind, place = _find(url)
        place = kind.checked(place)
        writing = kind.writing_engine(place, lock_timeout_s)
        reading = kind.reading_engine(place, lock_timeout_s)
        try:
            with _translated(kind), kind.setting_up(place):
                with reading.connect() as connection:
                    up_to_date = revision(connection) == HEAD
                if not up_to_date:
                    with writing.begin() as connection:
                        set_up(connection)
                return Database(kind, writing=writing, reading=reading, watch=kind.watch(place, reading))
        except BaseException as error:
            reading.dispose()
            if isinstance(error, OSError):
                raise StoreUnavailableError(
                    f"the database {place.database} cannot be opened: {error.strerror}"
                ) from error
            raise

    def close(self) -> None:
        """Commit the queued writes, and close the database."""
        self._writer.close()
        self._watch.close()
        self._reading.dispose()

    def write(self, closure: Callable[[Connection], T]) -> Future[T]:
        """Queue a closure for the next transaction; its future is resolved when that is on disk. It runs on the
        writer's thread: when it raises, what it wrote is taken back. It must not commit, nor wait for another write. No
        other process writes meanwhile: what it reads stays true until it is committed."""
        return self._writer.submit(closure)

    def write_now(self, closure: Callable[[Connection], T]) -> T:
        return self.write(closure).result()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection for reading, on any thread: sees one state of the database from its first query to its end."""
        with _translated(self._kind), self._reading.connect() as connection:
            yield connection

    def probe(self) -> Future[None]:
        """Write no change, to see whether the database accepts writes. Shared for a second; call it on one thread."""
        if self._probe is None or (self._probe.done() and time.monotonic() - self._probe_began > PROBE_EVERY_S):
            self._probe_began = time.monotonic()
            self._probe = self.write(lambda connection: queues.touch(connection, Scope.everything()))
        return self._probe

    def data_version(self) -> int:
        """A number that changes whenever this process or another has committed; cheap to read."""
        with self._watch_lock, _translated(self._kind):
            return self._watch.version()


def check_url(url: str) -> None:
    """Raise RefusedError unless the URL names a supported kind of database; does not open it."""
    _find(url)


def _find(url: str) -> tuple[Kind, URL]:
    forms = "sqlite:////srv/trainmaster.db or postgresql://user@host/database"
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise RefusedError(f"the database must be named by a URL, such as {forms}") from error
    if (kind := _KINDS.get(parsed.get_backend_name())) is None:
        raise RefusedError(f"{parsed.render_as_string()}: no such kind of database is known; there are {forms}")
    return kind, parsed


@contextmanager
def _translated(kind: Kind) -> Iterator[None]:
    """Raise the meaning of the database's own errors."""
    try:
        yield
    except Exception as error:
        if meant := kind.meaning(error):
            raise meant from error
        raise


# Group commit: one thread that writes, and one flush to disk for everything that waits.

GROUP_SIZE = 256
"""Bounds how long the first closure of a group waits for the last."""


@dataclass(slots=True)
class _QueuedWrite:
    closure: Callable[[Connection], Any]
    future: Future[Any]
    value: Any = None
    error: BaseException | None = None


class Writer:
    """Runs closures one after another, and commits as many as are waiting at once. One that raises leaves nothing
    behind and does not disturb the others. No future is resolved before what its closure wrote is on disk."""

    def __init__(self, engine: Engine, meaning: Callable[[BaseException], TrainmasterError | None]) -> None:
        self._engine = engine
        self._meaning = meaning
        self._connection: Connection | None = None
        self._waiting: SimpleQueue[_QueuedWrite | None] = SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    def submit(self, closure: Callable[[Connection], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._closing:
            if self._closed:
                raise StoreUnavailableError("the database is closed")
            self._waiting.put(_QueuedWrite(closure, future))
        return future

    def close(self) -> None:
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

    def _write(self, works: list[_QueuedWrite]) -> None:
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

    def _commit(self, works: list[_QueuedWrite]) -> None:
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

    def _run_apart(self, connection: Connection, works: list[_QueuedWrite]) -> None:
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

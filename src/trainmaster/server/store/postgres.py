"""What is particular to PostgreSQL. Every transaction that writes takes one advisory lock first, and keeps it until its
commit can be seen. So writes of all servers run one after another, as on SQLite: what a transaction has read stays true
until it ends, ids rise in the order of commits, and nobody takes the lead while a leader's transaction is under way."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import NullPool
from sqlalchemy.sql.compiler import SQLCompiler

from trainmaster.server.core.errors import RefusedError, StoreUnavailableError, TrainmasterError
from trainmaster.server.store.records import database_time, listed

if TYPE_CHECKING:
    import psycopg

WRITERS = 7_077_061_401
"""The advisory lock of writers. Other databases have locks of their own under the same number."""
SILENT_AFTER_S = 5.0
"""A server that is silent in a transaction for so long is frozen or cut off, and loses the lock."""
READERS = 16
"""The most connections for reading. With one for writing and one for watching, a server has at most 18."""
OLDEST = 13
"""The first version of PostgreSQL that can tell its snapshot."""

_REACHING = {
    "client_encoding": "utf8",
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "keepalives_interval": "3",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
    "application_name": "trainmaster",
}
"""Parameters by which a connection notices within seconds that the other machine is gone. The URL may override them."""


def checked(url: URL) -> URL:
    """The URL with its driver and time-outs; RefusedError where it names no database or another driver."""
    shown = url.render_as_string(hide_password=True)
    if url.drivername not in ("postgresql", "postgresql+psycopg"):
        raise RefusedError(f"{shown}: the driver for PostgreSQL is psycopg; write postgresql://")
    if not url.database:
        raise RefusedError(f"{shown} names no database; write postgresql://user@host/database")
    if importlib.util.find_spec("psycopg") is None:
        raise RefusedError("PostgreSQL needs one more package: pip install 'trainmaster[postgres]'")
    missing = {name: value for name, value in _REACHING.items() if name not in url.query}
    return url.set(drivername="postgresql+psycopg").update_query_dict(missing)


@contextmanager
def setting_up(url: URL) -> Iterator[None]:
    """Refuse a version or an encoding that is not supported. The writers' lock separates servers that migrate."""
    engine = _engine(url, poolclass=NullPool)
    with engine.connect() as connection:
        settings = "current_setting('server_version_num')::int / 10000, current_setting('server_encoding')"
        version, encoding = connection.exec_driver_sql(f"SELECT {settings}").one()
    if version < OLDEST:
        raise RefusedError(f"PostgreSQL {version} is too old; {OLDEST} or newer is needed")
    if encoding != "UTF8":
        raise RefusedError(f"the database {url.database} has the encoding {encoding}; make it with the encoding UTF8")
    yield


def writing_engine(url: URL, lock_timeout_s: float) -> Engine:
    """An engine whose transactions take the writers' lock when they begin."""
    engine = _engine(url, poolclass=NullPool)

    @event.listens_for(engine, "connect")
    def set_up(connection: psycopg.Connection[Any], _record: object) -> None:
        connection.execute(
            f"SET lock_timeout = {_ms(lock_timeout_s)};SET idle_in_transaction_session_timeout = {_ms(SILENT_AFTER_S)}"
        )
        connection.commit()

    @event.listens_for(engine, "begin")
    def take_the_lock(connection: Connection) -> None:
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({WRITERS})")

    @event.listens_for(engine, "commit")
    def refuse_what_failed(connection: Connection) -> None:
        # PostgreSQL would roll such a transaction back and say nothing: it would pass for written.
        driver = connection.connection.driver_connection
        if driver is not None and driver.info.transaction_status.name == "INERROR":
            driver.rollback()
            raise RuntimeError("an error of the database was ignored in the middle of a write")

    return engine


def reading_engine(url: URL, lock_timeout_s: float) -> Engine:
    """An engine whose transactions see one state of the database and cannot write. It tests a connection before each
    use, so that reading continues after a restart of the database."""
    half = READERS // 2
    engine = _engine(url, pool_size=half, max_overflow=half, pool_timeout=lock_timeout_s, pool_pre_ping=True)

    @event.listens_for(engine, "connect")
    def set_up(connection: psycopg.Connection[Any], _record: object) -> None:
        import psycopg

        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        connection.execute(f"SET lock_timeout = {_ms(lock_timeout_s)}")
        connection.commit()

    return engine


class PostgresWatch:
    """Detects commits by the snapshot that a query would see: cheap, and nothing to listen to."""

    def __init__(self, url: URL, reading: Engine) -> None:  # noqa: ARG002 - readers are in a transaction
        self._engine = _engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        self._connection: Connection | None = None

    def version(self) -> int:
        if self._connection is None:
            self._connection = self._engine.connect()
        try:
            snapshot = self._connection.exec_driver_sql("SELECT pg_current_snapshot()::text").scalar_one()
        except DBAPIError:
            self.close()  # the next question is asked on a new connection
            raise
        return hash(snapshot)

    def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.invalidate()
            connection.close()


watch = PostgresWatch


def meaning(error: BaseException) -> TrainmasterError | None:
    """The error of ours that an error of the database stands for; None when it is not the database's."""
    import psycopg

    if isinstance(error, PoolTimeoutError):
        return StoreUnavailableError("too many requests read the database at once; try again")
    if isinstance(error, UnicodeEncodeError):  # half a character
        return RefusedError(f"the database takes no such value ({error})")
    cause = error.orig if isinstance(error, DBAPIError) else error
    if not isinstance(cause, psycopg.Error):
        return None
    said = " ".join(str(cause).split())
    code = cause.sqlstate or ""
    if advice := _FAILURES.get(code) or _FAILURES.get(code[:2]):
        return StoreUnavailableError(f"{advice} ({said})")
    if isinstance(cause, psycopg.DataError | psycopg.errors.ProgramLimitExceeded):
        # Such as a NUL in a text, a number that is too large or a key that is too long; SQLite takes more.
        return RefusedError(f"the database takes no such value ({said})")
    if isinstance(cause, psycopg.OperationalError | psycopg.InterfaceError):
        return StoreUnavailableError(f"the database cannot be reached; try again ({said})")
    return None


_FAILURES = {
    "25006": "the database cannot be written: it is a standby, or was set to read only",
    "25P03": "the connection was silent for too long in the middle of a write; try again",
    "28": "the database refuses this user; check the name and the password in the URL",
    "40": "the database gave the transaction up; try again",
    "42501": "the database refuses this user; it must own the database or may create tables in it",
    "53": "the database lacks resources; try again",
    "53100": "there is no space left for the database; free some and try again",
    "55P03": "another server holds the database; try again",
    "57": "the database is being stopped or started; try again",
    "57014": "the database gave the query up; try again",
    "58": "the database's disk does not work",
    "XX": "the database failed; its log says why",
    "XX001": "the database is damaged; restore it from a backup",
    "XX002": "an index of the database is damaged; restore it from a backup, or REINDEX",
}
"""By SQLSTATE, or by its class."""


@compiles(database_time, "postgresql")
def _database_time(_element: database_time, _compiler: object, **_options: object) -> str:
    return "EXTRACT(EPOCH FROM clock_timestamp())::double precision"


@compiles(listed, "postgresql")
def _listed(element: listed, compiler: SQLCompiler, **options: Any) -> str:
    return f"(SELECT json_array_elements_text(CAST({compiler.process(element.clauses, **options)} AS json)))"


def _engine(url: URL, **options: Any) -> Engine:
    # What was to be written is in no error: it may be a token.
    return create_engine(url, use_native_hstore=False, hide_parameters=True, **options)


def _ms(seconds: float) -> int:
    return int(seconds * 1000)

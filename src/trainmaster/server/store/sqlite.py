"""What is particular to SQLite: where its file may lie, how it is opened, what its errors mean."""

from __future__ import annotations

import fcntl
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import NullPool, QueuePool
from sqlalchemy.sql.compiler import SQLCompiler

from trainmaster.server.core.errors import RefusedError, StoreUnavailableError, TrainmasterError
from trainmaster.server.store.records import database_time, listed

NETWORK_FILE_SYSTEMS = frozenset(
    {"9p", "afs", "ceph", "cifs", "fuse.sshfs", "nfs", "nfs4", "smb", "smb2", "smb3", "smbfs"}
)
"""Their locks and shared memory do not hold between machines, and SQLite's write-ahead log needs both."""


def checked(url: URL) -> URL:
    """The URL with an absolute path; RefusedError where it names no file, or one on a network file system."""
    if url.database in (None, "", ":memory:"):
        raise RefusedError(f"{url.render_as_string()} names no file; write sqlite:////absolute/path.db")
    path = Path(str(url.database)).absolute()
    if not path.parent.is_dir():
        raise RefusedError(f"there is no directory {path.parent} for the database")
    kind = file_system(path, Path("/proc/mounts").read_text(encoding="utf-8", errors="surrogateescape"))
    if kind in NETWORK_FILE_SYSTEMS:
        raise RefusedError(
            f"the database {path} lies on a network file system ({kind}), where SQLite loses data; use a local disk, "
            "or PostgreSQL"
        )
    return URL.create("sqlite", database=str(path))


def file_system(path: Path, mounts: str) -> str | None:
    """The type of the file system of a path, by the text of `/proc/mounts`."""
    place = os.path.realpath(path)
    deepest, found = "", None
    for line in mounts.splitlines():
        _, mount_point, kind, *_ = line.split(" ")
        mount_point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), mount_point)
        inside = place == mount_point or place.startswith(mount_point.rstrip("/") + "/")
        if inside and len(mount_point) >= len(deepest):  # a later mount on the same point hides an earlier one
            deepest, found = mount_point, kind
    return found


@contextmanager
def setting_up(url: URL) -> Iterator[None]:
    """Create the database's file, readable by its owner alone (it holds tokens), while all other processes wait."""
    path = str(url.database)
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(FileExistsError):
            # Never opened when it exists: to close it would drop the locks that this process has on it elsewhere.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
        yield
    finally:
        os.close(lock)


def writing_engine(url: URL, lock_timeout_s: float) -> Engine:
    """An engine whose transactions take the write lock when they begin and are on disk when they end."""
    return _engine(
        url, lock_timeout_s, "BEGIN IMMEDIATE", ("synchronous = FULL", "foreign_keys = ON"), poolclass=NullPool
    )


def reading_engine(url: URL, lock_timeout_s: float) -> Engine:
    """An engine whose transactions see one state of the database and cannot write."""
    room = {"pool_size": 8, "max_overflow": -1}
    return _engine(url, lock_timeout_s, "BEGIN", ("query_only = ON",), poolclass=QueuePool, **room)


class SqliteWatch:
    """Detects commits by a number that SQLite keeps for each connection."""

    def __init__(self, url: URL, reading: Engine) -> None:  # noqa: ARG002 - any connection will do
        self._connection = reading.raw_connection()

    def version(self) -> int:
        cursor = self._connection.cursor()
        cursor.execute("PRAGMA data_version")
        ((version,),) = cursor.fetchall()
        return int(version)

    def close(self) -> None:
        self._connection.close()


watch = SqliteWatch


def meaning(error: BaseException) -> TrainmasterError | None:
    """The error of ours that an error of the database stands for; None when it is not the database's."""
    if isinstance(error, UnicodeEncodeError):  # half a character
        return RefusedError(f"the database takes no such value ({error})")
    cause = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(cause, "sqlite_errorcode", None)
    if code is None or (advice := _FAILURES.get(code & 0xFF)) is None:
        return None
    return StoreUnavailableError(f"{advice} ({cause})")


_FAILURES = {
    sqlite3.SQLITE_BUSY: "another process holds the database; try again",
    sqlite3.SQLITE_LOCKED: "another process holds the database; try again",
    sqlite3.SQLITE_PROTOCOL: "another process holds the database; try again",
    sqlite3.SQLITE_FULL: "there is no space left for the database; free some and try again",
    sqlite3.SQLITE_IOERR: "the database's disk does not work",
    sqlite3.SQLITE_CANTOPEN: "the database cannot be opened",
    sqlite3.SQLITE_READONLY: "the database cannot be written",
    sqlite3.SQLITE_PERM: "the database cannot be opened",
    sqlite3.SQLITE_NOMEM: "there is no memory left for the database",
    sqlite3.SQLITE_CORRUPT: "the database is damaged; restore it from a backup",
    sqlite3.SQLITE_NOTADB: "the file is not a database",
}
"""By SQLite's primary result code."""


@compiles(database_time, "sqlite")
def _database_time(_element: database_time, _compiler: object, **_options: object) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(listed, "sqlite")
def _listed(element: listed, compiler: SQLCompiler, **options: Any) -> str:
    return f"(SELECT value FROM json_each({compiler.process(element.clauses, **options)}))"


def _engine(url: URL, lock_timeout_s: float, begin: str, pragmas: tuple[str, ...], **pool: Any) -> Engine:
    # The driver itself must not begin transactions: it would do so late, and without the write lock.
    options = {"isolation_level": None, "check_same_thread": False}
    # What was to be written is in no error: it may be a token.
    engine = create_engine(url, connect_args=options, hide_parameters=True, **pool)

    @event.listens_for(engine, "connect")
    def set_up(connection: sqlite3.Connection, _record: object) -> None:
        for pragma in (f"busy_timeout = {int(lock_timeout_s * 1000)}", *pragmas):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin_transaction(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine

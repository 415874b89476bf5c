"""The store's contract: each test runs over every kind of database."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from memory_disk import directory_in_memory
from postgres_server import PostgresServer
from trainmaster.server.store.database import Database

_LARGE = 1 << 20


@pytest.fixture(scope="session")
def empty_sqlite_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "empty.db"
    Database.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture(scope="session")
def emptied_postgres(postgres: PostgresServer) -> Callable[[], str]:
    """Empties a database, which all tests share, to what it was when its tables had been made; its URL."""
    name = postgres.new_database()
    url = postgres.url(name)
    Database.open(url).close()
    with psycopg.connect(url, autocommit=True) as connection:
        tables = [
            table for (table,) in connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        ]
        sequences = [row[0] for row in connection.execute("SELECT sequencename FROM pg_sequences")]
        connection.execute("CREATE SCHEMA pristine")
        for table in tables:
            connection.execute(f"CREATE TABLE pristine.{table} AS TABLE public.{table}")
        filled = [table for table in tables if connection.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone()]

    def emptied() -> str:
        with psycopg.connect(url, options="-c session_replication_role=replica") as connection:  # no foreign keys
            others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            connection.execute(f"SELECT pg_terminate_backend(pid) {others}")
            sizes = ", ".join(f"pg_relation_size('public.{table}')" for table in tables)
            found = connection.execute(f"SELECT {sizes}").fetchone() or ()
            # Nothing reclaims what was deleted, and truncating takes longer.
            statements = [
                f"TRUNCATE {table} CASCADE" if size > _LARGE else f"DELETE FROM {table}"
                for table, size in zip(tables, found, strict=True)
                if size
            ]
            statements += [f"INSERT INTO {table} SELECT * FROM pristine.{table}" for table in filled]
            statements += [f"ALTER SEQUENCE {sequence} RESTART" for sequence in sequences]
            connection.execute("; ".join(statements))
        return url

    return emptied


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory, as PostgreSQL does not wait for the disk, either."""
    with directory_in_memory() as directory:
        yield directory


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of an empty database that other processes can open too."""
    if request.param == "sqlite":
        path = tmp_path / "trainmaster.db"
        shutil.copy(request.getfixturevalue("empty_sqlite_file"), path)
        return f"sqlite:///{path}"
    return str(request.getfixturevalue("emptied_postgres")())


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database.open(database_url)
    yield database
    database.close()

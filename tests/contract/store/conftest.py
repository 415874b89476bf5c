"""The store's contract: each test runs over every kind of database."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from postgres_server import PostgresServer
from trainmaster.server.store.database import Database


@pytest.fixture(scope="session")
def empty_sqlite_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "empty.db"
    Database.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture(scope="session")
def empty_postgres(postgres: PostgresServer) -> str:
    """The name of a database with all tables and nothing in them."""
    name = postgres.new_database()
    Database.open(postgres.url(name)).close()
    return name


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Of a fresh database that other processes can open too."""
    if request.param == "sqlite":
        path = tmp_path / "trainmaster.db"
        shutil.copy(request.getfixturevalue("empty_sqlite_file"), path)
        yield f"sqlite:///{path}"
    else:
        server: PostgresServer = request.getfixturevalue("postgres")
        name = server.new_database(template=request.getfixturevalue("empty_postgres"))
        yield server.url(name)
        server.drop_database(name)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database.open(database_url)
    yield database
    database.close()

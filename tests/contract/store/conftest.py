"""The store's contract: each test runs over every kind of database."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainmaster.store.database import Database


@pytest.fixture(scope="session")
def empty_sqlite_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "empty.db"
    Database.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture(params=["sqlite"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path, empty_sqlite_file: Path) -> str:
    """Of a fresh database that other processes can open too."""
    path = tmp_path / "trainmaster.db"
    shutil.copy(empty_sqlite_file, path)
    return f"sqlite:///{path}"


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database.open(database_url)
    yield database
    database.close()

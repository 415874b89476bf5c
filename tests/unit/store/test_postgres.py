"""What is particular to PostgreSQL: how it is reached and lost, and what its errors become."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait

import psycopg
import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from patience import PATIENCE_S
from postgres_server import PostgresServer
from real_server import wait_for
from trainmaster.server.core.errors import RefusedError, StoreUnavailableError
from trainmaster.server.store import accounts
from trainmaster.server.store import postgres as kind
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

EVERYTHING = Scope.everything()


@pytest.fixture
def name(postgres: PostgresServer) -> Iterator[str]:
    name = postgres.new_database()
    yield name
    postgres.drop_database(name)


@pytest.fixture
def url(postgres: PostgresServer, name: str) -> str:
    return postgres.url(name)


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    database = Database.open(url, lock_timeout_s=0.5)
    yield database
    database.close()


def remember(key: str) -> Callable[[Connection], None]:
    return lambda connection: accounts.ensure(connection, EVERYTHING, key, 1.0)


def put(database: Database, key: str) -> None:
    database.write_now(remember(key))


def has(database: Database, key: str) -> bool:
    with database.read() as connection:
        found = connection.execute(text("SELECT 1 FROM accounts WHERE account_id = :key"), {"key": key})
        return found.first() is not None


class Held:
    """A closure that waits in the middle of its transaction."""

    def __init__(self, database: Database) -> None:
        self._entered, self._release = threading.Event(), threading.Event()
        self.future: Future[None] = database.write(self._hold)
        assert self._entered.wait(PATIENCE_S)

    def _hold(self, connection: Connection) -> None:
        accounts.ensure(connection, EVERYTHING, "held", 1.0)
        self._entered.set()
        assert self._release.wait(PATIENCE_S)
        accounts.ensure(connection, EVERYTHING, "held on", 1.0)

    def release(self) -> None:
        self._release.set()
        wait([self.future], PATIENCE_S)


def test_url_with_the_driver_in_it_is_taken_too(url: str) -> None:
    Database.open(url.replace("postgresql:", "postgresql+psycopg:")).close()


def test_what_the_url_says_of_time_outs_is_kept(url: str) -> None:
    database = Database.open(f"{url}&application_name=mine&connect_timeout=9")
    asked = text("SELECT current_setting('application_name')")
    assert database.write_now(lambda connection: connection.execute(asked).scalar_one()) == "mine"
    database.close()


def _open_and_write(url: str, number: int) -> None:
    database = Database.open(url, lock_timeout_s=PATIENCE_S)
    put(database, f"process {number}")
    database.close()


def test_processes_that_open_a_fresh_database_at_once_migrate_it_once(url: str) -> None:
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_open_and_write, url, number) for number in range(3)]
        for future in futures:
            future.result(PATIENCE_S)
    database = Database.open(url)
    assert all(has(database, f"process {number}") for number in range(3))
    with database.read() as connection:
        assert connection.execute(text("SELECT count(*) FROM leader")).scalar_one() == 1
    database.close()


def test_database_that_another_server_holds_is_unavailable_until_it_is_free(database: Database, url: str) -> None:
    other = Database.open(url)
    held = Held(other)
    with pytest.raises(StoreUnavailableError, match="another server"):
        put(database, "early")
    assert not has(database, "early")
    held.release()
    put(database, "late")
    assert has(database, "late")
    other.close()


def test_server_that_falls_silent_in_a_transaction_loses_the_lock(
    database: Database, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "SILENT_AFTER_S", 0.2)
    silent = Database.open(url)
    held = Held(silent)
    patient = Database.open(url, lock_timeout_s=PATIENCE_S)
    put(patient, "another")
    held.release()
    with pytest.raises(StoreUnavailableError):
        held.future.result()
    assert not has(database, "held")
    put(silent, "after")
    assert has(database, "after")
    for opened in (silent, patient):
        opened.close()


def test_connections_that_are_dropped_while_nothing_happens_go_unnoticed(
    database: Database, postgres: PostgresServer, name: str
) -> None:
    put(database, "before")
    assert has(database, "before")
    assert postgres.drop_connections(name) >= 2
    put(database, "after")
    assert has(database, "after")


def test_connections_that_are_dropped_in_a_transaction_leave_nothing_of_it(
    database: Database, postgres: PostgresServer, name: str
) -> None:
    held = Held(database)
    group = [database.write(remember(f"with {number}")) for number in range(3)]
    postgres.drop_connections(name)
    held.release()
    with pytest.raises(StoreUnavailableError):
        held.future.result()
    for future in group:
        future.result(PATIENCE_S)
    assert [has(database, key) for key in ("held", "held on", "with 0", "with 2")] == [False, False, True, True]


def test_group_whose_connection_is_dropped_is_refused_as_a_whole(
    database: Database, postgres: PostgresServer, name: str
) -> None:
    held = Held(database)

    def drop(connection: Connection) -> None:
        postgres.drop_connections(name)
        raise LookupError("a refusal that has nothing to do with it")

    futures = [database.write(closure) for closure in (remember("a"), drop, remember("b"))]
    held.release()
    wait(futures, PATIENCE_S)
    assert {type(future.exception()) for future in futures} == {StoreUnavailableError}
    assert not has(database, "a")
    put(database, "after")
    assert has(database, "after")


def test_server_that_is_restarted_is_found_again(database: Database, postgres: PostgresServer) -> None:
    put(database, "before")
    database.data_version()
    postgres.stop("immediate")
    try:
        with pytest.raises(StoreUnavailableError):
            put(database, "while it is away")
        with pytest.raises(StoreUnavailableError):
            has(database, "before")
        with pytest.raises(StoreUnavailableError):
            database.data_version()
        with pytest.raises(StoreUnavailableError, match="reached"):
            Database.open(postgres.url("postgres"))
    finally:
        postgres.start()
    put(database, "after")
    version = database.data_version()
    put(database, "once more")
    assert database.data_version() != version
    assert [has(database, key) for key in ("before", "while it is away", "after")] == [True, False, True]


def test_error_that_a_closure_ignores_is_not_taken_for_written(database: Database) -> None:
    def ignore(connection: Connection) -> None:
        accounts.ensure(connection, EVERYTHING, "half", 1.0)
        with pytest.raises(DBAPIError):
            connection.execute(text("SELECT 1 / 0"))

    with pytest.raises(RuntimeError, match="ignored"):
        database.write_now(ignore)
    put(database, "after")
    assert [has(database, key) for key in ("half", "after")] == [False, True]


def test_text_that_cannot_be_stored_is_refused(database: Database) -> None:
    for key in ("a\0b", secrets.token_hex(8000)):
        with pytest.raises(RefusedError, match="no such value"):
            put(database, key)
    with pytest.raises(RefusedError, match="no such value"):
        has(database, "a\0b")


def test_database_that_cannot_be_written_is_unavailable(
    database: Database, postgres: PostgresServer, name: str
) -> None:
    postgres.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    postgres.drop_connections(name)
    with pytest.raises(StoreUnavailableError, match="cannot be written"):
        put(database, "a")
    assert not has(database, "a")
    postgres.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")


def test_database_that_takes_no_more_connections_is_unavailable(
    database: Database, postgres: PostgresServer, url: str
) -> None:
    put(database, "a")
    with contextlib.ExitStack() as taken:
        with contextlib.suppress(psycopg.OperationalError):
            while True:
                taken.enter_context(psycopg.connect(url))
        with pytest.raises(StoreUnavailableError, match="too many clients"):
            Database.open(url)
    wait_for(lambda: has(database, "a"), "the database to answer again")


def test_reading_and_writing_need_a_bounded_number_of_connections(
    database: Database, postgres: PostgresServer, name: str
) -> None:
    put(database, "a")
    database.data_version()
    entered, release = threading.Semaphore(0), threading.Event()
    refused: list[str] = []

    def read() -> None:
        try:
            with database.read() as connection:
                connection.execute(text("SELECT 1"))
                entered.release()
                assert release.wait(PATIENCE_S)
        except StoreUnavailableError as error:
            refused.append(error.message)
            entered.release()

    readers = [threading.Thread(target=read) for _ in range(kind.READERS + 2)]
    for reader in readers:
        reader.start()
    for _ in readers:
        assert entered.acquire(timeout=PATIENCE_S)
    ((count,),) = postgres.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = %s", name)
    release.set()
    for reader in readers:
        reader.join(PATIENCE_S)
    assert count == kind.READERS + 2
    assert len(refused) == 2
    assert "at once" in refused[0]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("postgresql://user:secret@host", "names no database"),
        ("postgresql+asyncpg://user:secret@host/db", "psycopg"),
        ("mysql://user:secret@host/db", "no such kind"),
        ("postgres://user:secret@host/db", "no such kind"),
    ],
)
def test_url_that_cannot_be_used_is_refused(wrong: str, why: str) -> None:
    with pytest.raises(RefusedError, match=why) as refusal:
        Database.open(wrong)
    assert "secret" not in refusal.value.message


def test_unknown_host_is_unavailable_and_the_password_is_not_shown() -> None:
    with pytest.raises(StoreUnavailableError, match="reached") as refusal:
        Database.open("postgresql://user:secret@127.0.0.1:1/db")
    assert "secret" not in refusal.value.message


def test_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RefusedError, match=r"pip install 'trainmaster\[postgres\]'"):
        Database.open("postgresql://user@host/db")


def test_database_of_another_encoding_is_refused(postgres: PostgresServer) -> None:
    postgres.execute("CREATE DATABASE plain ENCODING 'SQL_ASCII' TEMPLATE template0 LOCALE 'C'")
    with pytest.raises(RefusedError, match="UTF8"):
        Database.open(postgres.url("plain"))
    postgres.drop_database("plain")


def test_user_that_may_not_make_tables_is_told(postgres: PostgresServer, url: str) -> None:
    postgres.execute("CREATE ROLE guest LOGIN")
    with pytest.raises(StoreUnavailableError, match="may create tables"):
        Database.open(url.replace("trainmaster@", "guest@"))

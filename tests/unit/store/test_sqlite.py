from __future__ import annotations

import multiprocessing
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, text

from patience import PATIENCE_S
from trainmaster.server.core.errors import RefusedError, StoreUnavailableError
from trainmaster.server.store import accounts
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope
from trainmaster.server.store.sqlite import file_system

EVERYTHING = Scope.everything()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trainmaster.db"


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    database = Database.open(f"sqlite:///{path}", lock_timeout_s=0.2)
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


def pragma(connection: Connection, name: str) -> object:
    return connection.execute(text(f"PRAGMA {name}")).scalar()


def test_writer_waits_for_the_disk_and_checks_foreign_keys(database: Database) -> None:
    assert database.write_now(lambda connection: pragma(connection, "synchronous")) == 2
    assert database.write_now(lambda connection: pragma(connection, "journal_mode")) == "wal"
    assert database.write_now(lambda connection: pragma(connection, "foreign_keys")) == 1


def test_database_is_its_owners_alone(database: Database, path: Path) -> None:
    put(database, "a")
    files = [path, path.with_name("trainmaster.db-wal"), path.with_name("trainmaster.db-shm")]
    assert [file.stat().st_mode & 0o777 for file in files] == [0o600] * 3


def test_opening_a_database_again_keeps_what_is_there(path: Path) -> None:
    known = []
    for _ in range(2):
        database = Database.open(f"sqlite:///{path}")
        known.append(has(database, "a"))
        put(database, "a")
        database.close()
    assert known == [False, True]


def test_opening_it_twice_in_one_process_keeps_the_locks_of_the_first(database: Database, path: Path) -> None:
    put(database, "a")
    log = path.with_name("trainmaster.db-wal")
    before = log.stat().st_ino
    Database.open(f"sqlite:///{path}").close()
    # Whoever believes to be the last to leave clears the log away.
    leave = f"import sqlite3; c = sqlite3.connect({str(path)!r}); c.execute('SELECT * FROM jobs').fetchall(); c.close()"
    subprocess.run([sys.executable, "-c", leave], timeout=PATIENCE_S, check=True)
    assert log.stat().st_ino == before


def _open_and_write(path: str, number: int) -> None:
    database = Database.open(f"sqlite:///{path}", lock_timeout_s=PATIENCE_S)
    put(database, f"process {number}")
    database.close()


def test_processes_that_open_a_fresh_database_at_once_all_succeed(path: Path) -> None:
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_open_and_write, str(path), number) for number in range(3)]
        for future in futures:
            future.result(PATIENCE_S)
    database = Database.open(f"sqlite:///{path}")
    assert all(has(database, f"process {number}") for number in range(3))
    database.close()


def test_database_that_another_process_locks_is_unavailable_until_it_is_free(database: Database, path: Path) -> None:
    script = (
        f"import sqlite3, signal; connection = sqlite3.connect({str(path)!r}, isolation_level=None);"
        "connection.execute('BEGIN IMMEDIATE'); print('locked', flush=True); signal.pause()"
    )
    locker = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert locker.stdout is not None
        assert locker.stdout.readline() == b"locked\n"
        futures = [database.write(remember("early")) for _ in range(3)]
        for future in futures:
            with pytest.raises(StoreUnavailableError, match="another process"):
                future.result(PATIENCE_S)
        assert not has(database, "early")
    finally:
        locker.send_signal(signal.SIGKILL)
        locker.communicate()
    put(database, "late")
    assert has(database, "late")
    assert database.write_now(lambda connection: pragma(connection, "synchronous")) == 2


def _fill_up(connection: Connection) -> None:
    pages = pragma(connection, "page_count")
    pragma(connection, f"max_page_count = {pages}")
    accounts.ensure(connection, EVERYTHING, "large", 1.0)
    accounts.ensure(connection, EVERYTHING, "x" * 1_000_000, 1.0)


def test_full_disk_is_reported_and_survived(database: Database) -> None:
    with pytest.raises(StoreUnavailableError, match="space"):
        database.write_now(_fill_up)
    assert not has(database, "large")
    put(database, "after")
    assert has(database, "after")


def test_full_disk_in_a_group_never_reports_what_was_not_written(database: Database) -> None:
    # The writer is kept busy, so that what is queued meanwhile becomes one group.
    entered, release = threading.Event(), threading.Event()

    def hold(connection: Connection) -> None:
        entered.set()
        assert release.wait(PATIENCE_S)

    holding = database.write(hold)
    assert entered.wait(PATIENCE_S)
    futures = {key: database.write(remember(key)) for key in "ab"}
    full = database.write(_fill_up)
    futures |= {key: database.write(remember(key)) for key in "cd"}
    release.set()
    holding.result(PATIENCE_S)
    with pytest.raises(StoreUnavailableError, match="space"):
        full.result(PATIENCE_S)
    for key, future in futures.items():
        error = future.exception(PATIENCE_S)
        assert error is None or isinstance(error, StoreUnavailableError)
        assert has(database, key) is (error is None)


def test_file_that_is_no_database_is_unavailable(path: Path) -> None:
    path.write_bytes(b"not a database, but long enough to look at" * 100)
    with pytest.raises(StoreUnavailableError, match="not a database"):
        Database.open(f"sqlite:///{path}")


def test_directory_that_cannot_be_written_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "t.db").mkdir()
    with pytest.raises(StoreUnavailableError):
        Database.open(f"sqlite:///{tmp_path / 't.db'}")


@pytest.mark.parametrize(
    "url",
    ["sqlite://", "sqlite:///:memory:", "/srv/t.db", "sqlite:////nowhere/t.db"],
)
def test_database_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(RefusedError):
        Database.open(url)


MOUNTS = """\
/dev/vda / ext4 rw,relatime 0 0
proc /proc proc rw 0 0
server:/export /home/team nfs4 rw 0 0
/dev/vdb /home/team/local xfs rw 0 0
//server/share /mnt/with\\040space cifs rw 0 0
tmpfs /twice tmpfs rw 0 0
me@host: /twice fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/t.db", "ext4"),
        ("/home/team/t.db", "nfs4"),
        ("/home/teammate/t.db", "ext4"),
        ("/home/team/local/t.db", "xfs"),
        ("/mnt/with space/t.db", "cifs"),
        ("/twice/t.db", "fuse.sshfs"),
    ],
)
def test_file_system_is_that_of_the_deepest_mount(path: str, kind: str) -> None:
    assert file_system(Path(path), MOUNTS) == kind


def test_database_on_a_network_file_system_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainmaster.server.store.sqlite.file_system", lambda path, mounts: "nfs4")
    with pytest.raises(RefusedError, match="network file system"):
        Database.open(f"sqlite:///{path}")
    assert not path.exists()


def test_alembic_is_not_imported_for_a_database_that_is_up_to_date(database: Database, path: Path) -> None:
    script = (
        "import sys; from trainmaster.server.store.database import Database;"
        f"Database.open('sqlite:///{path}').close(); sys.exit('alembic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=PATIENCE_S, check=False).returncode == 0


def test_database_can_be_read_while_another_process_writes(database: Database, path: Path) -> None:
    put(database, "a")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        assert has(database, "a")

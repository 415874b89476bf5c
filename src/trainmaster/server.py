"""The server process: puts the parts together, runs them, and takes them down again."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from sqlalchemy import Connection

import trainmaster
from trainmaster import failpoints
from trainmaster.api.app import create_app
from trainmaster.api.context import ApiContext
from trainmaster.api.front import Front
from trainmaster.coordinator.admission import Admission
from trainmaster.coordinator.commands import Commands
from trainmaster.coordinator.running import CoordinatorRole
from trainmaster.core.errors import TrainmasterError
from trainmaster.core.keys import DEFAULT_ACCOUNT, KeyScope, key_digest, key_id_of, new_key
from trainmaster.protocol.hints import send_hint
from trainmaster.protocol.processes import boot_id, identity_of
from trainmaster.protocol.rundir import write_document
from trainmaster.settings import Role, Settings
from trainmaster.storage import ARTIFACTS, BLOBS, RUNS, Roots
from trainmaster.store import accounts, keys
from trainmaster.store.database import Database
from trainmaster.store.keys import ApiKey
from trainmaster.store.scope import Scope

_log = logging.getLogger(__name__)

START_PATIENCE_S = 60.0
"""How long a start waits for a database that another process holds: a server that was frozen in the middle of a
write has it until it thaws or is killed."""


class DataDirectoryInUseError(TrainmasterError):
    """Another server runs on this data directory."""

    code = "DATA_DIRECTORY_IN_USE"


def serve(settings: Settings) -> None:
    """Run a server until SIGTERM or SIGINT; running jobs are left running.

    Raises:
        DataDirectoryInUseError: another server has the data directory.
    """
    failpoints.arm_from_environment()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for chatty in ("alembic", "httpx"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    _allow_open_files()
    settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_locked(settings.data_dir))
        listener = stack.enter_context(_listening(settings.host, settings.port, settings.data_dir / "port"))
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        app = stack.enter_context(_running(settings, url))
        server = _Server(
            uvicorn.Config(
                app,
                loop="uvloop",
                http="httptools",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=2,
                server_header=False,
                backlog=4096,
            ),
            on_ready=lambda: _announce(settings, url),
            on_stop=app.close,
        )
        _shorten_collections()
        server.run(sockets=[listener])
        with contextlib.suppress(FileNotFoundError):
            (settings.data_dir / "server.json").unlink()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, *, on_ready: Callable[[], None], on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._on_stop = on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A stop that was asked for is a good end: the signal is not raised again, which would cut the rest short."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def _running(settings: Settings, url: str) -> Iterator[Front]:
    """The application, with everything behind it running."""
    with contextlib.ExitStack() as stack:
        with contextlib.closing(Database.open(settings.database, lock_timeout_s=START_PATIENCE_S)) as patient:
            ensure_key(patient, settings.data_dir / "api-key")
        database = Database.open(settings.database)
        stack.callback(database.close)
        roots = Roots({RUNS: settings.runs, ARTIFACTS: settings.artifacts, BLOBS: settings.blobs})
        hint_socket = settings.data_dir / "hints.sock"
        hint: Callable[[str], None] = functools.partial(send_hint, str(hint_socket))
        healthy: Callable[[], str | None] = _always_healthy
        admission = Admission(data_roots=settings.data_roots)
        if Role.COORDINATOR in settings.roles:
            role = CoordinatorRole(
                settings,
                url=url,
                holder=_name_of_lock(settings.data_dir),
                database=database,
                roots=roots,
                admission=admission,
                hint_socket=hint_socket,
            )
            role.start()
            stack.callback(role.stop)
            hint, healthy = role.hint, role.problem
        commands = Commands(
            database, backends=settings.backends, default_backend=settings.backends[0], admission=admission, hint=hint
        )
        yield create_app(
            ApiContext(
                database=database,
                commands=commands,
                roots=roots,
                roles=settings.roles,
                hint=hint,
                clock=time.time,
                version=trainmaster.__version__,
                max_blob_bytes=settings.max_blob_bytes,
                healthy=healthy,
            )
        )


def _always_healthy() -> None:
    """A server without a coordinator of its own has nothing that could be stuck."""


def ensure_key(database: Database, path: Path) -> None:
    """Make the first API key, unless there is one. It lies in a file that only the server's user can read."""
    if path.exists():
        key = path.read_text().strip()
    else:
        key = new_key()
        # Under its name only when it is whole: half a key would be found, and taken for one, by the next start.
        draft = path.with_name(f".{path.name}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w") as file:
            file.write(key + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    scope = Scope(account_id=DEFAULT_ACCOUNT)

    def work(connection: Connection) -> None:
        accounts.ensure(connection, Scope.everything(), DEFAULT_ACCOUNT, time.time())
        if keys.find_by_hash(connection, Scope.everything(), key_digest(key)) is None:
            keys.create(
                connection,
                scope,
                ApiKey(
                    key_id=key_id_of(key),
                    account_id=DEFAULT_ACCOUNT,
                    name="first",
                    scopes=tuple(KeyScope),
                    hash=key_digest(key),
                    created_at=time.time(),
                ),
            )

    database.write_now(work)


def _allow_open_files() -> None:
    """Every follower of a log holds one; the usual limit of 1,024 is for programs that have few."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _shorten_collections() -> None:
    """Leave what exists by now out of garbage collections, and have fewer of them: each one stops every thread."""
    gc.freeze()
    gc.set_threshold(10_000)


@contextlib.contextmanager
def _locked(data_dir: Path) -> Iterator[None]:
    """The data directory belongs to one server at a time; the kernel frees it when the server dies."""
    with open(data_dir / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataDirectoryInUseError(
                f"another server runs on {data_dir}; stop it with `trainmaster down`, "
                "or give this one a --data-dir of its own"
            ) from None
        yield


def _name_of_lock(data_dir: Path) -> str:
    """A name that only the server which has locked the data directory can have.

    So a server leads at once where its predecessor was killed: whoever held the lease by this name is dead.
    """
    status = os.stat(data_dir / "lock")
    return f"{socket.gethostname()}:{boot_id()}:{status.st_dev}:{status.st_ino}"


@contextlib.contextmanager
def _listening(host: str, port: int, remembered: Path) -> Iterator[socket.socket]:
    """A socket on the port; where any will do, on the one before: workers and clients may still know it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if port == 0 and remembered.exists():
            with contextlib.suppress(OSError, ValueError, OverflowError):
                listener.bind((host, int(remembered.read_text())))
        if listener.getsockname()[1] == 0:
            listener.bind((host, port))
        remembered.write_text(str(listener.getsockname()[1]))
        yield listener


def _announce(settings: Settings, url: str) -> None:
    """Say that the server answers: to clients by a file, to people and scripts by a line."""
    identity = identity_of(os.getpid())
    write_document(
        settings.data_dir / "server.json",
        {"url": url, "version": trainmaster.__version__, **(identity.to_json() if identity else {})},
    )
    print(f"ready {url}", flush=True)  # noqa: T201 - scripts wait for this line

"""The local server: the one that this user's commands share. Finds it, starts it, stops it.

Its state is one directory: $TRAINMASTER_HOME, else ~/.trainmaster. While it runs, `server.json` in there says which
process it is and where it answers, and `api-key` holds the key to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from trainmaster import __version__
from trainmaster.client.errors import LocalServerError
from trainmaster.protocol.processes import AT_REST, KEPT, ProcessIdentity, is_alive, send_signal

START_TIMEOUT_S = 60.0
"""Generous: a first start on a slow disk makes the database."""
STOP_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 5.0
POLL_S = 0.05
LOG_LINES_SHOWN = 12
"""Of the server's log, when it did not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalServer:
    url: str
    api_key: str
    version: str
    process: ProcessIdentity
    data_dir: Path
    data_roots: tuple[Path, ...] = ()
    """Below these it lets jobs read files where they are."""


def data_dir() -> Path:
    return Path(os.environ.get("TRAINMASTER_HOME") or Path.home() / ".trainmaster").absolute()


def log_file() -> Path:
    """What a local server that was started by a command has to say."""
    return data_dir() / "server.log"


def find() -> LocalServer | None:
    """The local server, if it runs and answers. Raises LocalServerError if it is of another major version."""
    server = running()
    if server is None or not _answers(server.url):
        return None
    if server.version.partition(".")[0] != __version__.partition(".")[0]:
        raise LocalServerError(
            f"the local server is version {server.version} and this is {__version__}; "
            "run `trainmaster down` and then `trainmaster up` (jobs keep running)"
        )
    return server


def running() -> LocalServer | None:
    """The local server if its process lives, whatever its version and whether or not it answers."""
    directory = data_dir()
    try:
        document = json.loads((directory / "server.json").read_text())
        process = ProcessIdentity.from_json(document)
        if not is_alive(process):
            return None
        return LocalServer(
            url=str(document["url"]).rstrip("/"),
            api_key=(directory / "api-key").read_text().strip(),
            version=str(document["version"]),
            process=process,
            data_dir=directory,
            data_roots=tuple(Path(root) for root in document.get("data_roots", ())),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # never started, or it is just being written


def has_nothing_to_do() -> bool:
    """Whether no server runs here and none is needed: it never ran, or stopped when every job had ended."""
    return running() is None and (never_ran() or (data_dir() / AT_REST).exists())


def never_ran() -> bool:
    """Whether no server has ever run here, so that there are no jobs. Not so where its database may lie elsewhere."""
    elsewhere = any(os.environ.get(f"TRAINMASTER_{name}") for name in ("CONFIG", "DATABASE_URL"))
    return not elsewhere and not any((data_dir() / name).exists() for name in ("config.toml", "trainmaster.db"))


def start(
    config: Path | None = None,
    *,
    data_roots: Sequence[Path] = (),
    settings: Mapping[str, str] = MappingProxyType({}),
    asked: bool = False,
) -> LocalServer:
    """The local server; started, detached from this process and with these settings, when none runs.

    `settings` are further ones, by their names, and win over those of the file. Where somebody ran `trainmaster serve`
    last, none is started unless a person `asked` for it: theirs has settings of its own, and is only down for a moment.
    Two callers at once end up with one server: the second waits, and finds what the first has started.

    Raises LocalServerError, with the end of its log, if it did not start.
    """
    if (server := find()) is not None:
        return server
    with _start_lock():
        if (data_dir() / KEPT).exists() and not asked:
            raise LocalServerError(
                f"the server of {data_dir()} does not run; it was last started by `trainmaster serve`, whose options "
                "this command does not know: start it like that again, or run `trainmaster up`"
            )
        return find() or _started(config, data_roots, settings)


def started_here(server: LocalServer) -> bool:
    return any(child.pid == server.process.pid for child in _children)


def stop() -> bool:
    """Stop the local server; jobs keep running. Returns whether one ran; raises LocalServerError if it goes on."""
    server = running()
    if server is None:
        return False
    process = server.process
    try:
        send_signal(process, signal.SIGTERM)
    except ProcessLookupError:
        return True
    except PermissionError:
        raise LocalServerError(f"the local server (process {process.pid}) belongs to another user") from None
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while is_alive(process):
        if time.monotonic() > deadline:
            raise LocalServerError(f"the local server (process {process.pid}) does not stop; its log is {log_file()}")
        time.sleep(POLL_S)
    for child in _children:
        child.poll()
    return True


@contextlib.contextmanager
def _start_lock() -> Iterator[None]:
    directory = data_dir()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_uid != os.geteuid():
            # What this user's server makes there, the owner's could not write.
            raise LocalServerError(
                f"no server runs in {directory}, which belongs to another user; start it as that user, "
                "or set TRAINMASTER_HOME to a directory of your own"
            )
        lock = os.open(directory / "starting.lock", os.O_WRONLY | os.O_CREAT, 0o600)
    except OSError as error:
        message = f"cannot write to {directory} ({error.strerror}); set TRAINMASTER_HOME to a directory of your own"
        raise LocalServerError(message) from error
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _locked(lock):
            if time.monotonic() > deadline:
                raise LocalServerError(f"another command has been starting the server for {START_TIMEOUT_S:g} s")
            time.sleep(POLL_S)
        yield
    finally:
        os.close(lock)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _started(config: Path | None, data_roots: Sequence[Path], settings: Mapping[str, str]) -> LocalServer:
    # The server runs in a directory of its own, where a relative path would lead elsewhere.
    arguments = ["--config", str(config.absolute())] if config else []
    for root in data_roots:
        arguments += ["--data-root", str(root.absolute())]
    process = _spawn(arguments, settings)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        if (server := find()) is not None:
            return server
        # One that was started by hand meanwhile may be about to answer.
        if ended and running() is None:
            raise LocalServerError(_with_log_tail(f"the local server ended with exit code {process.returncode}"))
        time.sleep(POLL_S)
    raise LocalServerError(_with_log_tail(f"the local server does not answer after {START_TIMEOUT_S:g} s"))


_children: list[subprocess.Popen[bytes]] = []
"""Servers that this process started. They outlive it; the list only keeps Python from complaining about that."""


def _spawn(arguments: Sequence[str], settings: Mapping[str, str]) -> subprocess.Popen[bytes]:
    directory = data_dir()
    log = os.open(log_file(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainmaster", "serve", "--data-dir", str(directory), "--free-port", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=directory,
            env={**os.environ, **{f"TRAINMASTER_{name.upper()}": value for name, value in settings.items()}},
            start_new_session=True,
        )
    finally:
        os.close(log)
    _children.append(process)
    return process


def _with_log_tail(message: str) -> str:
    try:
        lines = log_file().read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
    except OSError:
        lines = []
    return "\n".join([f"{message}; its log is {log_file()}", *(f"  {line}" for line in lines)])


def _answers(url: str) -> bool:
    import http.client  # takes longer to import than some commands take

    address = urlsplit(url)
    host = address.hostname or ""
    connection = http.client.HTTPConnection(host, address.port, timeout=ANSWER_TIMEOUT_S)
    if address.scheme == "https":
        import ssl

        # Whether to trust it is up to the client, which sends a key; this only asks whether anybody is there.
        anybody = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection(host, address.port, timeout=ANSWER_TIMEOUT_S, context=anybody)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()

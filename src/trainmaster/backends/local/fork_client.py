"""The client of the fork server, which starts it if it is not there."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trainmaster
from trainmaster.protocol.documents import read_document
from trainmaster.protocol.environment import CA, RESERVED_PREFIX
from trainmaster.protocol.processes import ProcessIdentity, is_alive, send_signal
from trainmaster.protocol.sockets import reachable

_log = logging.getLogger(__name__)
LOCK = "lock"
"""In its directory: held by the fork server, with the identity of its process."""

_START_TIMEOUT_S = 20.0
_ASK_TIMEOUT_S = 30.0
_HELLO_TIMEOUT_S = 10.0
"""A fork server that does not answer by then hangs, or was stopped, and is replaced."""
_END_TIMEOUT_S = 5.0
_OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
"""The limits that this process was started with: jobs get the same, whatever the server sets for itself."""
_UMASK = next(
    (int(line.split()[1], 8) for line in Path("/proc/self/status").read_text().splitlines() if line[:6] == "Umask:"),
    -1,
)
"""Likewise; -1 if the kernel does not tell."""


class ForkServerError(Exception):
    """The fork server did not do what it was asked to."""


class ForkServer:
    """The warm parent of local workers. It is started once and survives the server."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._socket_path = directory / "socket"
        self._starting = threading.Lock()

    def ensure(self) -> None:
        """Make sure that a fork server of our own version and Python runs; workers of a replaced one live on."""
        with self._starting:
            try:
                if self._is_ours():
                    return
                self._exchange({"op": "retire"}, _HELLO_TIMEOUT_S)
            except TimeoutError:
                self._kill_hung()
            except (OSError, ForkServerError):
                pass
            self._start()

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer; starts the fork server if nobody listens."""
        try:
            return self._exchange(order)
        except OSError:
            self.ensure()
        try:
            return self._exchange(order)
        except OSError as error:
            raise ForkServerError(f"no answer from {self._socket_path}: {error}") from error

    def _is_ours(self) -> bool:
        told = self._exchange({"op": "hello"}, _HELLO_TIMEOUT_S)
        # One interpreter may have several names; the prefix tells environments apart that share it.
        executable = os.path.realpath(str(told.get("executable")))
        ours = (trainmaster.__version__, os.path.realpath(sys.executable), sys.prefix)
        return (told.get("version"), executable, told.get("prefix")) == ours

    def _kill_hung(self) -> None:
        """Kill a fork server that does not answer; its workers live on."""
        try:
            holder = ProcessIdentity.from_json(read_document(self._directory / LOCK) or {})
        except ValueError:
            return
        if not is_alive(holder):
            return
        _log.warning("the fork server, process %d, does not answer: it is killed and replaced", holder.pid)
        with contextlib.suppress(ProcessLookupError):
            send_signal(holder, signal.SIGKILL)
        deadline = time.monotonic() + _END_TIMEOUT_S
        while is_alive(holder) and time.monotonic() < deadline:
            time.sleep(0.005)

    def _exchange(self, order: Mapping[str, Any], timeout_s: float = _ASK_TIMEOUT_S) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            with reachable(self._socket_path) as short:
                connection.connect(short)
            connection.sendall(json.dumps(order).encode() + b"\n")
            with connection.makefile("rb") as answers:
                answer = answers.readline()
        if not answer:
            raise ConnectionError("the fork server closed the connection without an answer")
        document: dict[str, Any] = json.loads(answer)
        if "error" in document:
            raise ForkServerError(str(document["error"]))
        return document

    def _start(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Jobs inherit this: not our own settings, which may hold the encryption key or the database's password.
        ours = {name for name in os.environ if name.startswith(RESERVED_PREFIX) and name != CA}
        inherited = {name: value for name, value in os.environ.items() if name not in ours}
        with open(self._directory / "log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "trainmaster.worker", "fork-server", "--directory", os.fspath(self._directory)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=inherited,
                start_new_session=True,
                umask=_UMASK,
            )
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, _OPEN_FILES)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, ForkServerError):
                if self._is_ours():
                    return
            time.sleep(0.005)
        raise ForkServerError(f"it did not start within {_START_TIMEOUT_S:.0f} s; see {self._directory / 'log'}")

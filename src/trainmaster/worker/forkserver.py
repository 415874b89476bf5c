"""The fork server: a warm process that forks workers on request, and outlives the server that asks.

It has one thread and has imported everything that a worker needs, so that a worker starts within a millisecond.
A request is one line of JSON on a connection to `<directory>/socket`, and so is the answer; then the connection is
closed.

    {"op": "hello"}                                                     -> {"version", "executable", "prefix", "pid"}
    {"op": "start", "run_dir", "node"}                                  -> {"pid", "start_time", "boot_id"}
    {"op": "start-courier", "server_url", "token", "attempt_id", "node", "directory", "delivers_only"}   -> the same
    {"op": "sweep", "attempt_id", "node"?}                              -> {"killed"}, once none is left
    {"op": "retire"}                                                    -> {}, and it is gone

Errors are answered with {"error": "..."}. Workers have sessions of their own: they survive the fork server.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import inspect
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import trainmaster
from trainmaster.protocol.documents import field_readers
from trainmaster.protocol.processes import boot_id, identity_of
from trainmaster.protocol.request import AttemptRequest, ContainerOverrides
from trainmaster.protocol.secrets import NO_SECRETS, Secrets
from trainmaster.worker.cgroups import find_groups
from trainmaster.worker.processes import start_time_of, sweep
from trainmaster.worker.supervise import run_worker

SOCKET = "socket"
LOCK = "lock"
LOG = "log"

_CHUNK_BYTES = 64 << 10
_MAX_REQUEST_BYTES = 64 << 20
"""A request to start carries the job's secrets: as much as a submission may hold, with JSON escapes."""
_MAX_LOG_BYTES = 1 << 20
_IDLE_CHECK_S = 30.0
_IDLE_EXIT_S = 600.0
"""A server asks every minute; a fork server that nobody asked for this long has no server any more."""


def serve(directory: Path) -> int:
    """Run the fork server of a directory until it is retired or terminated; returns its exit code, 1 if one runs."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)  # what comes in by the socket is for nobody else
    # The path of a socket may have about a hundred characters; one in the current directory is short.
    os.chdir(directory)
    lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.stderr.write(f"another fork server runs in {directory}\n")
        return 1
    # Who holds the lock: a fork server that hangs is found and killed by that.
    holder = identity_of(os.getpid())
    assert holder is not None
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps(holder.to_json()).encode(), 0)
    _detach()
    _ForkServer(lock).run()
    return 0


def _detach() -> None:
    with contextlib.suppress(PermissionError):
        os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(FileNotFoundError):
        if os.stat(LOG).st_size > _MAX_LOG_BYTES:
            os.unlink(LOG)
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)


class _RetiredError(Exception):
    pass


class _ForkServer:
    def __init__(self, lock: int) -> None:
        self._lock = lock
        self._selector = selectors.DefaultSelector()
        self._received: dict[socket.socket, bytearray] = {}
        self._children = 0
        self._asked_at = time.monotonic()
        self._wakeup = socket.socketpair()
        self._wake_on_signals()
        self._listener = _listen()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._operations: dict[str, Callable[..., dict[str, Any] | None]] = {
            "hello": self._hello,
            "start": self._start,
            "start-courier": self._start_courier,
            "sweep": self._sweep,
            "retire": self._retire,
        }

    def run(self) -> None:
        # Looked up once, and not in every worker.
        find_groups()
        boot_id()
        field_readers(AttemptRequest)
        field_readers(ContainerOverrides)
        gc.collect()
        # Keep permanent objects out of garbage collections, which would copy their pages in every child.
        gc.freeze()
        try:
            while not self._left_alone():
                for key, _ in self._selector.select(_IDLE_CHECK_S):
                    key.data()
        except _RetiredError:
            return

    def _left_alone(self) -> bool:
        """Whether nobody needs it: no worker of its own runs, and nobody asks, or ever can."""
        if self._children:
            return False
        return os.stat(".").st_nlink == 0 or time.monotonic() - self._asked_at > _IDLE_EXIT_S

    def _accept(self) -> None:
        self._asked_at = time.monotonic()
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._received[connection] = bytearray()
            self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(connection))

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        received = self._received[connection]
        received += data
        if b"\n" in data:
            if (answer := self._answer(connection, bytes(received.partition(b"\n")[0]))) is not None:
                _send(connection, answer)
        elif data and len(received) < _MAX_REQUEST_BYTES:
            return
        del self._received[connection]
        self._selector.unregister(connection)
        connection.close()

    def _answer(self, connection: socket.socket, line: bytes) -> dict[str, Any] | None:
        """The answer; None if a child will send it."""
        try:
            request = json.loads(line)
            if (operation := self._operations.get(request.pop("op"))) is None:
                return {"error": "no such operation"}
            return operation(connection, **request)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return {"error": f"malformed request: {error}"}
        except OSError as error:
            return {"error": str(error)}

    def _hello(self, _: socket.socket) -> dict[str, Any]:
        return {
            "version": trainmaster.__version__,
            "executable": sys.executable,
            "prefix": sys.prefix,
            "pid": os.getpid(),
        }

    def _start(
        self,
        _: socket.socket,
        run_dir: str,
        node: int,
        secrets: dict[str, dict[str, str]] | None = None,
        within: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        given = Secrets.from_json(secrets) if secrets else NO_SECRETS
        place = ContainerOverrides.from_json(within or {})
        return self._fork(lambda: run_worker(Path(run_dir), node, given, place))

    def _start_courier(self, _: socket.socket, **request: Any) -> dict[str, Any]:
        # Imported here, in the parent: only couriers need the HTTP client, and the second one finds it imported.
        from trainmaster.worker.courier import run_courier

        inspect.signature(run_courier).bind(**request)  # a malformed request is answered, and starts nothing
        return self._fork(lambda: run_courier(**request))

    def _sweep(self, connection: socket.socket, attempt_id: str, node: int | None = None) -> None:
        """In a child, because it waits for processes to end."""

        def sweep_and_answer() -> None:
            try:
                answer: dict[str, Any] = {"killed": sweep(attempt_id, node)}
            except TimeoutError as error:
                answer = {"error": str(error)}
            connection.setblocking(True)
            _send(connection, answer)

        self._fork(sweep_and_answer, keep=connection)

    def _retire(self, connection: socket.socket) -> NoReturn:
        # Answered when a successor can start: without socket and lock.
        os.unlink(SOCKET)
        os.close(self._lock)
        _send(connection, {})
        raise _RetiredError

    def _fork(self, work: Callable[[], int | None], keep: socket.socket | None = None) -> dict[str, Any]:
        """Run `work` in a child with its own session; returns the child's identity."""
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                self._leave(keep)
                status = work() or 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        self._children += 1
        return {"pid": pid, "start_time": start_time_of(pid), "boot_id": boot_id()}

    def _leave(self, keep: socket.socket | None) -> None:
        """In a child: close everything of the fork server's."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        for connection in self._received:
            if connection is not keep:
                connection.close()
        self._listener.close()
        for end in self._wakeup:
            end.close()
        self._selector.close()
        os.close(self._lock)

    def _wake_on_signals(self) -> None:
        reader, writer = self._wakeup
        reader.setblocking(False)
        writer.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._selector.register(reader, selectors.EVENT_READ, lambda: self._on_signals(reader.recv(4096)))

    def _on_signals(self, numbers: bytes) -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                self._children -= 1
        if signal.SIGTERM in numbers:
            os.unlink(SOCKET)
            raise _RetiredError


def _listen() -> socket.socket:
    """The socket appears under its name only when it can be connected to."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fresh = f"{SOCKET}.{os.getpid()}"
    listener.bind(fresh)
    listener.listen(128)
    listener.setblocking(False)
    os.replace(fresh, SOCKET)
    return listener


def _send(connection: socket.socket, answer: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(answer).encode() + b"\n")

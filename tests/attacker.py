"""Another user that changes what the server works on: as fast as it can, or at every step of the server's."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

UID = 61_900
"""Of nobody on this machine."""


@contextlib.contextmanager
def attacking(directory: Path, act: Callable[[], None], *, uid: int = UID) -> Iterator[None]:
    """Have `act` repeated in a directory as a user who has no other rights; its errors do not matter."""
    pid = os.fork()
    if pid == 0:
        os.chdir(directory)  # as root: the directories of tests are closed to others
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        try:
            while os.getppid() != 1:
                with contextlib.suppress(OSError):
                    act()
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@dataclass
class Squatter:
    """A user that listens on a port of the loopback address, where somebody else's service should be."""

    port: int
    received: bytes = b""
    """What it was sent; known when it has ended."""


@contextlib.contextmanager
def squatting(*, leaves: bool = False, uid: int = UID) -> Iterator[Squatter]:
    """Have another user answer on a port; with `leaves` it gives the port up once it has a connection."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            listener = socket.create_server(("127.0.0.1", 0))
            os.write(write, b"%d\n" % listener.getsockname()[1])
            while True:
                connection, _ = listener.accept()
                if leaves:
                    listener.close()
                    connection.send(b"H")  # which says that it has left
                with contextlib.suppress(ConnectionError):
                    request = b""
                    while not _is_whole(request) and (data := connection.recv(4096)):
                        os.write(write, data)
                        request += data
                    connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb", buffering=0) as said:
        line = b""
        while not line.endswith(b"\n"):
            line += said.read(1) or b""
        squatter = Squatter(port=int(line))
        try:
            yield squatter
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            squatter.received = said.readall()


def _is_whole(request: bytes) -> bool:
    head, end, body = request.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)^content-length: *(\d+)", head, re.MULTILINE)
    return bool(end) and len(body) >= (int(length[1]) if length else 0)


def give(path: Path, uid: int = UID) -> None:
    """Make a tree over to a user."""
    for each in (path, *path.rglob("*")):
        os.lchown(each, uid, uid)


@contextlib.contextmanager
def interfering(act: Callable[[], None], *, uid: int = UID) -> Iterator[None]:
    """Have `act` done right before every file operation of this process, with the rights of another user."""
    global _act
    if _act is None:
        sys.addaudithook(_before)  # which stays for good, and does nothing without an act

    def as_user() -> None:
        _libc.setfsuid(uid)  # of this thread alone
        try:
            act()
        finally:
            _libc.setfsuid(0)

    _act = as_user
    try:
        yield
    finally:
        _act = _nothing


def _nothing() -> None:
    pass


_act: Callable[[], None] | None = None
_libc = ctypes.CDLL(None)
_busy = threading.local()


def _before(event: str, _: object) -> None:
    if _act is _nothing or not (event == "open" or event.startswith("os.")) or getattr(_busy, "yes", False):
        return
    _busy.yes = True
    try:
        with contextlib.suppress(OSError):
            (_act or _nothing)()
    finally:
        _busy.yes = False

"""The two ends of the socket between the front and the engine process.

One datagram is one message: four bytes that say how long the header is, the header (JSON), and the body where it is
small. A large body, or a large header, travels as a descriptor of memory that the other end maps. No pickle: neither
end can make the other run anything. The front's end belongs to an event loop; the engine's end has a thread that reads.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import logging
import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import fields as fields_of
from typing import Any, Final

from trainmaster.trainer_service.messages import (
    INLINE_BYTES,
    EngineReady,
    EngineStopped,
    Message,
    Reply,
    Request,
    SharedBody,
    mapped,
)

_log = logging.getLogger(__name__)

_TYPES: Final = {cls.__name__: cls for cls in (Request, Reply, EngineReady, EngineStopped)}
_DATAGRAM_BYTES = 4 * INLINE_BYTES
"""Room for a header and a body, each below INLINE_BYTES, with the descriptors beside them."""
_MAX_FDS = 2


class ChannelClosedError(Exception):
    """The other process is gone."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends; either can be passed to another process."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * _DATAGRAM_BYTES)
    return ends


class EngineChannel:
    """The engine's end. A thread reads, so that requests are at hand between two steps; any thread may send."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        self._end = end
        self._received: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="channel-reader", daemon=True)
        self._reader.start()

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """The next message; None when none came in time. Raises ChannelClosedError after the front's last one."""
        try:
            message = self._received.get(timeout=timeout_s) if timeout_s != 0 else self._received.get_nowait()
        except queue.Empty:
            return None
        if message is None:
            self._received.put(None)
            raise ChannelClosedError("the front process is gone")
        return message

    def send(self, message: Message) -> None:
        datagram, bodies = _packed(message)
        try:
            with self._sending:
                _send(self._end, datagram, bodies)
        except OSError as error:
            raise ChannelClosedError(f"the front process is gone: {error}") from error
        finally:
            for body in bodies:
                body.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        with self._sending:  # whoever still sends has the number of a descriptor that would soon be another's
            self._end.close()

    def _read(self) -> None:
        try:
            while (message := _receive(self._end)) is not None:
                self._received.put(message)
        except ConnectionResetError:
            pass  # it hung up
        except Exception:
            # An engine that hears nothing any more must not wait for more.
            _log.exception("what the front process said cannot be read")
        self._received.put(None)


class FrontChannel:
    """The front's end, on its event loop: nothing here ever blocks."""

    def __init__(self, end: socket.socket, *, received: Callable[[Message], None], closed: Callable[[], None]) -> None:
        """`received` is called for each message, `closed` once, when the engine is gone."""
        end.setblocking(False)
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._received = received
        self._closed = closed
        self._waiting: deque[tuple[bytes, list[SharedBody]]] = deque()
        self._open = True
        self._loop.add_reader(end, self._read)

    def send(self, message: Message, shared: SharedBody | None = None) -> None:
        """Now, or when the engine reads again. `shared` is a request's body, closed once sent. Dropped if closed."""
        datagram, bodies = _packed(message, shared)
        self._waiting.append((datagram, bodies))
        if len(self._waiting) == 1:
            self._write()

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._end)
            self._loop.remove_writer(self._end)
            self._end.close()
        for _, bodies in self._waiting:
            for body in bodies:
                body.close()
        self._waiting.clear()

    def _write(self) -> None:
        while self._waiting and self._open:
            datagram, bodies = self._waiting[0]
            try:
                _send(self._end, datagram, bodies)
            except BlockingIOError:
                self._loop.add_writer(self._end, self._write)
                return
            except OSError:
                self._hung_up()
                return
            self._waiting.popleft()
            for body in bodies:
                body.close()
        if self._open:
            self._loop.remove_writer(self._end)
        else:
            self.close()

    def _read(self) -> None:
        # A few at a time: a burst of replies must not keep the loop from everything else.
        for _ in range(32):
            try:
                message = _receive(self._end)
            except BlockingIOError:
                return
            except OSError:
                message = None
            if message is None:
                self._hung_up()
                return
            self._received(message)

    def _hung_up(self) -> None:
        if self._open:
            self.close()
            self._closed()


def _packed(message: Message, shared: SharedBody | None = None) -> tuple[bytes, list[SharedBody]]:
    values = {field.name: getattr(message, field.name) for field in fields_of(message)}
    body: bytes | memoryview | None = values.pop("body", None)
    bodies = []
    inline: bytes | memoryview = b""
    place: dict[str, Any] = {"is": type(message).__name__}
    if shared is None and body is not None and len(body) > INLINE_BYTES:
        shared = SharedBody.of(body)
    if shared is not None:
        bodies.append(shared)
        place["shared"] = shared.size
    elif body is not None:
        inline = body
        place["inline"] = len(body)
    header = json.dumps({**place, "values": values}, separators=(",", ":"), allow_nan=True).encode()
    if len(header) > INLINE_BYTES:
        bodies.append(SharedBody.of(header))
        header = json.dumps({**place, "header": len(header)}, separators=(",", ":")).encode()
    return b"".join((len(header).to_bytes(4, "big"), header, inline)), bodies


def _unpacked(datagram: memoryview, fds: list[int]) -> Message:
    end = 4 + int.from_bytes(datagram[:4], "big")
    header = json.loads(bytes(datagram[4:end]))
    values: dict[str, Any] = {}
    if (size := header.get("shared")) is not None:
        values["body"] = mapped(fds[0], size)
    elif "inline" in header:
        values["body"] = bytes(datagram[end : end + header["inline"]])
    if (size := header.get("header")) is not None:
        header = json.loads(bytes(mapped(fds[-1], size)))
    cls = _TYPES[header["is"]]
    values |= {name: tuple(value) if name == "checkpoints" else value for name, value in header["values"].items()}
    message: Message = cls(**values)
    return message


def _send(end: socket.socket, datagram: bytes, bodies: list[SharedBody]) -> None:
    if bodies:
        socket.send_fds(end, [datagram], [body.fd for body in bodies])
    else:
        end.send(datagram)


def _receive(end: socket.socket) -> Message | None:
    room = _MAX_FDS * array.array("i").itemsize
    datagram, ancillary, flags, _ = end.recvmsg(_DATAGRAM_BYTES, socket.CMSG_LEN(room), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ConnectionError("the other process said more than fits: it is of another version")
        return _unpacked(memoryview(datagram), fds.tolist()) if datagram else None
    finally:
        for fd in fds:
            os.close(fd)

"""HTTP to trainers, over connections that are kept: HTTP/1.1, no more than our own front process speaks.

A training step is four small requests, and each may take a millisecond or two in all. What passes through here is
neither decoded nor collected.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass
from http import HTTPStatus

from trainmaster.protocol.addresses import stranger_at
from trainmaster.protocol.environment import TOKEN_HEADER
from trainmaster.server.doors.tinker.names import Trainer
from trainmaster.server.http.gateway import STATUSES

CONNECT_TIMEOUT_S = 5.0
PATIENCE_S = 120.0
"""For the next piece of a request, for the head of its answer, and for the next piece of that. The longest that a
trainer holds a request is a poll of some twenty seconds."""
KEEP_IDLE_S = 30.0
"""Less than the time after which a trainer closes an idle connection."""
MOST_IDLE = 256
"""Kept for one trainer: as many polls at a time are nothing unusual."""
TOKEN = TOKEN_HEADER.encode()
_BUFFER_BYTES = 1 << 20
_PIECE_BYTES = 256 << 10
_MOST_HEADS = 8
"""Of one answer: all but the last say 100."""

Headers = list[tuple[bytes, bytes]]


class BrokenOffError(ConnectionError):
    """The trainer broke the connection off, or said something that is no HTTP."""


@dataclass(slots=True)
class Connection:
    """One connection to a trainer."""

    trainer: Trainer
    token: bytes
    """By which the trainer knows that the server asks."""
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    idle_since: float = 0.0

    @property
    def usable(self) -> bool:
        """Whether the other side is still there, as far as that can be seen."""
        gone = self.reader.at_eof() or self.writer.transport.is_closing()
        return not gone and time.monotonic() - self.idle_since < KEEP_IDLE_S

    def close(self) -> None:
        """Give it up."""
        self.writer.transport.abort()


@dataclass(slots=True)
class Answer:
    """The head of an answer; its body is read from here, once."""

    status: int
    headers: Headers
    connection: Connection
    pool: Connections
    length: int | None
    """Of the body; None: it comes in chunks."""
    keep: bool

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The body, as it comes; the connection can be used again afterwards.

        Raises:
            BrokenOffError: it breaks off in the middle.
        """
        whole = False
        try:
            async for piece in self._chunks() if self.length is None else self._counted(self.length):
                yield piece
            whole = True
        finally:
            self.pool.give_back(self.connection) if whole and self.keep else self.connection.close()

    async def body(self) -> bytes:
        """All of the body."""
        return b"".join([piece async for piece in self.pieces()])

    async def _counted(self, left: int) -> AsyncIterator[bytes]:
        while left:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    piece = await self.connection.reader.read(min(left, _PIECE_BYTES))
            except OSError as error:
                raise BrokenOffError(f"the answer broke off: {error or type(error).__name__}") from None
            if not piece:
                raise BrokenOffError("the answer broke off")
            left -= len(piece)
            yield piece

    async def _chunks(self) -> AsyncIterator[bytes]:
        try:
            while size := _count(await self._line(), 16):
                async for piece in self._counted(size):
                    yield piece
                await self._line()
            await self._line()
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise BrokenOffError(f"the answer broke off: {error}") from None

    async def _line(self) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return (await self.connection.reader.readuntil(b"\r\n"))[:-2]


class Connections:
    """All connections to trainers. Belongs to one event loop."""

    def __init__(self) -> None:
        self._idle: dict[Trainer, list[Connection]] = {}

    def kept(self, trainer: Trainer) -> Connection | None:
        """A connection that is open and free; it leads to that attempt's process and to no other."""
        idle = self._idle.get(trainer, [])
        while idle:
            connection = idle.pop()
            if connection.usable:
                return connection
            connection.close()
        self._idle.pop(trainer, None)
        return None

    async def open(self, trainer: Trainer, address: str, token: str, uid: int | None = None) -> Connection:
        """A new connection to where a trainer answers; `token` is what its ranks hold, `uid` as whom they run.

        Raises:
            BrokenOffError: nobody does, or somebody else.
        """
        host, _, port = address.rpartition(":")
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(host.strip("[]"), int(port), limit=_BUFFER_BYTES), CONNECT_TIMEOUT_S
            )
        except (OSError, TimeoutError) as error:
            raise BrokenOffError(f"the trainer does not answer: {error or type(error).__name__}") from None
        connection = Connection(trainer=trainer, token=token.encode(), reader=reader, writer=writer)
        peer, own = (writer.get_extra_info(name) for name in ("peername", "sockname"))
        stranger = stranger_at(peer[:2], own[:2], uid) if peer and own else None
        if stranger is not None:
            connection.close()
            raise BrokenOffError(f"the trainer does not answer: its port is taken by uid {stranger}")
        return connection

    def give_back(self, connection: Connection) -> None:
        """Keep a connection whose last answer was read to its end."""
        idle = self._idle.setdefault(connection.trainer, [])
        if len(idle) >= MOST_IDLE:
            connection.close()
            return
        connection.idle_since = time.monotonic()
        idle.append(connection)
        if len(idle) == 1:
            asyncio.get_running_loop().call_later(KEEP_IDLE_S * 2, self._tidy, connection.trainer)

    def close(self) -> None:
        """Give up what is idle."""
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    def _tidy(self, trainer: Trainer) -> None:
        """Give up what nobody wanted for a while."""
        if not (idle := self._idle.get(trainer)):
            return
        for connection in [connection for connection in idle if not connection.usable]:
            idle.remove(connection)
            connection.close()
        if idle:
            asyncio.get_running_loop().call_later(KEEP_IDLE_S * 2, self._tidy, trainer)
        else:
            del self._idle[trainer]

    async def exchange(
        self, connection: Connection, method: str, target: bytes, headers: Headers, body: AsyncIterator[bytes] | bytes
    ) -> Answer:
        """Send a request, and wait for the head of its answer.

        A body that comes in pieces needs a Content-Length among the headers, or goes on in chunks.

        Raises:
            BrokenOffError: the trainer went away; the request may have been carried out.
        """
        try:
            async with asyncio.timeout(PATIENCE_S) as patience:
                known = [*headers, (TOKEN, connection.token)]
                await _send(connection.writer, method, target, known, body, patience)
                status, received = await _head(connection.reader)
            said = dict(received)
            chunked = said.get(b"transfer-encoding", b"").lower() == b"chunked"
            if sum(name == b"content-length" for name, _ in received) > (0 if chunked else 1):
                raise ValueError("it has more than one length")
            length = None if chunked else _count(said.get(b"content-length", b"0"), 10)
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            connection.close()
            raise BrokenOffError(f"the trainer broke off: {error or type(error).__name__}") from None
        except BaseException:
            connection.close()
            raise
        keep = said.get(b"connection", b"").lower() != b"close"
        return Answer(status=status, headers=received, connection=connection, pool=self, length=length, keep=keep)


async def _send(
    writer: asyncio.StreamWriter,
    method: str,
    target: bytes,
    headers: Headers,
    body: AsyncIterator[bytes] | bytes,
    patience: asyncio.Timeout,
) -> None:
    lines = [b"%s %s HTTP/1.1" % (method.encode(), target), *(b"%s: %s" % each for each in headers)]
    if any(b"\r" in line or b"\n" in line for line in lines):
        raise ValueError("a header of the request has more than one line")
    if isinstance(body, bytes):
        writer.write(b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", body]))
        return await writer.drain()
    chunked = not any(name == b"content-length" for name, _ in headers)
    if chunked:
        lines.append(b"transfer-encoding: chunked")
    writer.write(b"\r\n".join([*lines, b"", b""]))
    loop = asyncio.get_running_loop()
    async for piece in body:
        writer.writelines(_chunk(piece) if chunked else (piece,))
        await writer.drain()
        patience.reschedule(loop.time() + PATIENCE_S)  # it goes on
    if chunked:
        writer.write(b"0\r\n\r\n")
    return await writer.drain()


def _count(digits: bytes, base: int) -> int:
    """A number as HTTP writes it: `int` alone takes signs and spaces too, and reads to the end for ever at -1.

    Raises:
        ValueError: it is none.
    """
    if not digits.isalnum():
        raise ValueError(f"{digits[:32]!r} is no length")
    return int(digits, base)


def _chunk(piece: bytes) -> Iterable[bytes]:
    return (b"%x\r\n" % len(piece), piece, b"\r\n")


async def _head(reader: asyncio.StreamReader) -> tuple[int, Headers]:
    for _ in range(_MOST_HEADS):
        first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
        if any(character in line for line in lines for character in (b"\r", b"\n", b"\0")):
            raise ValueError("a header has a control character")
        status = _status(first)
        if status != HTTPStatus.CONTINUE:  # the body is on its way already
            headers = [line.partition(b":") for line in lines]
            return status, [(name.strip().lower(), value.strip()) for name, _, value in headers]
    raise ValueError("it says 100 again and again")


def _status(line: bytes) -> int:
    """The status in the first line of an answer.

    Raises:
        ValueError: it has none that a server could pass on.
    """
    version, _, rest = line.partition(b" ")
    digits = rest[:3]
    if not version.startswith(b"HTTP/1.") or not digits.isdigit() or rest[3:4] not in (b"", b" "):
        raise ValueError(f"{line[:32]!r} is no status line")
    status = int(digits)
    if status not in STATUSES and status != HTTPStatus.CONTINUE:
        raise ValueError(f"{status} is no status of an answer")
    return status

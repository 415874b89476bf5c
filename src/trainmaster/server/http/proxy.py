"""The reverse proxy of the gateway and of the doors: HTTP/1.1 to services, and their responses passed on as they come.

A training step is four small requests, so each should cost little. httptools (llhttp) parses the responses: a small
request over a kept connection takes 0.1 ms of CPU here, against 1 ms with httpx.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Hashable
from dataclasses import dataclass, field
from http import HTTPStatus

import httptools
from starlette.requests import Request

from trainmaster.protocol.environment import TOKEN_HEADER
from trainmaster.protocol.sockets import untrusted_listener
from trainmaster.protocol.trainer_requests import HEADER_PREFIX

CONNECT_TIMEOUT_S = 5.0
KEEP_IDLE_S = 30.0
"""Less than the time after which a trainer closes an idle connection."""
MAX_IDLE = 256
"""Idle connections that are kept to one service: as many polls at a time are usual."""
STATUSES = range(200, 600)
"""What a response may have; the server cannot send others."""
_BUFFER_BYTES = 1 << 20
_PIECE_BYTES = 256 << 10
_MAX_HEAD_BYTES = 256 << 10
_MAX_INTERIM = 8
"""Responses of 1xx before the one that counts."""
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
_NOT_FORWARDED = _HOP_BY_HOP | {b"content-length", b"expect", b"host", b"x-api-key"}
_SERVERS_OWN = HEADER_PREFIX.encode()
_TOKEN = TOKEN_HEADER.encode()

Headers = list[tuple[bytes, bytes]]
RequestBody = AsyncIterator[bytes] | bytes | None
"""None: the request has none, and no Content-Length."""


class BrokenOffError(ConnectionError):
    """The service broke the connection off, or sent something that is not HTTP."""


@dataclass(slots=True)
class ServiceConnection:
    key: Hashable
    """A connection is kept for other requests with the same key; None: it is not kept."""
    token: bytes
    """By which the service knows that the server sent a request."""
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    idle_since: float = 0.0

    @property
    def usable(self) -> bool:
        """Whether the other side is still there, as far as that can be seen."""
        gone = self.reader.at_eof() or self.writer.transport.is_closing()
        return not gone and time.monotonic() - self.idle_since < KEEP_IDLE_S

    def close(self) -> None:
        self.writer.transport.abort()


@dataclass(slots=True)
class _ResponseParser:
    """Collects what httptools finds in one response, past interim ones."""

    parser: httptools.HttpResponseParser = field(init=False)
    headers: Headers = field(default_factory=list)
    pieces: deque[bytes] = field(default_factory=deque)
    has_head: bool = False
    is_complete: bool = False
    keep_alive: bool = False
    interim: int = 0

    def __post_init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)

    @property
    def status(self) -> int:
        return self.parser.get_status_code()

    def feed(self, data: bytes) -> None:
        """Raises ValueError where the data is not HTTP, or not acceptable."""
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise ValueError(str(error.__context__ or error)) from None

    def on_message_begin(self) -> None:
        if self.is_complete:
            raise ValueError("it sent two responses to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self.status // 100 == 1:
            self.interim += 1
            if self.interim > _MAX_INTERIM:
                raise ValueError("it sent too many responses of 1xx")
        elif self.status not in STATUSES:
            raise ValueError(f"{self.status} is no status of a response")
        else:
            self.has_head = True

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        if self.has_head:
            self.is_complete = True
            self.keep_alive = self.parser.should_keep_alive()
        else:
            self.headers.clear()


@dataclass(slots=True)
class ServiceResponse:
    """The head of a service's response; its body is read from here, once."""

    connection: ServiceConnection
    pool: Connections
    patience_s: float | None
    _parsed: _ResponseParser
    _ended: bool = False

    @property
    def status(self) -> int:
        return self._parsed.status

    @property
    def length(self) -> int | None:
        """Of the body; None: it is not known before its end."""
        if self._parsed.is_complete:
            return sum(map(len, self._parsed.pieces))
        length = next((value for name, value in self._parsed.headers if name == b"content-length"), None)
        return None if length is None else int(length)

    @property
    def headers(self) -> Headers:
        """Those that are for the client."""
        given = self._parsed.headers
        left_out = _HOP_BY_HOP | _named_by_connection(given) | {b"date"}
        if self.status in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED):
            left_out |= {b"content-length"}  # it is not the length of what follows
        return [(name, value) for name, value in given if name not in left_out]

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The body, as it comes. The connection can be used again afterwards."""
        parsed = self._parsed
        try:
            while True:
                while parsed.pieces:
                    yield parsed.pieces.popleft()
                if parsed.is_complete:
                    return
                await self._read_more()
        finally:
            self.close()

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    def close(self) -> None:
        """Keep the connection where the response was read to its end, or else give it up. May be repeated."""
        if self._ended:
            return
        self._ended = True
        if self._parsed.is_complete and self._parsed.keep_alive and self.connection.key is not None:
            self.pool.give_back(self.connection)
        else:
            self.connection.close()

    async def _read_more(self) -> None:
        parsed = self._parsed
        try:
            async with asyncio.timeout(self.patience_s):
                data = await self.connection.reader.read(_PIECE_BYTES)
            if data:
                parsed.feed(data)
        except (OSError, ValueError) as error:
            raise BrokenOffError(f"the response broke off: {error or type(error).__name__}") from None
        if not data:
            if any(name in (b"content-length", b"transfer-encoding") for name, _ in parsed.headers):
                raise BrokenOffError("the response broke off")
            parsed.is_complete = True  # a body without a length ends with its connection


class Connections:
    """Connections to services, idle and in use. Belongs to one event loop."""

    def __init__(self) -> None:
        self._idle: dict[Hashable, list[ServiceConnection]] = {}

    def kept(self, key: Hashable) -> ServiceConnection | None:
        """An idle connection to the same process as before."""
        idle = self._idle.get(key, [])
        while idle:
            connection = idle.pop()
            if connection.usable:
                return connection
            connection.close()
        self._idle.pop(key, None)
        return None

    async def open(self, key: Hashable, address: str, token: str, uid: int | None = None) -> ServiceConnection:
        """Connect to a service; `token` is the secret of its ranks, and `uid` the user that they run as."""
        host, _, port = address.rpartition(":")
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(host.strip("[]"), int(port), limit=_BUFFER_BYTES), CONNECT_TIMEOUT_S
            )
        except OSError as error:
            raise BrokenOffError(f"the service does not answer: {error or type(error).__name__}") from None
        connection = ServiceConnection(key=key, token=token.encode(), reader=reader, writer=writer)
        peer, own = (writer.get_extra_info(name) for name in ("peername", "sockname"))
        stranger = untrusted_listener(peer[:2], own[:2], uid) if peer and own else None
        if stranger is not None:
            connection.close()
            raise BrokenOffError(f"the service does not answer: its port is taken by uid {stranger}")
        return connection

    def give_back(self, connection: ServiceConnection) -> None:
        """Keep a connection whose last response was read to its end."""
        idle = self._idle.setdefault(connection.key, [])
        if len(idle) >= MAX_IDLE:
            connection.close()
            return
        connection.idle_since = time.monotonic()
        idle.append(connection)
        if len(idle) == 1:
            asyncio.get_running_loop().call_later(KEEP_IDLE_S * 2, self._close_unused, connection.key)

    def close(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    def _close_unused(self, key: Hashable) -> None:
        if not (idle := self._idle.get(key)):
            return
        for connection in [connection for connection in idle if not connection.usable]:
            idle.remove(connection)
            connection.close()
        if idle:
            asyncio.get_running_loop().call_later(KEEP_IDLE_S * 2, self._close_unused, key)
        else:
            del self._idle[key]

    async def exchange(
        self,
        connection: ServiceConnection,
        method: str,
        target: bytes,
        headers: Headers,
        body: RequestBody,
        *,
        patience_s: float | None = None,
    ) -> ServiceResponse:
        """Send a request, and wait for the head of its response.

        `patience_s` is the limit for the next piece of the request, for the head, and for the next piece of the
        response. A body in pieces needs a Content-Length among the headers, or is sent in chunks. A service that broke
        off may have carried out the request.
        """
        parsed = _ResponseParser()
        try:
            async with asyncio.timeout(patience_s) as patience:
                known = [*headers, (_TOKEN, connection.token)]
                await _send(connection.writer, method, target, known, body, patience, patience_s)
                received = 0
                while not parsed.has_head:
                    data = await connection.reader.read(_PIECE_BYTES)
                    received += len(data)
                    if not data:
                        raise ValueError("it closed the connection")
                    parsed.feed(data)
                    if not parsed.has_head and received > _MAX_HEAD_BYTES:
                        raise ValueError("the head of its response is too long")
        except (OSError, ValueError) as error:
            connection.close()
            raise BrokenOffError(f"the service broke off: {error or type(error).__name__}") from None
        except BaseException:
            connection.close()
            raise
        if method == "HEAD" and not parsed.is_complete:
            parsed.on_message_complete()  # its Content-Length is that of a GET
        return ServiceResponse(connection, self, patience_s, parsed)


async def _send(
    writer: asyncio.StreamWriter,
    method: str,
    target: bytes,
    headers: Headers,
    body: RequestBody,
    patience: asyncio.Timeout,
    patience_s: float | None,
) -> None:
    lines = [b"%s %s HTTP/1.1" % (method.encode(), target), *(b"%s: %s" % each for each in headers)]
    if any(b"\r" in line or b"\n" in line for line in lines):
        raise ValueError("a header of the request has more than one line")
    if body is None or isinstance(body, bytes):
        length = [] if body is None else [b"content-length: %d" % len(body)]
        writer.write(b"\r\n".join([*lines, *length, b"", body or b""]))
        return await writer.drain()
    chunked = not any(name == b"content-length" for name, _ in headers)
    if chunked:
        lines.append(b"transfer-encoding: chunked")
    writer.write(b"\r\n".join([*lines, b"", b""]))
    loop = asyncio.get_running_loop()
    async for piece in body:
        writer.writelines((b"%x\r\n" % len(piece), piece, b"\r\n") if chunked else (piece,))
        await writer.drain()
        if patience_s is not None:
            patience.reschedule(loop.time() + patience_s)
    if chunked:
        writer.write(b"0\r\n\r\n")
    return await writer.drain()


def forwarded_headers(request: Request, body: RequestBody) -> Headers:
    """The headers of a client's request that are a service's business; a Content-Length where the body is in pieces."""
    given: Headers = request.scope["headers"]
    left_out = _NOT_FORWARDED | _named_by_connection(given)
    headers = [(name, value) for name, value in given if name not in left_out and not name.startswith(_SERVERS_OWN)]
    length = request.headers.get("content-length")
    if body is not None and not isinstance(body, bytes) and length is not None:
        headers.append((b"content-length", length.encode()))
    return headers


def target_of(request: Request, grammar: re.Pattern[bytes] | None = None) -> bytes:
    """The path and the query of a client's request, as they were written: escapes may mean something to the service.

    `grammar` matches the path at the server; its group `rest` is the path at the service.
    """
    raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    path = raw.partition(b"?")[0]
    if grammar is not None:
        found = grammar.fullmatch(path)
        path = (found["rest"] if found else None) or b"/"
    query: bytes = request.scope["query_string"]
    return path + (b"?" + query if query else b"")


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    return frozenset(
        option.strip().lower() for name, value in headers if name == b"connection" for option in value.split(b",")
    )

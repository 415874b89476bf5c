"""Passes bodies through a door. The id of the model is found in the first or last bytes of a body.

A forward_backward may have a hundred megabytes. In protobuf the model's id is among the first fields, so the rest is
streamed. JSON has it at one of its ends; where that is the last one, the body is held until it is there.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from starlette.requests import Request

from trainmaster.protocol import trainer_requests as protocol
from trainmaster.server.core.errors import TrainmasterError
from trainmaster.server.http.errors import RateLimitedError, StalledError, TooLargeError, wrong
from trainmaster.server.http.requests import pieces_of

SMALL_BYTES = 256 << 10
"""A body of up to this length is waited for."""
MAX_BODY_BYTES = 512 << 20
"""Far above what clients send, which split what is larger than five megabytes."""
MAX_WHOLE_BYTES = 128 << 20
"""Of a body that must be held until its end."""
MAX_WHOLE_BYTES_IN_ALL = 1 << 30
"""Of all such bodies at a time in one server; further clients get 429, and retry. One account may hold a quarter."""
COMPRESSED_HEAD_BYTES = 192 << 10
"""How much of a compressed body is read in search of its model: a zstd block, of up to 128 KiB, is read whole."""
MAX_ID_LENGTH = 32 << 10
"""The id of a future that failed at once contains its message."""
_NOT_PLAIN = re.compile("[\0\ud800-\udfff]")
"""NUL, which not every database takes, and surrogates, which JSON can hold and UTF-8 cannot."""


@dataclass(slots=True, eq=False)
class IncomingBody:
    """The body of a request: what came, and the rest on demand. Released with its block; an error drops the rest."""

    request: Request
    account_id: str
    pieces: list[bytes] = field(default_factory=list)
    size: int = 0
    _stream: AsyncIterator[bytes] | None = None
    complete: bool = False
    _passed_on: bool = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Explicitly: an error on its way out refers to this body, and may be kept for long.
        self._release()
        refused = isinstance(error, TrainmasterError) and not isinstance(error, StalledError | TooLargeError)
        if refused and not self._passed_on:
            await self.drain()
            self._release()

    async def more(self) -> bool:
        """Wait for another piece; False when there is none. Raises TooLargeError and StalledError."""
        if self._stream is None:
            self._stream = pieces_of(self.request)
        if (piece := await anext(self._stream, None)) is None:
            self.complete = True
            return False
        self.size += len(piece)
        if self.size > MAX_BODY_BYTES:
            raise TooLargeError(f"the body may have at most {MAX_BODY_BYTES} bytes")
        self.pieces.append(piece)
        return True

    def head(self, size: int) -> bytes:
        return b"".join(self.pieces)[:size]

    async def content(self) -> bytes | AsyncIterator[bytes]:
        """All of it: at once where it is small, else as it comes."""
        length = self.request.headers.get("content-length", "")
        if self.complete or (length.isdecimal() and int(length[:18]) <= SMALL_BYTES):
            return await self.whole()
        self._passed_on = True
        return self._all_pieces()

    async def drain(self) -> None:
        """Read and drop the rest: a client may never see the response if the connection closes while it sends."""
        while not self.complete and await self.more():
            self.pieces.clear()

    async def whole(self) -> bytes:
        """Raises RateLimitedError where too much is held already, and TooLargeError where it is too large to hold."""
        while await self.more():
            if self.size > MAX_WHOLE_BYTES:
                message = f"a body that does not name its model in front may have at most {MAX_WHOLE_BYTES} bytes"
                raise TooLargeError(message)
            if self.size > SMALL_BYTES:
                _held.add(self)
                if not self._has_room():
                    self._release()
                    await self.drain()
                    raise RateLimitedError("many large bodies that do not name their model in front are under way", 1)
        if len(self.pieces) > 1:
            self.pieces = [b"".join(self.pieces)]
        return self.pieces[0] if self.pieces else b""

    async def _all_pieces(self) -> AsyncIterator[bytes]:
        at = 0
        while True:
            while at < len(self.pieces):
                piece, self.pieces[at] = self.pieces[at], b""
                at += 1
                yield piece
            if self.complete or not await self.more():
                return

    def _has_room(self) -> bool:
        of_account = sum(body.size for body in _held if body.account_id == self.account_id)
        return of_account <= MAX_WHOLE_BYTES_IN_ALL // 4 and sum(body.size for body in _held) <= MAX_WHOLE_BYTES_IN_ALL

    def _release(self) -> None:
        _held.discard(self)
        self.pieces.clear()


_held: set[IncomingBody] = set()
"""Those that are held whole: each takes memory until its request is over."""


async def text_field(body: IncomingBody, name: str) -> str:
    """The id in a member of a JSON body, or the model's id of a protobuf body. Raises SpecError where there is none."""
    is_protobuf = protocol.content_type_of(body.request.headers.get("content-type", "")) == protocol.PROTOBUF
    return plain_id(await (_protobuf_text(body, name) if is_protobuf else _json_text(body, name)), name)


def plain_id(found: object, name: str) -> str:
    """The id in a member called `name`. Raises SpecError for what is no text, too long, or not valid Unicode."""
    if not isinstance(found, str):
        raise wrong(name, "required: a text")
    if len(found) > MAX_ID_LENGTH or not is_plain(found):
        raise wrong(name, f"must have up to {MAX_ID_LENGTH} characters, of Unicode")
    return found


def is_plain(text: str) -> bool:
    """Whether a database takes a text."""
    return _NOT_PLAIN.search(text) is None


async def _protobuf_text(body: IncomingBody, name: str) -> object:
    encoding = body.request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "zstd"):
        raise wrong("Content-Encoding", f"'{encoding}' is not taken here; 'zstd' is")
    limit = COMPRESSED_HEAD_BYTES if encoding == "zstd" else protocol.END_BYTES
    tried = 0
    while True:
        ended = body.size >= limit or not await body.more()
        if ended or body.size >= 2 * tried:  # a body that comes byte by byte is not read anew at each
            tried = body.size
            head = body.head(limit)
            try:
                return _peek(_inflated(head) if encoding == "zstd" else head)["model_id"]
            except (protocol.PeekError, KeyError):
                pass
        if ended:
            raise wrong(name, "required: among the first fields of the message")


def _peek(head: bytes) -> dict[str, object]:
    return protocol.peek_protobuf(lambda offset, count: head[offset : offset + count], len(head), ("model_id",))


def _inflated(head: bytes) -> bytes:
    try:
        # Comes with the packages that trainers need; a server on another machine may do without.
        import zstandard
    except ImportError:
        message = "this server has no zstandard (pip install 'trainmaster[service]'); send it uncompressed"
        raise wrong("Content-Encoding", message) from None
    try:
        # No more than is looked at: a few bytes can stand for gigabytes.
        with zstandard.ZstdDecompressor().stream_reader(head) as stream:
            return stream.read(protocol.END_BYTES)
    except zstandard.ZstdError:
        return b""


async def _json_text(body: IncomingBody, name: str) -> object:
    # A small body is decoded whole, as in the trainer, which would not count a request that is no JSON.
    while body.size <= protocol.DECODED_BYTES and await body.more():
        pass
    if not body.complete and (found := protocol.peek_json_head(body.head(protocol.END_BYTES)).get(name)) is not None:
        return found
    data = await body.whole()
    try:
        found = protocol.peek_json(lambda offset, count: data[offset : offset + count], len(data)).get(name)
    except protocol.PeekError:
        raise wrong("body", "is not valid JSON") from None
    if not isinstance(found, str):
        raise wrong(name, "required: a text, at the beginning or at the end of the body")
    return found

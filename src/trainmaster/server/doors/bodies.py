"""For whom a body is: the one field that says so, found without decoding the rest.

A forward_backward may have a hundred megabytes, and nobody here has a use for them. In protobuf the model's id is the
first field. In JSON it is a member of the outermost object, and clients write it near one of the ends; a body that has
it elsewhere is decoded after all.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from trainmaster.server.core.errors import Problem, SpecError
from trainmaster.server.http.errors import RateLimitedError, TooLargeError
from trainmaster.server.http.requests import pieces_of

PROTOBUF = frozenset({"application/x-protobuf", "application/protobuf"})
WINDOW_BYTES = 16 << 10
"""How much of either end is looked at."""
SMALL_BYTES = 256 << 10
"""A body of up to this length is waited for."""
MAX_BODY_BYTES = 512 << 20
"""Of one request: far above what clients send, which split what is larger than five megabytes."""
MAX_WHOLE_BYTES = 128 << 20
"""Of one that has to be here as a whole before it is known for whom it is."""
MAX_WHOLE_BYTES_IN_ALL = 1 << 30
"""Of all of these at a time, in one server; clients with more are asked to come back, which they do. A quarter of it is
the most that one account has, so that nobody shuts the others out."""
MAX_DECODED_BYTES = 8 << 20
"""Of one that is decoded in search of the field: what JSON says in two bytes may take a hundred here."""
COMPRESSED_WINDOW_BYTES = 192 << 10
"""How much of a compressed body is looked at: nothing of a block can be read before all of it is there, and a block has
up to 128 KiB."""
_MOST_CANDIDATES = 8
"""Of places in a window that look like the field; a body with more of them was made to be slow."""
LONGEST_ID = 32 << 10
"""Futures that failed at once hold their message."""
_NOT_PLAIN = re.compile("[\0\ud800-\udfff]")
"""Halves of characters, which JSON can hold and UTF-8 cannot, and the one that not every database takes."""
_LENGTH_DELIMITED = 2
_MODEL_ID_FIELD = 1


@dataclass(slots=True, eq=False)
class Body:
    """A body that is on its way: what came so far, and the rest when it is asked for. It ends with the exit."""

    request: Request
    account_id: str
    """Who sends it."""
    pieces: list[bytes] = field(default_factory=list)
    size: int = 0
    _stream: AsyncIterator[bytes] | None = None
    complete: bool = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # By hand: an error on its way out refers to us, and nobody knows how long it is kept.
        self._let_go()

    async def more(self) -> bool:
        """Wait for another piece; False when there is none.

        Raises:
            TooLargeError: it is one too many.
            StalledError: none has come for long.
        """
        if self._stream is None:
            self._stream = pieces_of(self.request)
        piece = await anext(self._stream, None)
        if piece is None:
            self.complete = True
            return False
        self.size += len(piece)
        if self.size > MAX_BODY_BYTES:
            raise TooLargeError(f"the body may have at most {MAX_BODY_BYTES} bytes")
        self.pieces.append(piece)
        return True

    async def content(self) -> bytes | AsyncIterator[bytes]:
        """All of it: at once where it is small, else as it comes."""
        said = self.request.headers.get("content-length", "")
        small = self.complete or (said.isdecimal() and int(said[:18]) <= SMALL_BYTES)
        return await self.whole() if small else self._all_pieces()

    async def drain(self) -> None:
        """Let it come, and forget it."""
        while await self.more():
            self.pieces.clear()

    async def whole(self) -> bytes:
        """All of it."""
        while await self.more():
            if self.size > MAX_WHOLE_BYTES:
                message = f"a body that does not name its model in front may have at most {MAX_WHOLE_BYTES} bytes"
                raise TooLargeError(message)
            if self.size > SMALL_BYTES:
                _whole.add(self)
                if not self._has_room():
                    self._let_go()
                    await self.drain()  # a client hears no answer before it has said everything
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
        of_account = sum(body.size for body in _whole if body.account_id == self.account_id)
        return of_account <= MAX_WHOLE_BYTES_IN_ALL // 4 and sum(body.size for body in _whole) <= MAX_WHOLE_BYTES_IN_ALL

    def _let_go(self) -> None:
        _whole.discard(self)
        self.pieces.clear()


_whole: set[Body] = set()
"""Those that are here as a whole, or will be: each takes memory until its request is over."""


async def text_field(body: Body, name: str) -> str:
    """The text that a member of a JSON body's outermost object holds; of a protobuf body, its first field.

    Raises:
        SpecError: there is none, or the body is neither.
        RateLimitedError: there is no room for such a body now.
        StalledError: it does not come.
    """
    if body.request.headers.get("content-type", "").partition(";")[0].strip().lower() in PROTOBUF:
        return plain_id(await _first_text(body, name), name)
    return plain_id(await _json_text(body, name), name)


def plain_id(found: object, name: str) -> str:
    """The id that a member holds.

    Raises:
        SpecError: it is none that anything could have: no text, one that is too long, or not in Unicode.
    """
    if not isinstance(found, str):
        raise SpecError([Problem(field=name, message="required: a text")])
    if len(found) > LONGEST_ID or not is_plain(found):
        raise SpecError([Problem(field=name, message=f"must have up to {LONGEST_ID} characters, of Unicode")])
    return found


def is_plain(text: str) -> bool:
    """Whether a database takes a text: it is in Unicode, and has no NUL."""
    return _NOT_PLAIN.search(text) is None


async def _first_text(body: Body, name: str) -> str:
    encoded = body.request.headers.get("content-encoding", "identity").strip().lower()
    if encoded not in ("identity", "zstd"):
        raise SpecError([Problem(field="Content-Encoding", message=f"'{encoded}' is not taken here; 'zstd' is")])
    window = COMPRESSED_WINDOW_BYTES if encoded == "zstd" else WINDOW_BYTES
    tried = 0
    while True:
        ended = body.size >= window or not await body.more()
        if ended or body.size >= 2 * tried:  # a body that comes byte by byte is not read anew at each
            tried = body.size
            head = b"".join(body.pieces)[:window]
            found = protobuf_text(_inflated(head) if encoded == "zstd" else head)
            if found is not None:
                return found
        if ended:
            raise SpecError([Problem(field=name, message="required: the first field of the message")])


def protobuf_text(head: bytes) -> str | None:
    """The text that a message begins with in field 1; None when it does not, or when the text is not whole yet."""
    if not head or head[0] != _MODEL_ID_FIELD << 3 | _LENGTH_DELIMITED:
        return None
    length = shift = 0
    for at, byte in enumerate(head[1:6], start=2):
        length |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            text = head[at : at + length]
            try:
                return text.decode() if len(text) == length else None
            except UnicodeDecodeError:
                return None
    return None


def _inflated(head: bytes) -> bytes:
    """The beginning of what was compressed.

    Raises:
        SpecError: this server cannot read it.
    """
    try:
        # Comes with the packages that trainers need; a server on another machine than they are may do without.
        import zstandard
    except ImportError:
        message = "this server has no zstandard (pip install 'trainmaster[service]'); send it as it is"
        raise SpecError([Problem(field="Content-Encoding", message=message)]) from None
    try:
        # No more than is looked at: a few bytes can stand for gigabytes.
        with zstandard.ZstdDecompressor().stream_reader(head) as stream:
            return stream.read(WINDOW_BYTES)
    except zstandard.ZstdError:
        return b""


async def _json_text(body: Body, name: str) -> str | None:
    member = re.compile(rb'"%s"\s*:\s*"' % re.escape(name.encode()))
    while body.size < WINDOW_BYTES and await body.more():
        pass
    head = b"".join(body.pieces)[:WINDOW_BYTES]
    if not body.complete and (found := _in_head(head, member, name)) is not None:
        return found
    data = await body.whole()
    if len(data) > 2 * WINDOW_BYTES and (found := _in_tail(data[-WINDOW_BYTES:], member, name)) is not None:
        return found
    if len(data) > MAX_DECODED_BYTES:
        message = f"required: a text; where a body has more than {MAX_DECODED_BYTES} bytes, at its beginning or its end"
        raise SpecError([Problem(field=name, message=message)])
    try:
        document = json.loads(data) if len(data) <= 2 * WINDOW_BYTES else await run_in_threadpool(json.loads, data)
    except (ValueError, RecursionError):
        raise SpecError([Problem(field="body", message="is not valid JSON")]) from None
    value = document.get(name) if isinstance(document, dict) else None
    return value if isinstance(value, str) else None


def _in_head(head: bytes, member: re.Pattern[bytes], name: str) -> str | None:
    """The member, where the beginning of a body holds it and all that comes before it is whole."""
    for number, found in enumerate(member.finditer(head)):
        end = head.find(b'"', found.end())
        if number == _MOST_CANDIDATES or end < 0:
            return None
        value = _member(head[: end + 1] + b"}", name)
        if value is not None:
            return value
    return None


def _in_tail(tail: bytes, member: re.Pattern[bytes], name: str) -> str | None:
    """The member, where the end of a body holds it: what follows closes the outermost object and nothing else."""
    candidates = [found.start() for found in member.finditer(tail)]
    for start in candidates[: -_MOST_CANDIDATES - 1 : -1]:
        value = _member(b"{" + tail[start:], name)
        if value is not None:
            return value
    return None


def _member(document: bytes, name: str) -> str | None:
    try:
        read = json.loads(document)
    except (ValueError, RecursionError):
        return None
    value = read.get(name) if isinstance(read, dict) else None
    return value if isinstance(value, str) else None

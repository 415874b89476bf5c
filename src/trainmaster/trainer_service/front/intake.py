"""How requests are taken in or refused: small bodies go into memory, large ones into what the engine will map."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from trainmaster.trainer_service.messages import INLINE_BYTES, SharedBody


class RefusedError(Exception):
    """Told through a future where there is one, and with status 400 elsewhere."""

    def __init__(self, error: str, category: str = "user") -> None:
        super().__init__(error)
        self.category = category


class BusyError(Exception):
    """It cannot be taken in now: its client hears a status of 429, and comes back.

    The public ones do so for as long as it takes with a sample, and for five minutes with anything else.
    """


class StoppedError(Exception):
    """The trainer has stopped, and the front is about to exit."""


_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOENT})
"""ENOENT: no directory for temporary files can be written to, which is how a disk that was full at the first try
reads."""
_VALUE_BYTES = 200
"""What a value takes once it is decoded, with its key and its place in what holds it; rather more than less."""


@dataclass(slots=True, kw_only=True)
class Received:
    data: bytes
    shared: SharedBody | None
    """Where the body is large; `data` is empty then."""
    size: int
    digest: bytes
    """Its length and a checksum: enough to tell a repeat from a mistake, and cheap while everybody else waits."""
    whole: bool
    """False: it was longer than bodies may be, and the rest is lost."""

    def read(self, offset: int, count: int) -> bytes:
        return self.data[offset : offset + count] if self.shared is None else self.shared.read(offset, count)


class Intake:
    """Reads bodies, and minds how much of them is held at a time: while they come, wait, and are worked on.

    What has come is released when its work has ended, also by those who hold it in another form by then.
    """

    def __init__(self, *, memory_bytes: int, max_held: int, max_held_bytes: int, max_body_bytes: int) -> None:
        """From `memory_bytes` on, large bodies go to disk."""
        self._memory_bytes = memory_bytes
        self._max_held = max_held
        self._max_held_bytes = max_held_bytes
        self._max_body_bytes = max_body_bytes
        self.held = 0
        self.held_bytes = 0
        self._reading: set[asyncio.Task[Any]] = set()
        self._stopped = False

    async def read(self, request: Request) -> Received:
        """The body of a request.

        Raises:
            ClientDisconnect: the client left before it was there.
            BusyError: there is no room for it now.
            StoppedError: the front goes before it is there.
        """
        task = asyncio.current_task()
        assert task is not None
        if self._stopped:
            raise StoppedError
        self._reading.add(task)
        try:
            return await self._read(request)
        except asyncio.CancelledError:
            if not self._stopped:
                raise
            task.uncancel()
            raise StoppedError from None
        finally:
            self._reading.discard(task)

    async def _read(self, request: Request) -> Received:
        checksum = 0
        pieces: list[bytes] = []
        shared: SharedBody | None = None
        size = kept = 0
        busy: BusyError | None = None
        self.add(0)
        try:
            async for piece in request.stream():
                size += len(piece)
                if busy is not None or size > self._max_body_bytes:
                    continue  # read on: a client hears no answer before it has said everything
                kept = size
                self.held_bytes += len(piece)
                checksum = zlib.crc32(piece, checksum)
                if shared is None:
                    pieces.append(piece)
                    if size <= INLINE_BYTES:
                        continue
                    piece = b"".join(pieces)
                    pieces.clear()
                try:
                    self.require_room()
                    with room():
                        if shared is None:
                            shared = SharedBody(on_disk=self.held_bytes > self._memory_bytes)
                        shared.write(piece)
                except BusyError as error:
                    busy = error
                    self.held_bytes -= kept
                    kept = 0
                    if shared is not None:
                        shared.close()
            if busy is not None:
                raise busy
        except BaseException:  # there is no room, the client left, or the front goes
            self.release(kept)
            if shared is not None:
                shared.close()
            raise
        return Received(
            data=b"".join(pieces),
            shared=shared,
            size=kept,
            digest=b"%d:%08x" % (size, checksum),
            whole=size <= self._max_body_bytes,
        )

    def drop(self, received: Received) -> None:
        self.release(received.size)
        if received.shared is not None:
            received.shared.close()

    def add(self, size: int) -> None:
        """Count something that is held in another form."""
        self.held += 1
        self.held_bytes += size

    def hold(self, size: int) -> None:
        """Like `add`; raises BusyError where there is no room."""
        self.add(size)
        try:
            self.require_room()
        except BusyError:
            self.release(size)
            raise

    def release(self, size: int) -> None:
        self.held -= 1
        self.held_bytes -= size

    def require_room(self) -> None:
        """Raises BusyError where more is held than may be."""
        if self.held > self._max_held:
            raise BusyError(f"the trainer holds {self._max_held} requests already")
        if self.held_bytes > self._max_held_bytes:
            raise BusyError(f"the trainer holds {self._max_held_bytes} bytes of request bodies already")

    def stop(self) -> None:
        self._stopped = True
        for task in self._reading:
            task.cancel()


def size_of_fields(fields: Mapping[str, Any]) -> int:
    """About how much memory they take: many times the length of their JSON."""
    text = json.dumps(fields)
    return len(text) + _VALUE_BYTES * sum(map(text.count, ",[{"))


@contextlib.contextmanager
def room() -> Iterator[None]:
    """Raises BusyError where memory, disk or descriptors are short."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise BusyError(f"the trainer has no room for more request bodies: {error.strerror}") from error

"""How bodies come in: small ones into memory, large ones straight into what the engine will map."""

from __future__ import annotations

import asyncio
import errno
import zlib
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from trainmaster.service.bodies import INLINE_BYTES, SharedBody
from trainmaster.service.front.refusals import BusyError, StoppedError

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG})


@dataclass(slots=True, kw_only=True)
class Received:
    """A body, and how to tell it from another one."""

    data: bytes
    shared: SharedBody | None
    """Where the body is large; `data` is empty then."""
    size: int
    digest: bytes
    """Its length and a checksum: enough to tell a repeat from a mistake, and cheap while everybody else waits."""
    whole: bool
    """False: it was longer than bodies may be, and the rest is lost."""

    def read(self, offset: int, count: int) -> bytes:
        """Some of it."""
        return self.data[offset : offset + count] if self.shared is None else self.shared.read(offset, count)


class Intake:
    """Reads bodies, and minds how much of them is held at a time: while they come, wait, and are worked on."""

    def __init__(self, *, memory_bytes: int, max_held_bytes: int, max_body_bytes: int) -> None:
        """Hold up to `memory_bytes` of large bodies in memory, more on disk, and `max_held_bytes` in all."""
        self._memory_bytes = memory_bytes
        self._max_held_bytes = max_held_bytes
        self._max_body_bytes = max_body_bytes
        self.held_bytes = 0
        """Of large bodies that came in and are not `released`."""
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
        size = kept = held = 0
        no_room = ""
        try:
            async for piece in request.stream():
                size += len(piece)
                if no_room or size > self._max_body_bytes:
                    continue  # read on: a client hears no answer before it has said everything
                kept = size
                checksum = zlib.crc32(piece, checksum)
                if shared is None:
                    pieces.append(piece)
                    if size <= INLINE_BYTES:
                        continue
                    shared = SharedBody(on_disk=self.held_bytes > self._memory_bytes)
                    piece = b"".join(pieces)
                    pieces.clear()
                self.held_bytes += len(piece)
                held += len(piece)
                no_room = self._written(shared, piece)
                if no_room:
                    self.release(held)
                    held = 0
                    shared.close()
        except BaseException:  # the client left, or the front goes
            if shared is not None:
                self.release(held)
                shared.close()
            raise
        if no_room:
            raise BusyError(no_room)
        return Received(
            data=b"".join(pieces),
            shared=shared,
            size=kept,
            digest=b"%d:%08x" % (size, checksum),
            whole=size <= self._max_body_bytes,
        )

    def drop(self, received: Received) -> None:
        """Let go of a body that nobody wants."""
        if received.shared is not None:
            self.release(received.shared.size)
            received.shared.close()

    def release(self, size: int) -> None:
        """A large body of this size is not needed any more."""
        self.held_bytes -= size

    def stop(self) -> None:
        """Wait for no body any more."""
        self._stopped = True
        for task in self._reading:
            task.cancel()

    def _written(self, shared: SharedBody, piece: bytes) -> str:
        """Append to a body; says why there is no room for more, and nothing where there is."""
        if self.held_bytes > self._max_held_bytes:
            return f"the trainer holds {self._max_held_bytes} bytes of request bodies already"
        try:
            shared.write(piece)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            return f"the trainer has no room for more request bodies: {error.strerror}"
        return ""

"""How bodies come in: small ones into memory, large ones straight into what the engine will map."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from starlette.requests import Request

from trainmaster.service.bodies import INLINE_BYTES, SharedBody


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
    """Reads bodies, and minds how much of them is in memory at a time."""

    def __init__(self, *, memory_bytes: int, max_body_bytes: int) -> None:
        """Hold up to `memory_bytes` of large bodies in memory; more goes to disk."""
        self._memory_bytes = memory_bytes
        self._max_body_bytes = max_body_bytes
        self.held_bytes = 0
        """Of large bodies that came in and are not `released`."""

    async def read(self, request: Request) -> Received:
        """The body of a request.

        Raises:
            ClientDisconnect: the client left before it was there.
        """
        checksum = 0
        pieces: list[bytes] = []
        shared: SharedBody | None = None
        size = kept = held = 0
        try:
            async for piece in request.stream():
                size += len(piece)
                if size > self._max_body_bytes:
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
                shared.write(piece)
        except BaseException:  # the client left, or there is no room for what it sends
            if shared is not None:
                self.release(held)
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
        """Let go of a body that nobody wants."""
        if received.shared is not None:
            self.release(received.shared.size)
            received.shared.close()

    def release(self, size: int) -> None:
        """A large body of this size is not needed any more."""
        self.held_bytes -= size

"""How requests are accepted or refused: the front's limits, and bodies, of which the engine maps large ones."""

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

from trainmaster.protocol.trainer_requests import Trainer
from trainmaster.trainer_service.messages import INLINE_BYTES, SharedBody
from trainmaster.trainer_service.wire import MAX_BODY_BYTES


@dataclass(frozen=True, kw_only=True)
class FrontSettings:
    trainer: Trainer
    hold_s: float = 20.0
    """How long a question is held without an answer; the public clients give up after 45 s, and ask again at once."""
    keep_results_s: float = 600.0
    keep_fetched_bytes: int = 256 << 20
    memory_bytes: int = 1 << 30
    """Of request bodies; large ones that come when there is more go to disk."""
    max_held: int = 16_384
    """Request bodies: those that come, that wait, and that the engine works on. Each large one is a descriptor of this
    process or of the engine, and a map there, of which it may have 65,530."""
    max_held_bytes: int = 8 << 30
    """Of them, in memory and on disk. Beyond that, clients are asked to try again later."""
    max_body_bytes: int = MAX_BODY_BYTES
    max_waiting: int = 4096
    """Of the operations of one model, for an earlier one that has not come. Who sends more is asked to come back;
    they wait until it comes, their model is unloaded, or their session ends."""
    max_waiting_bytes: int = 1 << 30
    """Of what came with them; those of all models are half of `max_held`, with half of `max_held_bytes`, at most, so
    that there is room for what they wait for."""
    session_expires_s: float = 1800.0
    """Clients beat every 10 s, and complain after two minutes; a laptop may sleep a little longer."""
    save_again_s: float = 60.0
    """After which what a client that is gone left unsaved is to be saved once more, where it could not be."""
    max_pending_samples: int = 4096
    max_pending_sample_bytes: int = 256 << 20
    last_answers_s: float = 5.0
    """How long the front outlives the engine, for those who have not heard yet."""


class RequestRefusedError(Exception):
    """Told through a future where there is one, and with status 400 elsewhere."""

    def __init__(self, error: str, category: str = "user") -> None:
        super().__init__(error)
        self.category = category


class BusyError(Exception):
    """It cannot be taken in now: its client hears a status of 429, and comes back, for five minutes or longer."""


class StoppedError(Exception):
    """The trainer has stopped, and the front is about to exit."""


_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOENT})
"""ENOENT: no directory for temporary files can be written to; so reads a disk that was full at the first try."""
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


class BodyReader:
    """Reads bodies, and minds how much is held at a time, in any form: while they come, wait, and are worked on."""

    def __init__(self, settings: FrontSettings) -> None:
        self._settings = settings
        self.held = 0
        self.held_bytes = 0
        self._reading: set[asyncio.Task[Any]] = set()
        self._stopped = False

    async def read(self, request: Request) -> Received:
        """The body of a request. Raises BusyError, StoppedError, and ClientDisconnect if the client leaves before."""
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
                if busy is not None or size > self._settings.max_body_bytes:
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
                            shared = SharedBody(on_disk=self.held_bytes > self._settings.memory_bytes)
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
            whole=size <= self._settings.max_body_bytes,
        )

    def drop(self, received: Received) -> None:
        self.release(received.size)
        if received.shared is not None:
            received.shared.close()

    def add(self, size: int) -> None:
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
        most, most_bytes = self._settings.max_held, self._settings.max_held_bytes
        if self.held > most:
            raise BusyError(f"the trainer holds {most} requests already")
        if self.held_bytes > most_bytes:
            raise BusyError(f"the trainer holds {most_bytes} bytes of request bodies already")

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

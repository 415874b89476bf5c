"""Following logs, metrics, events and control documents, most of them as server-sent events.

One task takes snapshots of all *sources*, things that grow, and wakes the followers of those that have changed. What a
follower is sent depends on its cursor and on the last snapshot alone, so that followers at the same cursor share one
read of the files and one encoding: a thousand followers of one source cost little more than one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Send

from trainmaster.server.archive import ObjectStoreAwayError
from trainmaster.server.core.errors import StoreUnavailableError, TrainmasterError
from trainmaster.server.http.errors import InternalError
from trainmaster.server.store import events
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

EVENT_STREAM = "text/event-stream"
HEARTBEAT = b": still here\n\n"
"""A comment, which keeps the connection open."""
DONE = b"data: [DONE]\n\n"
"""Ends every stream that is complete or has failed."""


def sse_event(kind: str, data: str, cursor: str | int | None = None) -> bytes:
    """One event. `data` is one line; the client sends `cursor` as Last-Event-ID to go on after it."""
    head = f"event: {kind}\n" if cursor is None else f"id: {cursor}\nevent: {kind}\n"
    return f"{head}data: {data}\n\n".encode()


def sse_end(status: str, notice: str | None = None) -> bytes:
    """The end of a complete stream, with the status of its job and a notice where there is one."""
    return sse_event("end", json.dumps({"status": status} | ({"notice": notice} if notice else {}))) + DONE


def sse_failure(error: TrainmasterError) -> bytes:
    """The end of a stream that failed, whose HTTP status was sent long ago."""
    return sse_event("error", json.dumps({"code": error.code, "message": error.message})) + DONE


def wants_events(request: Request) -> bool:
    return EVENT_STREAM in request.headers.get("accept", "")


class EventStream(StreamingResponse):
    def __init__(self, content: AsyncGenerator[bytes, None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(content, media_type=EVENT_STREAM, headers=headers)
        self._content = content

    async def stream_response(self, send: Send) -> None:
        """Send the events, and stop following as soon as the client leaves."""
        async with contextlib.aclosing(self._content):
            await super().stream_response(send)


_log = logging.getLogger(__name__)

SNAPSHOT_EVERY_S = 0.1
REST_FACTOR = 4.0
"""The pause after a snapshot, as a multiple of its duration: a thousand followed jobs must not take a whole core."""
WAKE_S = 0.0002
"""The rough cost of sending to one follower; the next snapshot waits until all were sent to."""
PASSING_EVERY_S = 1.0
"""How often a follower is sent passing data: a progress bar may change many times a second."""
HEARTBEAT_S = 10.0
_SHARED_PIECES = 64
"""Pieces of one source that are shared between two snapshots; a follower that is far behind reads its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPiece:
    """What comes after a cursor: bytes to send, and the cursor after them."""

    data: bytes
    cursor: str
    end: bool = False
    """Nothing will follow."""
    at_end: bool = False
    """Nothing follows before the source changes again."""
    passing: bytes = b""
    """A present state that will be replaced: sent after the data, now and then, and not counted by cursors."""


class Watched(Protocol):
    """Something that changes. Hashable; equal ones are the same. All methods run in threads."""

    @property
    def job_id(self) -> str | None:
        """The job whose events announce a change; None when any event does."""

    def take_snapshot(self, connection: Connection, before: Any, *, changed: bool) -> Any:
        """What can be read now, unequal to `before` (first None) if it is more; `changed`: the database was written."""


class FollowedSource(Watched, Protocol):
    """Something that grows, and is read piece by piece."""

    def read(self, snapshot: Any, cursor: str) -> StreamPiece:
        """The next piece after a cursor, within what was seen."""


class Followers:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._watches: dict[Watched, _Watch] = {}
        self._task: asyncio.Task[None] | None = None
        self.closed = False
        self._data_version = -1
        self._last_event = 0

    def close(self) -> None:
        """End all streams; clients reconnect to the next server with their cursors."""
        self.closed = True
        for watch in self._watches.values():
            watch.wake()

    async def follow(self, source: FollowedSource, cursor: str) -> AsyncGenerator[bytes, None]:
        """What follows a cursor, now and later, as a body of server-sent events."""
        sent_at = time.monotonic()
        passing, passing_at = b"", -PASSING_EVERY_S
        try:
            async with self.watching(source) as watch:
                while not self.closed:
                    changed = watch.changed
                    piece = await watch.read(source, cursor)
                    cursor = piece.cursor
                    data, wait_s = piece.data, None
                    if piece.passing != passing:
                        wait_s = passing_at + PASSING_EVERY_S - time.monotonic()
                        if wait_s <= 0:
                            passing, passing_at, wait_s = piece.passing, time.monotonic(), None
                            data += passing
                    if data:
                        sent_at = time.monotonic()
                        yield data
                    if piece.end:
                        return
                    if not piece.data or piece.at_end:
                        if wait_s is None:
                            await changed.wait()
                        else:
                            with contextlib.suppress(TimeoutError):
                                await asyncio.wait_for(changed.wait(), wait_s)
                        if time.monotonic() - sent_at >= HEARTBEAT_S:
                            sent_at = time.monotonic()
                            yield HEARTBEAT
        except TrainmasterError as error:
            yield sse_failure(error)
        except Exception:
            _log.exception("%s cannot be followed any further", source)
            yield sse_failure(InternalError())

    @contextlib.asynccontextmanager
    async def watching(self, source: Watched) -> AsyncIterator[_Watch]:
        if (watch := self._watches.get(source)) is None:
            watch = self._watches[source] = _Watch(source)
        watch.followers += 1
        try:
            await watch.first_look(self._database)
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._keep_looking(), name="followers")
            yield watch
        finally:
            watch.followers -= 1
            if watch.followers == 0 and self._watches.get(source) is watch:
                del self._watches[source]

    async def _keep_looking(self) -> None:
        # Each watch is looked at anew, so that nothing is missed from the time when nobody followed.
        self._data_version = -1
        for watch in self._watches.values():
            watch.confirmed = False
        all_woken_at = time.monotonic()
        while self._watches and not self.closed:
            try:
                seen, took_s = await run_in_threadpool(self._take_snapshots, list(self._watches.values()))
            except StoreUnavailableError as error:
                _log.warning("followed streams are delayed: %s", error)
                seen, took_s = [], 1.0
            woken = 0
            for watch, snapshot in seen:
                if snapshot != watch.snapshot:
                    watch.snapshot = snapshot
                    watch.wake()
                    woken += watch.followers
            if time.monotonic() - all_woken_at >= HEARTBEAT_S / 4:
                all_woken_at = time.monotonic()
                for watch in self._watches.values():
                    watch.wake()
            await asyncio.sleep(max(SNAPSHOT_EVERY_S, took_s * REST_FACTOR, woken * WAKE_S))

    def _take_snapshots(self, watches: Collection[_Watch]) -> tuple[list[tuple[_Watch, Any]], float]:
        """What each source shows now, and how long the snapshots took."""
        began = time.monotonic()
        version = self._data_version
        now_version = self._database.data_version()
        with self._database.read() as connection:
            changed_jobs: Collection[str] = ()
            last_event = self._last_event
            if version == -1:
                last_event = events.last_id(connection, Scope.everything())
            elif now_version != version:
                last_event, changed_jobs = events.changed_jobs(connection, Scope.everything(), last_event)
                changed_jobs = frozenset(changed_jobs)
            seen = []
            for watch in watches:
                job_id = watch.source.job_id
                changed = not watch.confirmed or (bool(changed_jobs) if job_id is None else job_id in changed_jobs)
                seen.append((watch, _take_snapshot(watch.source, connection, watch.snapshot, changed=changed)))
                watch.confirmed = True
        self._data_version, self._last_event = now_version, last_event
        return seen, time.monotonic() - began


class _Watch:
    """One source that is followed, as it was last seen."""

    def __init__(self, source: Watched) -> None:
        self.source = source
        self.followers = 0
        self.snapshot: Any = None
        self.confirmed = False
        """Whether the snapshot was taken together with those of all sources, which notices later changes."""
        self.changed = asyncio.Event()
        self._first: asyncio.Task[None] | None = None
        self._pieces: dict[str, asyncio.Task[StreamPiece]] = {}

    async def first_look(self, database: Database) -> None:
        """Look once, for all who begin to follow at the same time."""
        if self._first is None:
            self._first = asyncio.create_task(self._take_snapshot(database))
        await asyncio.shield(self._first)

    async def _take_snapshot(self, database: Database) -> None:
        def take_snapshot() -> Any:
            with database.read() as connection:
                return _take_snapshot(self.source, connection, None, changed=True)

        snapshot = await run_in_threadpool(take_snapshot)
        if self.snapshot is None:
            self.snapshot = snapshot

    def seen(self) -> Any:
        """What was last seen; raises the exception of a snapshot that failed."""
        if isinstance(self.snapshot, Exception):
            raise self.snapshot
        return self.snapshot

    def wake(self) -> None:
        self._pieces.clear()
        self.changed.set()
        self.changed = asyncio.Event()

    async def read(self, source: FollowedSource, cursor: str) -> StreamPiece:
        """The next piece after a cursor, read once for all followers at it."""
        if (task := self._pieces.get(cursor)) is None:
            if len(self._pieces) >= _SHARED_PIECES:
                self._pieces.clear()
            task = self._pieces[cursor] = asyncio.create_task(run_in_threadpool(source.read, self.seen(), cursor))
            task.add_done_callback(_retrieve)
        # A follower that leaves must not cancel the read for the others.
        return task.result() if task.done() else await asyncio.shield(task)


def _take_snapshot(source: Watched, connection: Connection, before: Any, *, changed: bool) -> Any:
    """What a source shows, or its exception: a broken source must not stop the snapshots of the others."""
    try:
        return source.take_snapshot(connection, None if isinstance(before, Exception) else before, changed=changed)
    except ObjectStoreAwayError as error:
        return error
    except StoreUnavailableError:
        raise
    except Exception as error:
        return error


def _retrieve(task: asyncio.Task[StreamPiece]) -> None:
    """Mark an exception as retrieved: those who waited got it, and asyncio need not warn when all have left."""
    if not task.cancelled():
        task.exception()


def followers_of(request: Request) -> Followers:
    followers: Followers = request.app.state.followers
    return followers

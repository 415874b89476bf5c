"""When clients were last heard of, and their models used: kept in memory, and written every few seconds.

A client that is not heard of for long is gone: its session is finished for it, so that its models make room.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from sqlalchemy import Connection

from trainmaster.server.core.errors import StoreUnavailableError
from trainmaster.server.doors.tinker import records
from trainmaster.server.http.context import ApiContext
from trainmaster.server.store.scope import Scope

_log = logging.getLogger(__name__)

WRITE_EVERY_S = 5.0
"""Half of the time between two heartbeats: what is shown is never far from the truth."""
LOOK_EVERY_S = 60.0
"""For sessions that are silent, or sooner where silence is short; never before all who are there had the time to say
so to this server."""


class Use:
    """Collects signs of life; belongs to one event loop."""

    def __init__(self, context: ApiContext, end_session: Callable[[str], Awaitable[None]]) -> None:
        """Take what is done with a session that is finished; it may be done again."""
        self._context = context
        self._end_session = end_session
        self._silent_s = context.tinker_silent_s
        """Clients beat every ten seconds, and complain after two minutes."""
        self._sessions: dict[str, float] = {}
        self._runs: dict[str, float] = {}
        self._ending: set[str] = set()
        """Finished sessions of which not everybody knows."""
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Write what is heard from now on, and look for those who are silent."""
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._keep())

    def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()

    def heard(self, session_id: str) -> None:
        """A session's client is there."""
        self._sessions[session_id] = self._context.clock()
        self.begin()

    def used(self, model_id: str) -> None:
        """Something was asked of a model."""
        self._runs[model_id] = self._context.clock()
        self.begin()

    async def end(self, session_id: str) -> None:
        """See to it that all let go of a session that is finished: now, or once the database can be asked again."""
        try:
            await self._end_session(session_id)
        except StoreUnavailableError as error:
            _log.warning("session %s is finished, and not everybody knows yet: %s", session_id, error.message)
            self._ending.add(session_id)
            self.begin()

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        look_at = loop.time() + min(LOOK_EVERY_S, self._silent_s)
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            try:
                await self._write()
                if loop.time() > look_at:
                    look_at = loop.time() + min(LOOK_EVERY_S, self._silent_s / 4)
                    await self._find_silent()
                await self._end_others()
            except StoreUnavailableError as error:
                _log.warning("signs of life of Tinker clients could not be recorded: %s", error.message)
            except Exception:
                _log.exception("something is wrong with the sessions of Tinker clients")

    async def _write(self) -> None:
        sessions, self._sessions, runs, self._runs = self._sessions, {}, self._runs, {}

        def work(connection: Connection) -> None:
            records.note_use(connection, Scope.everything(), sessions_heard=sessions, runs_used=runs)

        if not sessions and not runs:
            return
        try:
            await self._context.write(work)
        except StoreUnavailableError:
            # Who was heard of is not silent, whenever that can be written.
            self._sessions, self._runs = sessions | self._sessions, runs | self._runs
            raise

    async def _find_silent(self) -> None:
        now = self._context.clock()
        finish = {"reason": {"type": "interrupted"}, "detail": f"its client was silent for {self._silent_s:.0f} s"}

        def work(connection: Connection) -> list[str]:
            return records.end_silent(
                connection, Scope.everything(), before=now - self._silent_s, at=now, finish=finish
            )

        self._ending.update(await self._context.write(work))

    async def _end_others(self) -> None:
        for session_id in list(self._ending):
            self._ending.discard(session_id)
            await self.end(session_id)
            if session_id in self._ending:
                return

"""Sessions of Tinker clients: a cache of them, signs of life, and the removal of ended ones.

Signs of life are kept in memory and written every few seconds. A client that is silent for long is gone: the server
finishes its session, so that its models make room.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from sqlalchemy import Connection

from trainmaster.server.coordinator.retention import Collected
from trainmaster.server.core.errors import NotFoundError, StoreUnavailableError
from trainmaster.server.core.retention import Keep
from trainmaster.server.doors.tinker import records
from trainmaster.server.doors.tinker.names import RunState, TinkerRun, Trainer, trainer_of_sampler
from trainmaster.server.doors.tinker.records import Leftover
from trainmaster.server.http.context import ApiContext
from trainmaster.server.http.errors import SessionEndedError
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

REMEMBER_S = 30.0
"""How long another server's word, that a session is finished or uses another job, may take to arrive here."""
MOST_REMEMBERED = 16_384


@dataclass(slots=True, kw_only=True)
class KnownSession:
    """A session, as it was when it was last read."""

    account_id: str
    until: float
    finished: bool
    finish_reason: str = ""
    """Why it is: `interrupted` where its client fell silent."""
    trainers: set[Trainer] = field(default_factory=set)
    """That have something of it."""


class Sessions:
    """What is remembered of sessions and of their models. Belongs to one event loop."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._sessions: dict[str, KnownSession] = {}
        self._runs: dict[str, TinkerRun] = {}

    async def require(self, scope: Scope, session_id: str) -> KnownSession:
        """A session that goes on.

        Raises:
            NotFoundError: there is none in scope.
            SessionEndedError: its client has finished it.
        """
        known = await self._remembered(session_id)
        if not scope.admits(known.account_id):
            raise NotFoundError(f"there is no session {session_id}")
        if known.finished:
            raise SessionEndedError(f"session {session_id} is finished")
        return known

    async def run(self, scope: Scope, model_id: str) -> TinkerRun:
        """The run of a model.

        Raises:
            NotFoundError: there is none in scope.
        """
        run = self._runs.get(model_id)
        if run is None:
            run = await self._context.read(lambda connection: records.get_run(connection, Scope.everything(), model_id))
            if run.state is RunState.CREATED:  # and so it stays, with the trainer that it has
                if len(self._runs) >= MOST_REMEMBERED:
                    self._runs.clear()
                self._runs[model_id] = run
        if not scope.admits(run.account_id):
            raise NotFoundError(f"there is no training run {model_id}")
        return run

    async def end(self, session_id: str) -> KnownSession:
        """Forget a session that is finished; whose it was, and who has something of it."""
        self._sessions.pop(session_id, None)
        return await self._context.read(lambda connection: _known(connection, session_id))

    async def seems_finished(self, session_id: str) -> bool:
        """Whether a session's client is done, as far as it is remembered: what it told another server is heard late.

        Cheap enough to be asked again and again.
        """
        return (await self._remembered(session_id)).finished

    async def is_finished(self, session_id: str) -> bool:
        """Whether a session's client is done, whichever server it told; asks the database."""
        return (await self._context.read(lambda connection: _known(connection, session_id))).finished

    def joined(self, session_id: str, trainer: Trainer | None) -> None:
        """A session has something with a trainer."""
        if trainer is not None and (known := self._sessions.get(session_id)) is not None:
            known.trainers.add(trainer)

    async def _remembered(self, session_id: str) -> KnownSession:
        known = self._sessions.get(session_id)
        if known is None or known.until < time.monotonic():
            known = await self._context.read(lambda connection: _known(connection, session_id))
            if len(self._sessions) >= MOST_REMEMBERED:
                self._sessions.clear()
            self._sessions[session_id] = known
        return known


def _known(connection: Connection, session_id: str) -> KnownSession:
    everything = Scope.everything()
    session = records.get_session(connection, everything, session_id)
    runs = [run.trainer for run in records.runs_of_session(connection, everything, session_id)]
    samplers = [
        trainer_of_sampler(sampler.sampler_id)
        for sampler in records.samplers_of_session(connection, everything, session_id)
    ]
    return KnownSession(
        account_id=session.account_id,
        until=time.monotonic() + REMEMBER_S,
        finished=session.finished_at is not None,
        finish_reason=str((session.finish.get("reason") or {}).get("type") or ""),
        trainers={trainer for trainer in (*runs, *samplers) if trainer is not None},
    )


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


_EVERYTHING = Scope.everything()


def collect_sessions(database: Database, keep: Keep, now: float, dry_run: bool) -> Iterator[Collected]:
    """Forget the records of sessions that ended long enough ago, and tell of them; a `Collect`."""
    if not keep.sessions_s:
        return
    before = now - keep.sessions_s
    after: str | None = ""
    while after is not None:

        def work(connection: Connection, after: str = after) -> list[Leftover]:
            gone, _ = records.leftovers(connection, _EVERYTHING, before=before, after=after)
            for each in gone:
                records.forget(connection, _EVERYTHING, each)
            return gone

        with database.read() as connection:
            gone, last = records.leftovers(connection, _EVERYTHING, before=before, after=after)
        if gone and not dry_run:
            gone = database.write_now(work)
        for each in gone:
            for what, names in (
                ("sampler", each.sampler_ids),
                ("training run", each.model_ids),
                ("session", (each.session_id,) if each.whole else ()),
            ):
                yield from (Collected(what=what, name=name, size_bytes=0) for name in names)
        after = last

"""Sessions of Tinker clients: a cache of them, their heartbeats, and the removal of ended ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from sqlalchemy import Connection

from trainmaster.protocol.trainer_requests import Trainer, trainer_of_sampling_session
from trainmaster.server.coordinator.retention import Collected
from trainmaster.server.core.errors import NotFoundError, StoreUnavailableError
from trainmaster.server.core.retention import RetentionPolicy
from trainmaster.server.doors.tinker import records
from trainmaster.server.doors.tinker.records import Leftover, RunState, TinkerRun
from trainmaster.server.doors.trainers import MAX_REMEMBERED, Lookups
from trainmaster.server.http.context import ApiContext
from trainmaster.server.http.errors import SessionEndedError
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

_log = logging.getLogger(__name__)

REMEMBER_S = 30.0
"""How long it may take until this server knows that another one finished a session, or gave it another trainer."""
WRITE_EVERY_S = 5.0
"""Half of the time between two heartbeats."""
LOOK_EVERY_S = 60.0
"""For silent sessions, or sooner where the limit is short; first when every live client had time for a heartbeat."""
_EVERYTHING = Scope.everything()


@dataclass(slots=True, kw_only=True)
class KnownSession:
    account_id: str
    finished: bool
    finish_reason: str = ""
    """`interrupted` where its client fell silent."""
    trainers: set[Trainer] = field(default_factory=set)
    """Those that have models or samplers of it."""


class Sessions:
    """A cache of sessions and of their models. Belongs to one event loop."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._sessions = Lookups(self._read, REMEMBER_S)
        self._runs: dict[str, TinkerRun] = {}

    async def require(self, scope: Scope, session_id: str) -> KnownSession:
        """Raises NotFoundError where there is none in scope, and SessionEndedError where it is finished."""
        known = await self._sessions.get(session_id)
        if not scope.admits(known.account_id):
            raise NotFoundError(f"there is no session {session_id}")
        if known.finished:
            raise SessionEndedError(f"session {session_id} is finished")
        return known

    async def run(self, scope: Scope, model_id: str) -> TinkerRun:
        if (run := self._runs.get(model_id)) is None:
            run = await self._context.read(records.get_run, _EVERYTHING, model_id)
            if run.state is RunState.CREATED:  # and so it stays, with the same trainer
                if len(self._runs) >= MAX_REMEMBERED:
                    self._runs.clear()
                self._runs[model_id] = run
        if not scope.admits(run.account_id):
            raise NotFoundError(f"there is no model {model_id}")
        return run

    async def end(self, session_id: str) -> KnownSession:
        """Forget a session that is finished; as the database has it."""
        self._sessions.forget(session_id)
        return await self._read(session_id)

    async def seems_finished(self, session_id: str) -> bool:
        """Cheap, but learns late of a session that another server finished."""
        return (await self._sessions.get(session_id)).finished

    async def is_finished(self, session_id: str) -> bool:
        return (await self._read(session_id)).finished

    def joined(self, session_id: str, trainer: Trainer | None) -> None:
        """A trainer got a model or a sampler of a session."""
        if trainer is not None and (known := self._sessions.known(session_id)) is not None:
            known.trainers.add(trainer)

    async def _read(self, session_id: str) -> KnownSession:
        def question(connection: Connection) -> KnownSession:
            session = records.get_session(connection, _EVERYTHING, session_id)
            runs = records.runs_of_session(connection, _EVERYTHING, session_id)
            samplers = records.samplers_of_session(connection, _EVERYTHING, session_id)
            trainers = {run.trainer for run in runs} | {
                trainer_of_sampling_session(each.sampler_id) for each in samplers
            }
            return KnownSession(
                account_id=session.account_id,
                finished=session.finished_at is not None,
                finish_reason=str((session.finish.get("reason") or {}).get("type") or ""),
                trainers={trainer for trainer in trainers if trainer is not None},
            )

        return await self._context.read(question)


class Heartbeats:
    """Records when sessions and models were last used, and ends silent sessions. Belongs to one event loop."""

    def __init__(self, context: ApiContext, end_session: Callable[[str], Awaitable[None]]) -> None:
        """`end_session` is called for each finished session, maybe more than once."""
        self._context = context
        self._end_session = end_session
        self._silent_s = context.settings.tinker_silent_s
        self._sessions: dict[str, float] = {}
        self._runs: dict[str, float] = {}
        self._ending: set[str] = set()
        """Finished sessions for which `end_session` has to be called."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def heard(self, session_id: str) -> None:
        self._sessions[session_id] = self._context.clock()
        self.start()

    def used(self, model_id: str) -> None:
        self._runs[model_id] = self._context.clock()
        self.start()

    async def end(self, session_id: str) -> None:
        """Have everybody release a finished session: now, or when the database is available again."""
        try:
            await self._end_session(session_id)
        except StoreUnavailableError as error:
            _log.warning("session %s is finished, but its trainers do not know yet: %s", session_id, error.message)
            self._ending.add(session_id)
            self.start()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        look_at = loop.time() + min(LOOK_EVERY_S, self._silent_s)
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            try:
                await self._write()
                if loop.time() > look_at:
                    look_at = loop.time() + min(LOOK_EVERY_S, self._silent_s / 4)
                    await self._finish_silent()
                await self._end_finished()
            except StoreUnavailableError as error:
                _log.warning("heartbeats of Tinker clients could not be recorded: %s", error.message)
            except Exception:
                _log.exception("the upkeep of Tinker sessions failed")

    async def _write(self) -> None:
        sessions, self._sessions, runs, self._runs = self._sessions, {}, self._runs, {}
        if not sessions and not runs:
            return
        try:
            await self._context.write(records.note_use, _EVERYTHING, sessions_heard=sessions, runs_used=runs)
        except StoreUnavailableError:
            # These clients are not silent, whenever that can be written.
            self._sessions, self._runs = sessions | self._sessions, runs | self._runs
            raise

    async def _finish_silent(self) -> None:
        now = self._context.clock()
        finish = {"reason": {"type": "interrupted"}, "detail": f"its client was silent for {self._silent_s:.0f} s"}
        silent_since = now - self._silent_s
        ended = await self._context.write(records.end_silent, _EVERYTHING, before=silent_since, at=now, finish=finish)
        self._ending.update(ended)

    async def _end_finished(self) -> None:
        for session_id in list(self._ending):
            self._ending.discard(session_id)
            await self.end(session_id)
            if session_id in self._ending:
                return


def collect_sessions(database: Database, keep: RetentionPolicy, now: float, dry_run: bool) -> Iterator[Collected]:
    """Delete the records of sessions that ended long enough ago, and report them; a `Collect`."""
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

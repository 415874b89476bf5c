"""Sessions, as far as every heartbeat and every operation needs them: whose they are, and which jobs they use."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from sqlalchemy import Connection

from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.doors.tinker import records
from trainmaster.server.doors.tinker.names import RunState, TinkerRun, Trainer, trainer_of_sampler
from trainmaster.server.http.context import ApiContext
from trainmaster.server.http.errors import SessionEndedError
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

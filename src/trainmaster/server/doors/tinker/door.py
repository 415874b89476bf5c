"""The root Tinker door of one server: what its routes share, and telling trainers of sessions that are over."""

from __future__ import annotations

import asyncio
import functools
import logging
from dataclasses import dataclass

from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from trainmaster.protocol.trainer_requests import PLACE_OF_KIND, TINKER, Trainer, WeightsPath
from trainmaster.server.core.errors import NotFoundError, StoreUnavailableError
from trainmaster.server.core.job import CheckpointRecord
from trainmaster.server.doors.door import DoorState
from trainmaster.server.doors.tinker import records
from trainmaster.server.doors.tinker.model_creation import Creations
from trainmaster.server.doors.tinker.records import TinkerRun
from trainmaster.server.doors.tinker.sessions import Heartbeats, KnownSession, Sessions
from trainmaster.server.doors.tinker.trainer_jobs import TinkerTrainers
from trainmaster.server.doors.trainers import TrainerGoneError, Trainers
from trainmaster.server.http.auth import Gate
from trainmaster.server.http.context import ApiContext
from trainmaster.server.http.proxy import BrokenOffError
from trainmaster.server.store.scope import Scope

_log = logging.getLogger(__name__)

NOTIFY_AGAIN_S = 1.0
"""After which a trainer that did not answer is notified again that a session is over; doubled each time."""
NOTIFY_AGAIN_AT_MOST_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    run: TinkerRun
    checkpoint: CheckpointRecord


class TinkerDoor(DoorState):
    def __init__(self, context: ApiContext, gate: Gate, trainers: Trainers) -> None:
        self.context = context
        self.trainer_jobs = TinkerTrainers(context)
        self.trainers = trainers
        self.sessions = Sessions(context)
        self.creations = Creations(context, self.trainer_jobs, trainers, self.sessions, self._on_created)
        self.heartbeats = Heartbeats(context, self._end_session)
        self._gate = gate
        self._notices: dict[tuple[str, Trainer], asyncio.Task[None]] = {}
        self._recovery: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Look after existing sessions, even if no client comes. Called in the event loop."""
        self.heartbeats.start()
        self._recovery = asyncio.ensure_future(self._end_last_finished())

    def close(self) -> None:
        """Stop; another server continues what is under way. Called in the event loop."""
        self.creations.close()
        self.heartbeats.close()
        if self._recovery is not None:
            self._recovery.cancel()
        for task in self._notices.values():
            task.cancel()

    async def weights(self, scope: Scope, text: str, *, access_token: str | None = None) -> Weights:
        """The weights at a path: the account's own, public ones, or those of the account that the token belongs to."""
        if (path := WeightsPath.parse(text)) is None:
            raise NotFoundError(f"{text!r} is not a path of weights; expected tinker://RUN/weights/NAME")
        lender = await self._gate.whose(access_token) if access_token else None

        def question(connection: Connection) -> Weights | None:
            everything = Scope.everything()
            run = records.get_run(connection, everything, path.run)
            lent = lender is not None and lender.scope.admits(run.account_id)
            for checkpoint in records.weights_of_run(connection, everything, run, path):
                if scope.admits(run.account_id) or lent or checkpoint.public:
                    return Weights(run=run, checkpoint=checkpoint)
            return None

        try:
            found = await self.context.read(question)
        except NotFoundError:
            found = None
        if found is None:
            # The same whatever is missing: a stranger learns nothing of others' runs.
            raise NotFoundError(f"there are no weights {path}")
        return found

    async def explain_loss(self, how_it_ended: str, account_id: str, model_id: str) -> str:
        def question(connection: Connection) -> str | None:
            scope = Scope(account_id)
            try:
                run = records.get_run(connection, scope, model_id)
            except NotFoundError:
                return None
            saved = records.weights_of_run(connection, scope, run)
            last = next((checkpoint for checkpoint in saved if checkpoint.kind == "training"), None)
            if last is None:
                return f"model {model_id} is lost with it, as nothing of it was saved; make a new one"
            return f"model {model_id} ended with it; its last save is {path_of(last)}: make a new model from there"

        rest = await self.context.read(question)
        return f"{how_it_ended}; {rest or 'ask for a new sampling session'}"

    async def waiting(self, scope: Scope, model_id: str) -> tuple[str, str | None]:
        """The queue state of a model that is not created yet, and what it waits for."""

        def question() -> tuple[str, str | None]:
            with self.context.database.read() as connection:
                job_id = records.get_run(connection, scope, model_id).job_id
            return self.trainer_jobs.waiting(scope, job_id)

        return await run_in_threadpool(question)

    async def _end_session(self, session_id: str) -> None:
        known = await self.sessions.end(session_id)
        await self.creations.abandon(session_id, known.account_id)
        self._notify_trainers(session_id, known)

    async def _end_last_finished(self) -> None:
        """Have the sessions released that were finished last: the server before this one may have died over it."""
        try:
            for session_id in await self.context.read(records.last_finished, Scope.everything()):
                await self._end_session(session_id)
        except StoreUnavailableError as error:
            _log.warning("trainers may have models of sessions that are over: %s", error.message)

    async def _on_created(self, run: TinkerRun) -> None:
        self.sessions.joined(run.session_id, run.trainer)
        if await self.sessions.is_finished(run.session_id):
            # It was finished meanwhile, and nobody else tells the trainer.
            await self.heartbeats.end(run.session_id)

    def _notify_trainers(self, session_id: str, known: KnownSession) -> None:
        for trainer in known.trainers:
            key = (session_id, trainer)
            if (earlier := self._notices.get(key)) is not None:
                earlier.cancel()  # the trainer may have got more of the session since that was sent
            task = self._notices[key] = asyncio.ensure_future(self._notify(*key, known.finish_reason))
            task.add_done_callback(functools.partial(self._notified, key))

    def _notified(self, key: tuple[str, Trainer], task: asyncio.Task[None]) -> None:
        if self._notices.get(key) is task:
            del self._notices[key]

    async def _notify(self, session_id: str, trainer: Trainer, reason: str) -> None:
        """Tell a trainer, until it answers or ends, that a session is over; it may have to save the models."""
        operation, document = f"sessions/{session_id}/finish", {"reason": {"type": reason}}
        wait_s = NOTIFY_AGAIN_S
        while True:
            try:
                await self.trainers.post(trainer, operation, document, door=TINKER, counts=False)
                return
            except TrainerGoneError:
                return
            except (BrokenOffError, StoreUnavailableError) as error:
                _log.info("a trainer does not know yet that session %s is over: %s", session_id, error)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, NOTIFY_AGAIN_AT_MOST_S)


def path_of(checkpoint: CheckpointRecord) -> str:
    model_id = str(checkpoint.attributes.get("model_id"))
    return str(WeightsPath(run=model_id, place=PLACE_OF_KIND[checkpoint.kind], name=checkpoint.name))


def door_of(request: Request) -> TinkerDoor:
    door: TinkerDoor = request.app.state.tinker
    return door

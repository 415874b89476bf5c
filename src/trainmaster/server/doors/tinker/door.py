"""The root Tinker door of one server: all that its routes share."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from dataclasses import dataclass
from http import HTTPStatus

from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from trainmaster.server.core.errors import NotFoundError, StoreUnavailableError
from trainmaster.server.core.job import Checkpoint
from trainmaster.server.doors.tinker import records
from trainmaster.server.http.proxy import BrokenOffError
from trainmaster.server.doors.tinker.model_creation import JSON_HEADERS, Creations
from trainmaster.server.doors.tinker.names import PLACE_OF_KIND, TinkerRun, Trainer, WeightsPath
from trainmaster.server.doors.tinker.sessions import KnownSession, Sessions, Use
from trainmaster.server.doors.tinker.trainer_jobs import TinkerTrainers
from trainmaster.server.doors.trainers import TrainerGoneError, Trainers
from trainmaster.server.http.auth import Gate
from trainmaster.server.http.context import ApiContext
from trainmaster.server.storage import URI
from trainmaster.server.store.scope import Scope

_log = logging.getLogger(__name__)

FAREWELL_AGAIN_S = 1.0
"""After which a trainer is told again that a session is over, when it did not hear; twice as long at every time."""
FAREWELL_AGAIN_AT_MOST_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Saved weights, and the run that saved them."""

    run: TinkerRun
    checkpoint: Checkpoint


class TinkerDoor:
    """What the routes stand on. Belongs to one event loop."""

    def __init__(self, context: ApiContext, gate: Gate) -> None:
        self.context = context
        self.supply = TinkerTrainers(
            context.database,
            context.commands,
            context.models,
            context.shapes,
            context.explainer,
            shape=context.tinker_shape,
            tempered_logprobs=context.tinker_tempered_logprobs,
            clock=context.clock,
        )
        self.trainers = Trainers(context)
        self.sessions = Sessions(context)
        self.creations = Creations(context, self.supply, self.trainers, self.sessions, self._made)
        self.use = Use(context, self._end_session)
        self._gate = gate
        self._farewells: dict[tuple[str, Trainer], asyncio.Task[None]] = {}
        self._looking_back: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Look after the sessions that are there, whether a client comes or not. Called in the event loop."""
        self.use.begin()
        self._looking_back = asyncio.ensure_future(self._look_back())

    def close(self) -> None:
        """Let go of everything; another server goes on with what is under way. Called in the event loop."""
        self.creations.close()
        self.use.close()
        if self._looking_back is not None:
            self._looking_back.cancel()
        for task in self._farewells.values():
            task.cancel()
        self.trainers.close()

    async def weights(self, scope: Scope, text: str, *, access_token: str | None = None) -> Weights:
        """The weights that a path means: the account's own, public ones, or those of whose key the token is.

        Raises:
            NotFoundError: there are none, or they are somebody else's.
        """
        path = WeightsPath.parse(text)
        lender = await self._gate.whose(access_token) if access_token else None

        def question(connection: Connection) -> Weights:
            if path is None:
                raise NotFoundError(f"{text!r} is no path of weights; it would be tinker://RUN/weights/NAME")
            everything = Scope.everything()
            run = records.get_run(connection, everything, path.run)
            lent = lender is not None and lender.scope.admits(run.account_id)
            for checkpoint in records.weights_of_run(connection, everything, run, path):
                if scope.admits(run.account_id) or lent or checkpoint.public:
                    return Weights(run=run, checkpoint=checkpoint)
            raise NotFoundError

        try:
            return await self.context.read(question)
        except NotFoundError as error:
            # The same whatever is missing: a stranger learns nothing of others' runs.
            raise NotFoundError(error.message if path is None else f"there are no weights {path}") from None

    def source(self, checkpoint: Checkpoint) -> str:
        """Where a checkpoint lies, for a trainer that is to read it."""
        if checkpoint.root == URI:
            return checkpoint.path
        return str(self.context.roots.path(checkpoint.root, checkpoint.path))

    async def epitaph(self, gone: TrainerGoneError, account_id: str, model_id: str) -> str:
        """What to tell whoever asks something of a model whose trainer has ended."""

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
        return f"{gone.message}; {rest or 'ask for a new sampling session'}"

    async def waiting(self, scope: Scope, model_id: str) -> tuple[str, str | None]:
        """What a model waits for that is being made: the state of its queue, and why."""

        def question() -> tuple[str, str | None]:
            with self.context.database.read() as connection:
                job_id = records.get_run(connection, scope, model_id).job_id
            return self.supply.waiting(scope, job_id)

        return await run_in_threadpool(question)

    async def _end_session(self, session_id: str) -> None:
        """Let go of what a session waits for, and tell trainers that it is over; one that has ended let go itself."""
        known = await self.sessions.end(session_id)
        await self.creations.give_up(session_id, known.account_id)
        self._say_farewells(session_id, known)

    async def _look_back(self) -> None:
        """Tell trainers of the sessions that were finished last: the server before this one may have died over it."""
        try:
            for session_id in await self.context.read(lambda c: records.last_finished(c, Scope.everything())):
                self._say_farewells(session_id, await self.sessions.end(session_id))
        except StoreUnavailableError as error:
            _log.warning("trainers may have models of sessions that are over: %s", error.message)

    def _say_farewells(self, session_id: str, known: KnownSession) -> None:
        for trainer in known.trainers:
            key = (session_id, trainer)
            if (earlier := self._farewells.get(key)) is not None:
                earlier.cancel()  # the trainer may have got something more of the session since that was sent
            task = self._farewells[key] = asyncio.ensure_future(self._farewell(*key, known.finish_reason))
            task.add_done_callback(functools.partial(self._said_farewell, key))

    async def _made(self, run: TinkerRun) -> None:
        """A model was made. Where its session was finished meanwhile, nobody else tells the trainer to let go of it."""
        self.sessions.joined(run.session_id, run.trainer)
        if await self.sessions.is_finished(run.session_id):
            await self.use.end(run.session_id)

    def _said_farewell(self, key: tuple[str, Trainer], task: asyncio.Task[None]) -> None:
        if self._farewells.get(key) is task:
            del self._farewells[key]

    async def _farewell(self, session_id: str, trainer: Trainer, reason: str) -> None:
        """Tell a trainer that a session is over, for as long as it lives and has not heard: nobody else will.

        It saves the models of one that was interrupted before it lets go of them.
        """
        body = json.dumps({"reason": {"type": reason}}).encode()
        target = f"/api/v1/sessions/{session_id}/finish".encode()
        wait_s = FAREWELL_AGAIN_S
        while True:
            try:
                answer = await self.trainers.ask(trainer, "POST", target, JSON_HEADERS, body, counts=False)
                await answer.body()
                if answer.status < 500 and answer.status != HTTPStatus.TOO_MANY_REQUESTS:
                    return
                why = f"it answered with {answer.status}"
            except TrainerGoneError:
                return
            except (BrokenOffError, StoreUnavailableError) as error:
                why = str(error)
            _log.info("a trainer was not told yet that session %s is over: %s", session_id, why)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, FAREWELL_AGAIN_AT_MOST_S)


def path_of(checkpoint: Checkpoint) -> str:
    """What clients call a checkpoint."""
    model_id = str(checkpoint.attributes.get("model_id"))
    return str(WeightsPath(run=model_id, place=PLACE_OF_KIND[checkpoint.kind], name=checkpoint.name))


def door_of(request: Request) -> TinkerDoor:
    """The door of the application that got the request."""
    door: TinkerDoor = request.app.state.tinker
    return door

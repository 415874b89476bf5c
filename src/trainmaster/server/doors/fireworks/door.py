"""Which trainer an address names, and what is said of one that is not there."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from http import HTTPStatus

from fastapi import Request
from sqlalchemy import Connection

from trainmaster.server.coordinator.base_models import promoted_path
from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.core.job import Checkpoint, Job
from trainmaster.server.core.workloads.trainer_service import HEALTH
from trainmaster.server.doors.fireworks.resources import trainer_job
from trainmaster.server.http.proxy import BrokenOffError
from trainmaster.server.doors.tinker.names import Trainer
from trainmaster.server.doors.trainers import FRESH_S, TrainerGoneError, Trainers
from trainmaster.server.http.context import ApiContext
from trainmaster.server.storage import ARTIFACTS, URI
from trainmaster.server.store import checkpoints, promoted
from trainmaster.server.store.checkpoints import MOST_SHOWN
from trainmaster.server.store.scope import Scope

DOOR = b"fireworks"
"""What trainers are told of where their clients came in."""
TRAINING = "training"
HEALTHY_WITHIN_S = 2.0
"""A trainer's front does nothing that takes long."""
MOST_SEEN = 65_536
LOOK_EVERY_S = 0.02
CROSS_JOB = "cross_job://"
_Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    at: float
    job: Job


class FireworksDoor:
    """Belongs to one event loop."""

    def __init__(self, context: ApiContext, trainers: Trainers) -> None:
        self.trainers = trainers
        self._context = context
        self._seen: dict[_Key, _Seen] = {}
        self._looks: dict[_Key, asyncio.Task[Job]] = {}

    async def job(self, scope: Scope, name: str, *, anew: bool = False) -> Job:
        """The trainer job of a name, as it was within the last second; those who ask at once share one look.

        A training loop asks for it hundreds of times a second, and a trainer's address changes only when it ends.

        Raises:
            JobNotFoundError: there is none.
        """
        key = (scope.account, name)
        seen = self._seen.get(key)
        if seen is not None and not anew and time.monotonic() - seen.at < FRESH_S:
            return seen.job
        look = self._looks.get(key)
        if look is None:
            look = self._looks[key] = asyncio.ensure_future(self._read(key))
            look.add_done_callback(lambda _: self._looks.pop(key, None))
        return await asyncio.shield(look)

    async def answers(self, job: Job) -> bool:
        """Whether the trainer of a job is there, and says that it is well."""
        trainer = trainer_of(job)
        if trainer is None:
            return False
        try:
            async with asyncio.timeout(HEALTHY_WITHIN_S):
                answer = await self.trainers.ask(
                    trainer, "GET", HEALTH.encode(), [(b"host", b"trainer")], door=DOOR, counts=False
                )
                await answer.body()
        except (TrainerGoneError, BrokenOffError, TimeoutError):
            return False
        return answer.status == HTTPStatus.OK

    async def source(self, scope: Scope, path: str, kind: str) -> str | None:
        """Where the weights lie that a path means in another job, or as a model; None for a name of the same job.

        Raises:
            NotFoundError: there are none.
        """

        def find(connection: Connection) -> str | None:
            if path.startswith(CROSS_JOB):
                job_name, _, name = path.removeprefix(CROSS_JOB).partition("/")
                if not job_name or not name:
                    raise NotFoundError(f"{path} is not {CROSS_JOB}JOB/NAME")
                job = trainer_job(connection, scope, job_name)
                try:
                    return self._place(checkpoints.by_name(connection, scope, job.job_id, kind, name))
                except NotFoundError:
                    raise NotFoundError(f"trainer {job_name} has no {kind} checkpoint {name!r}") from None
            match path.split("/"):
                case ["accounts", account_id, "models", model_id] if account_id == scope.account:
                    found = promoted.get(connection, scope, model_id)
                    artifacts = self._context.roots.path(ARTIFACTS, "")
                    return str(promoted_path(artifacts, account_id, found.model_id))
                case ["accounts", _, "models", _]:
                    raise NotFoundError(f"there is no model {path}")
                case _:
                    return None

        return await self._context.read(find)

    async def epitaph(self, job: Job, model_id: str = "") -> str:
        """What to tell whoever asks something of a trainer that has ended: how it ended, and what is left."""
        scope = Scope(job.account_id)
        saved = await self._context.read(
            lambda connection: checkpoints.newest_of_kind(connection, scope, job.job_id, TRAINING, most=MOST_SHOWN)
        )
        own = [each for each in saved if each.attributes.get("model_id") == model_id]
        said = f"the trainer {job.handle or job.job_id} {_how_it_ended(job)}, and its models are gone with it"
        if own:
            return f"{said}; the last save of {model_id} is '{own[0].name}': make a new model and load that"
        if saved:
            return f"{said}; the last save is '{saved[0].name}': make a new model and load that"
        return f"{said}; nothing was saved"

    async def registered(self, job: Job, kind: str, name: str, within_s: float) -> None:
        """Wait until what a trainer has saved is on record: its client may ask for it at once."""
        scope, until = Scope(job.account_id), time.monotonic() + within_s

        def find(connection: Connection) -> bool:
            try:
                checkpoints.by_name(connection, scope, job.job_id, kind, name)
            except NotFoundError:
                return False
            return True

        while time.monotonic() < until and not await self._context.read(find):
            await asyncio.sleep(LOOK_EVERY_S)

    def _place(self, checkpoint: Checkpoint) -> str:
        if checkpoint.root == URI:
            return checkpoint.path
        return str(self._context.roots.path(checkpoint.root, checkpoint.path))

    async def _read(self, key: _Key) -> Job:
        at = time.monotonic()
        job = await self._context.read(lambda connection: trainer_job(connection, Scope(key[0]), key[1]))
        if len(self._seen) >= MOST_SEEN:
            self._seen.clear()
        self._seen[key] = _Seen(at=at, job=job)
        return job


def trainer_of(job: Job) -> Trainer | None:
    """The attempt that answers now; None when none does."""
    return Trainer(job.job_id, job.attempt.number) if job.attempt is not None and job.endpoint is not None else None


def door_of(request: Request) -> FireworksDoor:
    """The door of the application that got the request."""
    door: FireworksDoor = request.app.state.fireworks
    return door


def _how_it_ended(job: Job) -> str:
    if job.deleted_at is not None:
        return "was deleted"
    if job.attempt is not None:
        return f"was started again (attempt {job.attempt.number})"
    why = ": ".join(part for part in (job.reason, job.message) if part)
    return f"is {job.status}" + (f" ({why})" if why else "")

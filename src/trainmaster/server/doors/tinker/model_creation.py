"""Models that are being created: each is followed from its row until a trainer has it, or never will.

The row has the request and its job, so a create_model's future means the same to every server, and after a restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from starlette.concurrency import run_in_threadpool

from trainmaster.protocol.trainer_requests import TINKER, ModelMode, Trainer
from trainmaster.server.core.job import Job
from trainmaster.server.doors.futures import Category
from trainmaster.server.doors.tinker import records
from trainmaster.server.doors.tinker.records import SESSION_OVER, RunState, TinkerRun
from trainmaster.server.doors.tinker.sessions import Sessions
from trainmaster.server.doors.tinker.trainer_jobs import (
    TinkerTrainers,
    TrainerCancelledError,
    TrainerFailedError,
    TrainerStatus,
)
from trainmaster.server.doors.trainers import TrainerGoneError, Trainers
from trainmaster.server.http.context import ApiContext
from trainmaster.server.http.proxy import BrokenOffError
from trainmaster.server.store.scope import Scope

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
_DEFAULT_RANK = 32
"""The public client's, for an adapter whose request names no rank."""
_CREATION = "create_model:"
"""What the id of a create_model's future begins with; the model's id follows."""


def creation_id(model_id: str) -> str:
    return f"{_CREATION}{model_id}"


def created_model(request_id: str) -> str | None:
    """The model whose create_model a future is; None of another future."""
    return request_id.removeprefix(_CREATION) if request_id.startswith(_CREATION) else None


def mode_of(request: Mapping[str, Any]) -> ModelMode:
    """What a create_model asks for: an adapter, or the weights themselves. A frozen model needs neither."""
    lora = request.get("lora_config")
    rank = lora.get("rank") if isinstance(lora, Mapping) else None
    return ModelMode.FULL if (lora is None or rank == 0) and not request.get("base_only") else ModelMode.LORA


class Creations:
    """Belongs to one event loop."""

    def __init__(
        self,
        context: ApiContext,
        trainer_jobs: TinkerTrainers,
        trainers: Trainers,
        sessions: Sessions,
        on_created: Callable[[TinkerRun], Awaitable[None]],
    ) -> None:
        self._context = context
        self._trainer_jobs = trainer_jobs
        self._trainers = trainers
        self._sessions = sessions
        self._on_created = on_created
        self._tasks: dict[str, asyncio.Task[TinkerRun]] = {}
        self._looks: dict[tuple[str, str, ModelMode, str | None], asyncio.Task[TrainerStatus]] = {}

    def start(self, run: TinkerRun, *, created_by: str) -> asyncio.Task[TinkerRun]:
        """Follow a model until it is created or has failed; there is one task for each model."""
        if (task := self._tasks.get(run.model_id)) is None:
            task = self._tasks[run.model_id] = asyncio.ensure_future(self._create(run, created_by))
            task.add_done_callback(lambda _: self._tasks.pop(run.model_id, None))
        return task

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def outcome(self, run: TinkerRun, *, created_by: str, hold_s: float) -> TinkerRun | None:
        """The run when its model was created or has failed; None when that takes longer than `hold_s`."""
        if run.state is not RunState.PENDING:
            return run
        task = self.start(run, created_by=created_by)
        done, _ = await asyncio.wait({task}, timeout=hold_s)
        return task.result() if done and not task.cancelled() else None

    async def abandon(self, session_id: str, account_id: str) -> None:
        """Give up the pending models of a session that has ended, and cancel trainers that wait for these alone."""
        scope = Scope(account_id)
        for job_id in await self._context.write(records.abandon_pending, scope, session_id):
            _log.info("session %s has ended, and no longer waits for job %s", session_id, job_id)
            await run_in_threadpool(self._trainer_jobs.cancel_unwanted, scope, job_id)

    async def _create(self, run: TinkerRun, created_by: str) -> TinkerRun:
        while True:
            if await self._sessions.seems_finished(run.session_id):
                # Again: whoever ended the session may not have seen what was started at the same moment.
                await self.abandon(run.session_id, run.account_id)
                return _failed(run, SESSION_OVER, Category.USER)
            try:
                status = await self._ensure_trainer(run, created_by)
            except TrainerCancelledError:
                if not await self._sessions.is_finished(run.session_id):
                    run = replace(run, job_id=None)  # whoever cancelled it did not know of this model
                await asyncio.sleep(LOOK_EVERY_S)
                continue
            except TrainerFailedError as error:
                return await self._record(_failed(run, error.message, error.category))
            if (job := status.job) is not None and status.started and run.job_id is None:
                run = await self._record(replace(run, job_id=job.job_id))
            if job is not None and status.ready:
                try:
                    made = await self._record(await self._ask(Trainer(job.job_id, job.live.number), job, run))
                    await self._on_created(made)
                    return made
                except (TrainerGoneError, BrokenOffError) as error:
                    _log.info("model %s waits again: %s", run.model_id, error)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _ensure_trainer(self, run: TinkerRun, created_by: str) -> TrainerStatus:
        """All models that wait for the same trainer share a look at it."""
        key = (run.account_id, run.base_model, run.mode, run.job_id)
        if (look := self._looks.get(key)) is None:
            look = self._looks[key] = asyncio.ensure_future(
                run_in_threadpool(
                    self._trainer_jobs.ensure,
                    Scope(run.account_id),
                    run.base_model,
                    run.mode,
                    created_by=created_by,
                    started_job=run.job_id,
                )
            )
            # What was seen of a started job holds until the next look, however many wait for it.
            loop, stays_s = asyncio.get_running_loop(), LOOK_EVERY_S if run.job_id is not None else 0.0
            look.add_done_callback(lambda _: loop.call_later(stays_s, self._looks.pop, key, None))
        return await asyncio.shield(look)

    async def _ask(self, trainer: Trainer, job: Job, run: TinkerRun) -> TinkerRun:
        ack = await self._trainers.post(trainer, "create_model", _request(run, job), door=TINKER)
        if "request_id" not in ack:
            return _failed(run, _message(ack), Category.SERVER)
        abandoned = False
        while True:
            asked = {"request_id": ack["request_id"]}
            result = await self._trainers.post(trainer, "retrieve_future", asked, door=TINKER)
            if result.get("type") == "try_again":
                if not abandoned and await self._sessions.seems_finished(run.session_id):
                    # The future fails at once; the model is still waited for, and let go when it is made.
                    await self.abandon(run.session_id, run.account_id)
                    abandoned = True
                await asyncio.sleep(LOOK_EVERY_S)  # in case the trainer does not hold the request
                continue
            if "error" in result:
                return _failed(run, _message(result), str(result.get("category", Category.SERVER)))
            return replace(run, state=RunState.CREATED, job_id=trainer.job_id, attempt=trainer.attempt)

    async def _record(self, run: TinkerRun) -> TinkerRun:
        await self._context.write(records.settle_run, Scope(run.account_id), run)
        return run


def _failed(run: TinkerRun, message: str, category: str) -> TinkerRun:
    return replace(run, state=RunState.FAILED, error=message, category=category)


def _request(run: TinkerRun, job: Job) -> dict[str, Any]:
    document = dict(run.request)
    lora = document.get("lora_config")
    if isinstance(lora, dict) and lora.get("rank") is None:
        document["lora_config"] = {**lora, "rank": _DEFAULT_RANK}
    return with_known_name(document, job)


def with_known_name(document: dict[str, Any], job: Job) -> dict[str, Any]:
    """A request that calls its base model as the trainer does: the client may use a name that was added since."""
    workload = job.spec.get("workload") or {}
    known = {None, workload.get("base_model"), *(workload.get("aliases") or ())}
    return document if document.get("base_model") in known else {**document, "base_model": workload["base_model"]}


def _message(answer: dict[str, Any]) -> str:
    said = answer.get("error") or answer.get("detail") or "the trainer refused to create the model"
    return str(said.get("message", said)) if isinstance(said, dict) else str(said)

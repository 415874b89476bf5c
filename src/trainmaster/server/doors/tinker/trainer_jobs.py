"""Which job serves the models of plain Tinker clients, and starting it. Every operation may be repeated.

There is one ordinary job for each account, base model and mode, whose handle follows from the model. It is submitted
for the first model, used as long as it runs, and resumed when it was parked for want of use or has ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection

from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.trainer_requests import ModelMode
from trainmaster.server.coordinator.base_models import BaseModel
from trainmaster.server.core import commands as decide
from trainmaster.server.core.errors import (
    HandleTakenError,
    InvalidTransitionError,
    JobNotFoundError,
    RefusedError,
    TrainmasterError,
    choice_message,
)
from trainmaster.server.core.job import Change, Job
from trainmaster.server.core.shapes import ChosenShape, Reference
from trainmaster.server.core.spec.submit import SubmitJobRequest
from trainmaster.server.core.states import ACTIVE, TERMINAL, WAITING, Desired, JobStatus
from trainmaster.server.core.trainer_request import WantedTrainer, choose_shape, on_shape
from trainmaster.server.core.workloads.trainer_service import KIND, MAX_LORA_RANK
from trainmaster.server.doors.futures import Category
from trainmaster.server.doors.tinker import records
from trainmaster.server.doors.trainers import status_of
from trainmaster.server.http.context import ApiContext
from trainmaster.server.store import jobs, nodes
from trainmaster.server.store.scope import Scope

MANAGED_BY = "tinker-door"
ACTIVE_QUEUE = "active"
PAUSED_CAPACITY = "paused_capacity"
"""Clients' names for the state of a queue that moves, and of one that waits for machines."""
UNWANTED = "every session that it was started for has ended before it began"
TEMPERED = "--tempered-logprobs"
_HANDLE_LENGTH = 63


class TrainerFailedError(TrainmasterError):
    """There is no trainer for this model, and waiting will not bring one."""

    code = "TRAINER_FAILED"

    def __init__(self, message: str, category: Category = Category.SERVER) -> None:
        super().__init__(message)
        self.category = category


class TrainerCancelledError(TrainerFailedError):
    """The trainer was cancelled while it waited, as nobody was known to want it; a client that does may ask again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatus:
    job: Job | None
    ready: bool = False
    started: bool = False
    """It runs, waits or starts: if it ends from now on, the request has failed."""


class TinkerTrainers:
    """Finds and starts trainers. The methods block on the database: call them in a thread."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._database = context.database
        self._commands = context.commands

    def model(self, name: str, account_id: str) -> BaseModel:
        """Raises TrainerFailedError, which names the base models that there are, where there is no such model."""
        if (found := self._context.models.find(name, account_id)) is None:
            known = self._context.models.names
            message = choice_message("base model", name, known) if known else f"this server has no base model {name!r}"
            raise TrainerFailedError(message, Category.USER)
        return found

    def context_length(self, scope: Scope, base_model: str) -> int | None:
        """The context length of the account's trainer, existing or not; None where no trainer can be started."""
        try:
            model = self.model(base_model, scope.account)
            longest = model.require()
            job = self._find(scope, handle_of(model, ModelMode.LORA))
            if job is not None and job.workload_kind == KIND:
                return int(job.spec["workload"].get("max_context_length") or longest)
            chosen = self._chosen(scope.account, self._wanted(model, ModelMode.LORA), ModelMode.LORA)
            return min(longest, chosen.version.max_context_length)
        except TrainmasterError:
            return None

    def ensure(
        self, scope: Scope, base_model: str, mode: ModelMode, *, created_by: str, started_job: str | None = None
    ) -> TrainerStatus:
        """Ensure that a trainer runs. `started_job` was started for the same request: it is not started again."""
        model = self.model(base_model, scope.account)
        if started_job is not None:
            if (job := self._find(scope, started_job)) is None:
                raise TrainerFailedError(f"its trainer, job {started_job}, was deleted")
            return self._status(job)
        if (job := self._find(scope, handle_of(model, mode))) is None:
            return self._submit(scope, model, mode, created_by)
        if job.workload_kind != KIND:
            raise TrainerFailedError(
                f"job {job.job_id} has the handle {job.handle} and is no trainer: delete it, or give it another handle",
                Category.USER,
            )
        # A job that was paused by hand is resumed by hand.
        if job.status in TERMINAL or (job.status is JobStatus.PAUSED and job.reason is Reason.INACTIVE):
            return self._resume(scope, job)
        return self._status(job, stopping_is_news=False)

    def cancel_unwanted(self, scope: Scope, job_id: str) -> None:
        """Cancel a job that waits in the queue, and that no model waits for; whoever asks next has it queued again.

        One that has started may serve the next client, or is parked.
        """

        def decision(connection: Connection, job: Job) -> Change | None:
            if job.workload_kind != KIND or job.status not in WAITING:
                return None
            if records.is_waited_for(connection, job.account_id, job.job_id):
                return None
            return decide.cancel(job, now=self._context.clock(), message=UNWANTED)

        with contextlib.suppress(JobNotFoundError):
            self._commands.change(scope, job_id, decision).result()

    def waiting(self, scope: Scope, job_id: str | None) -> tuple[str, str | None]:
        if job_id is None:
            return PAUSED_CAPACITY, "its trainer is about to be started"
        with self._database.read() as connection:
            try:
                job = jobs.get(connection, scope, job_id)
            except JobNotFoundError:
                return PAUSED_CAPACITY, f"its trainer, job {job_id}, was deleted"
        if job.endpoint is not None:
            return ACTIVE_QUEUE, None
        status = f"its trainer, job {job.job_id}, is {job.status}"
        why = self._context.explainer.explain(scope, job, now=self._context.clock()).explanation
        return PAUSED_CAPACITY, f"{status}: {why.message}" if why else status

    def _status(self, job: Job, *, stopping_is_news: bool = True) -> TrainerStatus:
        if job.status in ACTIVE and job.desired is not Desired.RUN:
            # It can be resumed when it has stopped.
            return TrainerStatus(job=job, started=stopping_is_news)
        if job.status in ACTIVE | WAITING:
            return TrainerStatus(job=job, ready=job.endpoint is not None, started=True)
        if job.status is JobStatus.CANCELLED and job.message == UNWANTED:
            raise TrainerCancelledError(_ended(job))
        raise TrainerFailedError(_ended(job))

    def _submit(self, scope: Scope, model: BaseModel, mode: ModelMode, created_by: str) -> TrainerStatus:
        try:
            request = self._request(scope.account, model, mode)
            return self._status(self._commands.submit(scope, request, created_by=created_by).result().job)
        except HandleTakenError:
            return TrainerStatus(job=None)  # somebody was faster; look again
        except TrainerFailedError:
            raise
        except TrainmasterError as error:
            whose = Category.USER if isinstance(error, RefusedError) else Category.SERVER
            raise TrainerFailedError(f"its trainer cannot be made: {error.message}", whose) from None

    def _resume(self, scope: Scope, job: Job) -> TrainerStatus:
        try:
            return self._status(self._commands.resume(scope, job.job_id).result().job)
        except (InvalidTransitionError, JobNotFoundError):
            return TrainerStatus(job=None)  # somebody was faster; look again
        except TrainerFailedError:
            raise
        except TrainmasterError as error:
            raise TrainerFailedError(f"its trainer, job {job.job_id}, cannot be resumed: {error.message}") from None

    def _request(self, account_id: str, model: BaseModel, mode: ModelMode) -> SubmitJobRequest:
        wanted = self._wanted(model, mode)
        chosen = self._chosen(account_id, wanted, mode)
        return on_shape(wanted, chosen, account_id=account_id, chosen_by_us=not self._context.settings.tinker_shape)

    def _wanted(self, model: BaseModel, mode: ModelMode) -> WantedTrainer:
        return WantedTrainer(
            job_id=handle_of(model, mode),
            base_model=model.name,
            lora_rank=MAX_LORA_RANK if mode is ModelMode.LORA else 0,
            forward_only=mode is ModelMode.FORWARD_ONLY,
            display_name=f"Tinker trainer of {model.name}"[:63],
            managed_by=MANAGED_BY,
            extra_args=(TEMPERED,) if self._context.settings.tinker_tempered_logprobs else (),
        )

    def _chosen(self, account_id: str, wanted: WantedTrainer, mode: ModelMode) -> ChosenShape:
        if shape := self._context.settings.tinker_shape:
            return self._context.shapes.named(Reference(account_id=account_id, shape=shape, version=None))
        with self._database.read() as connection:
            gpus = any(node.gpus for node in nodes.all(connection, Scope.everything()))
        if (chosen := choose_shape(wanted, self._context.shapes, gpus=gpus)) is None:
            what = f"{wanted.base_model} in mode {mode} on {'a GPU' if gpus else 'the CPU'}"
            raise TrainerFailedError(f"no training shape of this server is for {what}")
        return chosen

    def _find(self, scope: Scope, job_id: str) -> Job | None:
        with self._database.read() as connection:
            try:
                return jobs.get(connection, scope, job_id)
            except JobNotFoundError:
                return None


def handle_of(model: BaseModel, mode: ModelMode) -> str:
    """The handle of the job that serves a model: made of the model's directory, which all of its names share."""
    tail = f"{mode.replace('_', '-')}-{hashlib.sha256(os.fsencode(model.path)).hexdigest()[:8]}"
    plain = re.sub(r"[^a-z0-9]+", "-", _directory_name(Path(model.path)).lower()).strip("-")
    room = _HANDLE_LENGTH - len("tinker--") - len(tail)
    return f"tinker-{plain[-room:].strip('-')}-{tail}" if plain else f"tinker-{tail}"


def _directory_name(path: Path) -> str:
    """The name of a directory; of a snapshot in the Hub's cache, the model's name there."""
    cached = path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--")
    return path.parent.parent.name.removeprefix("models--") if cached else path.name


def _ended(job: Job) -> str:
    if job.status is JobStatus.PAUSED and job.reason is not Reason.INACTIVE:
        return f"its trainer, job {job.job_id}, is paused; resume it with `trainmaster resume {job.job_id}`"
    return f"its trainer, job {job.job_id}, is {status_of(job)}"

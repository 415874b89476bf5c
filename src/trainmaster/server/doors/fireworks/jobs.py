"""Trainer jobs: make, show, list, delete, resume, cancel. `rlorTrainerJobs` in the words of the clients."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import Query, Request, Response
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from trainmaster.server.core.errors import (
    HandleTakenError,
    InvalidTransitionError,
    JobNotFoundError,
    NotFoundError,
    Problem,
    RefusedError,
    SpecError,
)
from trainmaster.server.core.job import Job
from trainmaster.server.core.shapes import ANYBODYS, ChosenShape, Reference
from trainmaster.server.core.spec.documents import parse
from trainmaster.server.core.spec.submit import SubmitJobRequest
from trainmaster.server.core.states import ACTIVE, WAITING, Desired, JobStatus
from trainmaster.server.core.trainer_request import WantedTrainer, by_hand, choose_shape, on_shape
from trainmaster.server.core.workloads.trainer_service import KIND
from trainmaster.server.doors.fireworks import job_documents
from trainmaster.server.doors.fireworks.resources import (
    Listed,
    ManagedScope,
    ReadMask,
    ResourcePath,
    ViewedScope,
    listing,
    masked,
    own,
    read_filter,
    read_order,
    router,
    trainer_job,
)
from trainmaster.server.doors.fireworks.trainers import door_of
from trainmaster.server.doors.futures import ok
from trainmaster.server.http.auth import Manager
from trainmaster.server.http.context import ApiContext, Context
from trainmaster.server.http.errors import ServiceNotReadyError
from trainmaster.server.http.requests import parse_json, read_body
from trainmaster.server.http.router import PlainText
from trainmaster.server.store import jobs, nodes
from trainmaster.server.store.job_list import MAX_PAGE_SIZE, JobQuery, page
from trainmaster.server.store.scope import Scope

RETRY_AFTER_S = 2
DELETED_WITHIN_S = 20.0
"""A trainer gets ten seconds to end by itself; clients wait thirty for an answer."""
KNOWN_WITHIN_S = 3.0
"""The end of a trainer is on record within a second, where all is well."""
LOOK_EVERY_S = 0.05
ORDERS: Mapping[str, str] = {
    "name": "handle",
    "displayName": "name",
    "createTime": "created_at",
    "updateTime": "updated_at",
}
"""The members that a list can be ordered by, and what the store calls them."""
_THEIR_WORDS = {
    "handle": "rlorTrainerJobId",
    "name": "displayName",
    "scheduling_config.queue": "reservationTarget",
    "workload.extra_args": "trainingConfig.extraArgs",
    "workload.base_model": "trainingConfig.baseModel",
    "workload.max_context_length": "trainingConfig.maxContextLength",
    "page_token": "pageToken",
}
"""Fields of a job and of a list, by what the clients call them."""


@router.post("/rlorTrainerJobs")
async def create(
    request: Request,
    principal: Manager,
    scope: ManagedScope,
    context: Context,
    job_id: Annotated[PlainText, Query(alias="rlorTrainerJobId")] = "",
    training_shape: Annotated[PlainText, Query(alias="trainingShape")] = "",
    skip_validations: Annotated[bool, Query(alias="skipValidations")] = False,
    deployment_id: Annotated[PlainText, Query(alias="deploymentId")] = "",
) -> Response:
    """An id that was ever used is refused with 409: its checkpoints are still there."""
    body = parse(job_documents.CreateJobBody, parse_json(await read_body(request)))
    if not body.service_mode:
        raise RefusedError("serviceMode: only trainers in service mode are made here; set it to true")
    if deployment_id:
        raise RefusedError(f"deploymentId: {job_documents.NO_DEPLOYMENTS}")
    wanted = body.wanted(job_id or f"rlor-{secrets.token_hex(6)}")

    def prepare(connection: Connection) -> SubmitJobRequest:
        _require_new(connection, scope, wanted.job_id)
        if training_shape:
            reference = Reference.read(training_shape)
            own(principal, reference.account_id, ANYBODYS)
            chosen = context.shapes.named(reference)
            if not chosen.version.validated and not skip_validations:
                message = f"version {chosen.version.version} is not validated; launch it with skip_validations"
                raise RefusedError.because([Problem(field="trainingShape", message=message)])
            return on_shape(wanted, chosen, account_id=scope.account)
        if skip_validations:
            return by_hand(wanted)
        return on_shape(wanted, _choose(connection, context, wanted), account_id=scope.account, chosen_by_us=True)

    try:
        submission = await context.commands.admission.look_up(await context.read(prepare), scope.account)
        outcome = await asyncio.wrap_future(context.commands.submit(scope, submission, created_by=principal.name))
    except SpecError as error:
        raise SpecError(_in_their_words(error.problems)) from None
    except RefusedError as error:
        if not error.problems:
            raise
        raise RefusedError.because(_in_their_words(error.problems)) from None
    return ok(job_documents.job_document(outcome.job))


@router.get("/rlorTrainerJobs")
async def list_jobs(
    scope: ViewedScope, context: Context, query: Listed, order_by: Annotated[PlainText, Query(alias="orderBy")] = ""
) -> Response:
    """Trainers that nobody used for a while are shown as IDLE."""
    conditions = read_filter(query.filter, job_documents.MEMBERS)
    order = read_order(order_by, ORDERS, "name")
    now = context.clock()

    def find(connection: Connection) -> tuple[list[dict[str, Any]], str | None]:
        used = jobs.last_uses(connection, scope)
        found: list[dict[str, Any]] = []
        following: str | None = query.token or None
        while True:
            wanted = JobQuery(kinds=(KIND,), order_by=order, page_size=MAX_PAGE_SIZE, page_token=following)
            part = page(connection, scope, wanted)
            for job in part.jobs:
                last_use = max(used.get(job.job_id) or 0.0, job.last_activity_at or 0.0)
                document = job_documents.job_document(job, idle=now - last_use > job_documents.IDLE_AFTER_S)
                if all(condition.holds(document) for condition in conditions):
                    if len(found) == query.size:
                        return found, following
                    found.append(document)
                following = wanted.token_after(job)
            if (following := part.next_page_token) is None:
                return found, None

    try:
        entries, following = await context.read(find)
    except SpecError as error:
        raise SpecError(_in_their_words(error.problems)) from None
    return listing("rlorTrainerJobs", [masked(each, query.read_mask) for each in entries], following)


@router.get("/rlorTrainerJobs/{job_id}")
async def show(
    request: Request, scope: ViewedScope, context: Context, job_id: ResourcePath, read_mask: ReadMask = ""
) -> Response:
    """Show a trainer. One that was deleted is shown as such: its checkpoints are still there.

    One that has died a moment ago is on record as running. Clients believe that, and fail when they learn more: so it
    is asked, and what became of it waited for.
    """

    def find() -> tuple[Job, str | None]:
        with context.database.read() as connection:
            job = trainer_job(connection, scope, job_id)
        explained = context.explainer.explain(scope, job, now=context.clock()).explanation
        return job, explained.message if explained is not None else None

    until = time.monotonic() + KNOWN_WITHIN_S
    while True:
        job, reason = await run_in_threadpool(find)
        answers = job_documents.state_of(job) != job_documents.RUNS or await door_of(request).answers(job)
        if answers or time.monotonic() > until:
            return ok(masked(job_documents.job_document(job, waits_for=reason, answers=answers), read_mask))
        await asyncio.sleep(LOOK_EVERY_S)


@router.delete("/rlorTrainerJobs/{job_id}")
async def delete(scope: ManagedScope, context: Context, job_id: ResourcePath) -> Response:
    """Delete a trainer; one that runs is stopped first. Its id is not given out again, and its checkpoints stay.

    The answer comes when it is gone, or when that takes long: clients that ask next find no half-dead one.
    """
    until = time.monotonic() + DELETED_WITHIN_S
    while True:
        job = await context.read(trainer_job, scope, job_id)
        if job.deleted_at is not None or time.monotonic() > until:
            return ok({})
        if job.desired is not Desired.DELETE:
            await asyncio.wrap_future(context.commands.delete(scope, job.job_id))
        else:
            await asyncio.sleep(LOOK_EVERY_S)


@router.post("/rlorTrainerJobs/{job_id}:resume")
async def resume(scope: ManagedScope, context: Context, job_id: ResourcePath) -> Response:
    """One that waits or runs stays as it is."""
    while True:
        job = await context.read(trainer_job, scope, job_id)
        _require_not_deleted(job)
        if job.status in WAITING | ACTIVE:
            if job.desired is not Desired.RUN or (job.attempt is not None and job.attempt.stop is not None):
                raise ServiceNotReadyError("the trainer is being stopped; try again soon", retry_after_s=RETRY_AFTER_S)
            return ok(job_documents.job_document(job))
        try:
            outcome = await asyncio.wrap_future(context.commands.resume(scope, job.job_id))
        except InvalidTransitionError:
            continue  # somebody else was quicker
        return ok(job_documents.job_document(outcome.job))


@router.post("/rlorTrainerJobs/{job_id}:cancel")
async def cancel(scope: ManagedScope, context: Context, job_id: ResourcePath) -> Response:
    """Without saving; it can be resumed."""
    job = await context.read(trainer_job, scope, job_id)
    _require_not_deleted(job)
    if job.status is not JobStatus.CANCELLED:
        await asyncio.wrap_future(context.commands.cancel(scope, job.job_id))
    return ok({})


@router.post("/rlorTrainerJobs/{job_id}:executeTrainStep")
async def execute(scope: ManagedScope, job_id: ResourcePath) -> Response:  # noqa: ARG001
    """The steps of a trainer in service mode are its client's."""
    raise RefusedError(f"{job_id} is in service mode: train it with FiretitanServiceClient, step by step")


def _require_new(connection: Connection, scope: Scope, handle: str) -> None:
    try:
        job = jobs.by_handle(connection, scope, handle)
    except JobNotFoundError:
        return
    said = "was deleted, and keeps its id for its checkpoints" if job.deleted_at is not None else "is there already"
    raise HandleTakenError(f"trainer {handle} {said}")


def _require_not_deleted(job: Job) -> None:
    if job.deleted_at is not None:
        raise NotFoundError(f"trainer {job.handle or job.job_id} was deleted; make a new one")


def _choose(connection: Connection, context: ApiContext, wanted: WantedTrainer) -> ChosenShape:
    has_gpus = any(node.gpus for node in nodes.all(connection, Scope.everything()))
    if (chosen := choose_shape(wanted, context.shapes, gpus=has_gpus)) is None:
        raise RefusedError(
            f"no training shape of this server {'with' if has_gpus else 'without'} GPUs is for such a trainer: look at "
            "trainingShapes, and name one; or say yourself where it runs, with skip_validations"
        )
    return chosen


def _in_their_words(problems: Sequence[Problem]) -> list[Problem]:
    def renamed(field: str) -> str:
        for ours, theirs in _THEIR_WORDS.items():
            if field == ours or field.startswith(f"{ours}["):
                return theirs + field.removeprefix(ours)
        return field

    return [Problem(field=renamed(problem.field), message=problem.message) for problem in problems]

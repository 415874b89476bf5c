"""Requests to a trainer at its Fireworks address: passed on, or answered in place of a trainer that is not there.

Clients retry at once and for ever where a server does not answer. So a client that asks about the work of a trainer
that has ended gets an error through the future of the work, which says what to start from.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from http import HTTPStatus
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from sqlalchemy import Connection

from trainmaster.protocol.trainer_requests import (
    FIREWORKS,
    REFUSAL_HEADER,
    SOURCE_HEADER,
    Trainer,
    owner_of_future,
    trainer_of_future,
)
from trainmaster.server.coordinator.base_models import promoted_path
from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.errors import NotFoundError, RefusedError, SpecError
from trainmaster.server.core.job import Job
from trainmaster.server.core.states import ACTIVE, WAITING, Desired
from trainmaster.server.core.workloads.trainer_service import HEALTH
from trainmaster.server.doors import futures
from trainmaster.server.doors.bodies import IncomingBody, text_field
from trainmaster.server.doors.door import DoorState
from trainmaster.server.doors.fireworks.resources import own, trainer_job, words
from trainmaster.server.doors.trainers import FRESH_S, Lookups, TrainerGoneError, Trainers, how_it_ended, location_of
from trainmaster.server.http.auth import Gate, guard, require
from trainmaster.server.http.context import ApiContext
from trainmaster.server.http.errors import BadGatewayError, ServiceNotReadyError, SessionEndedError, TooLargeError
from trainmaster.server.http.gateway import RETRY_AFTER_S, SAFE_METHODS
from trainmaster.server.http.proxy import BrokenOffError
from trainmaster.server.http.requests import read_body
from trainmaster.server.http.router import Handler
from trainmaster.server.storage import ARTIFACTS
from trainmaster.server.store import checkpoints, promoted
from trainmaster.server.store.checkpoints import MOST_SHOWN
from trainmaster.server.store.scope import Scope

PREFIX = "/training/v1/rlorTrainerJobs"
_ADDRESS = re.compile(PREFIX.encode() + rb"/[^/]+/[^/]+(?P<rest>/.*)", re.DOTALL)
CROSS_JOB = "cross_job://"
TRAINING = "training"
LOADS = {"load_weights": ("path", TRAINING), "load_adapter": ("adapter_path", "sampler")}
"""Operations that name saved weights: in which member, and of which kind."""
SAVES = {"SaveWeights": TRAINING, "SaveWeightsForSampler": "sampler"}
"""Clients' names for requests whose results name what they saved, and the kind of that."""
WORK = words("""
    forward_backward forward optim_step save_weights save_weights_for_sampler load_weights load_adapter unload_model
    weight_sync
""")
"""Operations on a model, whose outcome is reported through a future."""
HEALTHZ = "healthz"
HEARTBEAT = "session_heartbeat"
FUTURE = "retrieve_future"
HEALTHY_WITHIN_S = 2.0
"""A trainer's front does nothing that takes long."""
_MAX_REFUSAL = 1000


class FireworksDoor(DoorState):
    def __init__(self, context: ApiContext, gate: Gate, trainers: Trainers) -> None:  # noqa: ARG002 - as of every door
        self.trainers = trainers
        self._context = context
        self._jobs = Lookups(self._read, FRESH_S)

    async def job(self, scope: Scope, name: str) -> Job:
        """The trainer job of a name, as of the last second: a training loop asks for it hundreds of times a second."""
        return await self._jobs.get((scope.account, name))

    async def current(self, job: Job) -> Job:
        key = (job.account_id, job.handle or job.job_id)
        self._jobs.forget(key)
        return await self._jobs.get(key)

    async def answers(self, job: Job) -> bool:
        if (trainer := trainer_of(job)) is None:
            return False
        try:
            async with asyncio.timeout(HEALTHY_WITHIN_S):
                response = await self.trainers.ask(trainer, "GET", HEALTH.encode(), [], door=FIREWORKS, counts=False)
                await response.body()
        except (TrainerGoneError, BrokenOffError, TimeoutError):
            return False
        return response.status == HTTPStatus.OK

    async def source(self, scope: Scope, path: str, kind: str) -> str | None:
        """Where the weights lie that a path names in another job, or as a model; None for a name of the same job."""

        def find(connection: Connection) -> str | None:
            if path.startswith(CROSS_JOB):
                job_name, _, name = path.removeprefix(CROSS_JOB).partition("/")
                if not job_name or not name:
                    raise NotFoundError(f"{path} is not {CROSS_JOB}JOB/NAME")
                job = trainer_job(connection, scope, job_name)
                try:
                    return location_of(self._context, checkpoints.by_name(connection, scope, job.job_id, kind, name))
                except NotFoundError:
                    raise NotFoundError(f"trainer {job_name} has no {kind} checkpoint {name!r}") from None
            match path.split("/"):
                case ["accounts", account_id, "models", model_id] if account_id == scope.account:
                    found = promoted.get(connection, scope, model_id)
                    return str(promoted_path(self._context.roots.path(ARTIFACTS, ""), account_id, found.model_id))
                case ["accounts", _, "models", _]:
                    raise NotFoundError(f"there is no model {path}")
                case _:
                    return None

        return await self._context.read(find)

    async def explain_loss(self, job: Job, model_id: str = "") -> str:
        scope = Scope(job.account_id)
        saved = await self._context.read(checkpoints.newest_of_kind, scope, job.job_id, TRAINING, most=MOST_SHOWN)
        own_saves = [each for each in saved if each.attributes.get("model_id") == model_id]
        said = f"{how_it_ended(job.handle or job.job_id, job)}, and its models are gone with it"
        if own_saves:
            return f"{said}; the last save of {model_id} is '{own_saves[0].name}': make a new model and load that"
        if saved:
            return f"{said}; the last save is '{saved[0].name}': make a new model and load that"
        return f"{said}; nothing was saved"

    async def wait_until_registered(self, job: Job, kind: str, name: str) -> None:
        def find(connection: Connection) -> bool:
            try:
                checkpoints.by_name(connection, Scope(job.account_id), job.job_id, kind, name)
            except NotFoundError:
                return False
            return True

        await futures.wait_until(lambda: self._context.read(find))

    async def _read(self, key: tuple[str, str]) -> Job:
        account_id, name = key
        return await self._context.read(trainer_job, Scope(account_id), name)


def trainer_of(job: Job) -> Trainer | None:
    """The attempt that answers now; None when none does."""
    return Trainer(job.job_id, job.attempt.number) if job.attempt is not None and job.endpoint is not None else None


def door_of(request: Request) -> FireworksDoor:
    door: FireworksDoor = request.app.state.fireworks
    return door


class _BareRoute(APIRoute):
    """A route whose endpoint takes the request and nothing else: it is called at every step of a training loop."""

    def get_route_handler(self) -> Handler:
        endpoint: Handler = self.endpoint
        return endpoint


router = APIRouter(route_class=_BareRoute, include_in_schema=False, tags=["fireworks"])


@router.api_route(PREFIX + "/{account_id}/{job_id}/api/v1/{operation:path}", methods=["GET", "POST", "PUT", "DELETE"])
@guard
async def serve(request: Request) -> Response:
    operation = str(request.path_params["operation"])
    reads = request.method in SAFE_METHODS or operation == FUTURE
    principal = require(request, KeyScope.VIEW if reads else KeyScope.MANAGE)
    door = door_of(request)
    try:
        async with IncomingBody(request, principal.account_id) as body:
            scope = own(principal, str(request.path_params["account_id"]))
            job = await door.job(scope, str(request.path_params["job_id"]))
            if operation != FUTURE:
                return await _pass_on(request, door, job, operation, scope, body)
        return await _future(request, door, job)
    except BrokenOffError as error:
        raise BadGatewayError(str(error)) from None


async def _pass_on(
    request: Request, door: FireworksDoor, job: Job, operation: str, scope: Scope, body: IncomingBody
) -> Response:
    if (trainer := trainer_of(job)) is None:
        return await _absent(door, job, operation, body)
    content: bytes | AsyncIterator[bytes]
    extra: dict[str, str] = {}
    if operation in LOADS:
        content = await body.whole()
        extra = await _source(door, scope, content, *LOADS[operation])
    else:
        content = await body.content()
    try:
        return await door.trainers.pass_on(
            request,
            trainer,
            content,
            door=FIREWORKS,
            extra=extra,
            grammar=_ADDRESS,
            counts=operation != HEALTHZ,
            urgent=operation == HEARTBEAT,
        )
    except TrainerGoneError:
        return await _absent(door, await door.current(job), operation, body)


async def _future(request: Request, door: FireworksDoor, job: Job) -> Response:
    body = await read_body(request, futures.MAX_SMALL_BYTES)
    request_id = futures.text_of(body, "request_id")
    if (failure := futures.failure_of(request_id)) is not None:
        return futures.failed(*failure)
    trainer, current = trainer_of_future(request_id), trainer_of(job)
    if trainer is None or trainer.job_id != job.job_id:
        raise NotFoundError(f"there is no future {request_id[:128]} of this trainer")

    async def ask() -> Response:
        response = await door.trainers.pass_on(request, trainer, body, door=FIREWORKS, grammar=_ADDRESS)
        kind = SAVES.get(request.headers.get("x-tinker-request-type", ""))
        saved = futures.text_of(bytes(getattr(response, "body", b"")), "path")
        if kind is not None and response.status_code == HTTPStatus.OK and saved:
            await door.wait_until_registered(job, kind, saved)
        return response

    async def lost(_: str) -> str:
        return await door.explain_loss(await door.current(job), owner_of_future(request_id))

    if trainer == current:
        return await futures.poll(request_id, ask(), lost)
    return futures.failed(await door.explain_loss(job, owner_of_future(request_id)), futures.Category.SERVER)


async def _absent(door: FireworksDoor, job: Job, operation: str, body: IncomingBody) -> Response:
    """The answer in place of a trainer that is not there (yet)."""
    if operation in WORK:
        model_id = await _model_id(body)
        await body.drain()
        return futures.accepted_failure(await door.explain_loss(job, model_id), futures.Category.SERVER)
    if operation == HEARTBEAT:
        raise SessionEndedError(await door.explain_loss(job))
    if operation == "telemetry":
        await body.drain()
        return futures.ok({"status": "accepted"})
    if operation.startswith("sessions/") and operation.endswith("/finish"):
        await body.drain()
        return futures.ok({})
    if job.deleted_at is not None:
        raise NotFoundError(f"trainer {job.handle or job.job_id} was deleted")
    if job.desired is Desired.RUN and job.status in WAITING | ACTIVE:
        raise ServiceNotReadyError(
            f"the trainer is {job.status} and not ready yet; try again soon", retry_after_s=RETRY_AFTER_S
        )
    if operation == HEALTHZ:
        raise ServiceNotReadyError(f"the trainer is {job.status}; resume it to use it", retry_after_s=None)
    # Clients retry what is refused with 409 or 503 for minutes.
    raise RefusedError(f"the trainer is {job.status}; resume it to use it")


async def _model_id(body: IncomingBody) -> str:
    """The model that a request is about; empty where it does not say, or where its beginning was passed on."""
    try:
        return await text_field(body, "model_id")
    except (SpecError, TooLargeError):
        return ""


async def _source(door: FireworksDoor, scope: Scope, body: bytes, member: str, kind: str) -> dict[str, str]:
    """The headers that tell a trainer where the weights lie that a request names."""
    try:
        source = await door.source(scope, futures.text_of(body, member), kind)
    except NotFoundError as error:
        return {REFUSAL_HEADER: quote(error.message[:_MAX_REFUSAL])}
    return {} if source is None else {SOURCE_HEADER: source}

"""What is sent to a trainer: passed on as it comes, or answered in the place of one that is not there.

Clients ask again at once and for ever where a server does not answer. So whoever asks about the work of a trainer that
has ended is told so through the future of that work, and is told to start anew.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from http import HTTPStatus
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.errors import NotFoundError, RefusedError, SpecError
from trainmaster.server.core.job import Job
from trainmaster.server.core.states import ACTIVE, WAITING, Desired
from trainmaster.server.doors.fireworks.door import DOOR, FireworksDoor, door_of, trainer_of
from trainmaster.server.doors.fireworks.resources import answer, own
from trainmaster.server.doors.bodies import Body, is_plain, text_field
from trainmaster.server.http.proxy import BrokenOffError
from trainmaster.server.doors.tinker.names import Category, failure_of, model_of_future, trainer_of_future
from trainmaster.server.doors.tinker.router import MAX_SMALL_BYTES, accepted_failure, failed, try_again
from trainmaster.server.doors.trainers import REFUSAL, SOURCE, TrainerGoneError
from trainmaster.server.http.auth import guard, require
from trainmaster.server.http.errors import BadGatewayError, ServiceNotReadyError, SessionEndedError, TooLargeError
from trainmaster.server.http.gateway import RETRY_AFTER_S, SAFE_METHODS
from trainmaster.server.http.requests import parse_json, read_body
from trainmaster.server.http.router import Handler
from trainmaster.server.store.scope import Scope

PREFIX = "/training/v1/rlorTrainerJobs"
BREAK_S = 1.0
"""How long a poll is held whose trainer broke off: by then it is known whether it has ended."""
REGISTERED_WITHIN_S = 10.0

LOADS = {"load_weights": ("path", "training"), "load_adapter": ("adapter_path", "sampler")}
"""Operations that name saved weights: in which member, and of which kind those are."""
SAVES = {"SaveWeights": "training", "SaveWeightsForSampler": "sampler"}
"""What clients call requests whose results name what they saved, and the kind of that."""
WORK = frozenset(
    {
        "forward_backward",
        "forward",
        "optim_step",
        "save_weights",
        "save_weights_for_sampler",
        "load_weights",
        "load_adapter",
        "unload_model",
        "weight_sync",
    }
)
"""Operations on a model, whose outcome is told through a future."""
HEALTH = "healthz"
HEARTBEAT = "session_heartbeat"
FUTURE = "retrieve_future"
_MAX_REFUSAL = 1000

_ADDRESS = re.compile(PREFIX.encode() + rb"/[^/]+/[^/]+(?P<rest>/.*)", re.DOTALL)


class _BareRoute(APIRoute):
    """A route whose endpoint takes the request and nothing else, at every step of a training loop."""

    def get_route_handler(self) -> Handler:
        """The endpoint itself."""
        endpoint: Handler = self.endpoint
        return endpoint


router = APIRouter(route_class=_BareRoute, include_in_schema=False, tags=["fireworks"])


@router.api_route(PREFIX + "/{account_id}/{job_id}/api/v1/{operation:path}", methods=["GET", "POST", "PUT", "DELETE"])
@guard
async def serve(request: Request) -> Response:
    """Pass a request on to the trainer that an address names."""
    operation = str(request.path_params["operation"])
    reads = request.method in SAFE_METHODS or operation == FUTURE
    principal = require(request, KeyScope.VIEW if reads else KeyScope.MANAGE)
    scope = own(principal, str(request.path_params["account_id"]))
    door = door_of(request)
    job = await door.job(scope, str(request.path_params["job_id"]))
    try:
        if operation == FUTURE:
            return await _future(request, door, job)
        async with Body(request, scope.account) as body:
            return await _passed_on(request, door, job, operation, scope, body)
    except BrokenOffError as error:
        raise BadGatewayError(str(error)) from None


async def _passed_on(
    request: Request, door: FireworksDoor, job: Job, operation: str, scope: Scope, body: Body
) -> Response:
    trainer = trainer_of(job)
    if trainer is None:
        return await _absent(door, job, operation, body)
    content: bytes | AsyncIterator[bytes]
    extra: dict[bytes, bytes] = {}
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
            extra=extra,
            target=_target(request),
            door=DOOR,
            counts=operation != HEALTH,
            urgent=operation == HEARTBEAT,
        )
    except TrainerGoneError:
        job = await door.job(scope, job.handle or job.job_id, anew=True)
        return await _absent(door, job, operation, body)


async def _future(request: Request, door: FireworksDoor, job: Job) -> Response:
    """The outcome of some work: of the trainer that has it or, when that has ended, that it is lost."""
    body = await read_body(request, MAX_SMALL_BYTES)
    request_id = _text(body, "request_id")
    if (failure := failure_of(request_id)) is not None:
        return failed(*failure)
    trainer, current = trainer_of_future(request_id), trainer_of(job)
    if trainer is None or trainer.job_id != job.job_id:
        raise NotFoundError(f"there is no future {request_id[:128]} of this trainer")
    if current is not None and trainer.attempt == current.attempt:
        try:
            response = await door.trainers.pass_on(request, trainer, body, target=_target(request), door=DOOR)
            kind = SAVES.get(request.headers.get("x-tinker-request-type", ""))
            if kind is not None and response.status_code == HTTPStatus.OK:
                name = _text(bytes(getattr(response, "body", b"")), "path")
                await door.registered(job, kind, name, REGISTERED_WITHIN_S if name else 0.0)
            return response
        except TrainerGoneError:
            job = await door.job(Scope(job.account_id), job.handle or job.job_id, anew=True)
        except BrokenOffError:
            await asyncio.sleep(BREAK_S)
            return try_again(request_id)
    return failed(await door.epitaph(job, model_of_future(request_id)), Category.SERVER)


async def _absent(door: FireworksDoor, job: Job, operation: str, body: Body) -> Response:
    """The answer in the place of a trainer that is not there (yet)."""
    if operation in WORK:
        model_id = await _model_id(body)
        await body.drain()
        return accepted_failure(await door.epitaph(job, model_id), Category.SERVER)
    if operation == HEARTBEAT:
        raise SessionEndedError(await door.epitaph(job))
    if operation == "telemetry":
        await body.drain()
        return answer({"status": "accepted"})
    if operation.startswith("sessions/") and operation.endswith("/finish"):
        await body.drain()
        return answer({})
    if job.deleted_at is not None:
        raise NotFoundError(f"trainer {job.handle or job.job_id} was deleted")
    if job.desired is Desired.RUN and job.status in WAITING | ACTIVE:
        raise ServiceNotReadyError(
            f"the trainer is {job.status} and not ready yet; try again soon", retry_after_s=RETRY_AFTER_S
        )
    if operation == HEALTH:
        raise ServiceNotReadyError(f"the trainer is {job.status}; resume it to use it", retry_after_s=None)
    # Clients try again for minutes what is refused with 409 or 503.
    raise RefusedError(f"the trainer is {job.status}; resume it to use it")


async def _model_id(body: Body) -> str:
    """The model that a request is about; empty where it does not say, or where its beginning was passed on."""
    try:
        return await text_field(body, "model_id")
    except (SpecError, TooLargeError):
        return ""


async def _source(door: FireworksDoor, scope: Scope, body: bytes, member: str, kind: str) -> dict[bytes, bytes]:
    """What a trainer is told of the weights that a request names."""
    try:
        source = await door.source(scope, _text(body, member), kind)
    except NotFoundError as error:
        # Through the future, by the trainer, which counts the request.
        return {REFUSAL: quote(error.message[:_MAX_REFUSAL]).encode()}
    return {} if source is None else {SOURCE: source.encode()}


def _text(body: bytes, member: str) -> str:
    """A text in a small JSON object; an empty one where there is none, or one that nothing can be called."""
    try:
        document = parse_json(body) if len(body) <= MAX_SMALL_BYTES else None
    except SpecError:
        return ""
    found = document.get(member) if isinstance(document, dict) else None
    return found if isinstance(found, str) and is_plain(found) else ""


def _target(request: Request) -> bytes:
    """The path and the query at the trainer, as they were written."""
    raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    found = _ADDRESS.fullmatch(raw.partition(b"?")[0])
    query: bytes = request.scope["query_string"]
    return (found["rest"] if found else b"/") + (b"?" + query if query else b"")

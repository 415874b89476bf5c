"""What is asked of models: passed on to their trainers, and their futures.

A client counts what it asks of a model, and its trainer does it in that order. So what came this far is acknowledged,
and what is wrong with it is said through its future.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time

from starlette.requests import Request
from starlette.responses import Response

from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.core.spec.documents import parse
from trainmaster.server.doors.bodies import Body, is_plain, plain_id, text_field
from trainmaster.server.http.proxy import BrokenOffError
from trainmaster.server.doors.tinker.door import TinkerDoor
from trainmaster.server.doors.tinker.names import (
    Category,
    RunState,
    TinkerRun,
    created_model,
    failure_of,
    model_of_future,
    trainer_of_future,
)
from trainmaster.server.doors.tinker.router import (
    MAX_SMALL_BYTES,
    By,
    accepted_failure,
    answer,
    failed,
    ok,
    read_document,
    try_again,
)
from trainmaster.server.doors.trainers import SOURCE, TrainerGoneError
from trainmaster.server.doors.tinker.wire import OfModel
from trainmaster.server.http.auth import Principal
from trainmaster.server.http.requests import parse_json, read_body

_log = logging.getLogger(__name__)

HOLD_S = 20.0
"""How long a poll of a future is held: clients ask again at once, and give up on an answer after 45 s."""
BREAK_S = 1.0
"""How long a poll is held whose trainer broke off: by then it is known whether it has ended."""
REGISTER_WITHIN_S = 10.0
"""What a trainer saved is on record as soon as the leader has read of it: a moment later, where all is well."""
LOOK_EVERY_S = 0.02
_SAVES = frozenset({"SaveWeights", "SaveWeightsForSampler", "SaveWeightsExternal"})
"""What clients call the requests whose results are paths of weights."""


_OF_A_NEW_MODEL = ("base_model", "user_metadata", "optimizer_config")
"""Fields of a load_weights that makes a model."""


@answer("POST", "/forward_backward", KeyScope.MANAGE, by=By.TRAINER, note="protobuf or JSON, streamed")
async def forward_backward(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    """A pass through a model."""
    async with Body(request, principal.account_id) as body:
        run = await door.sessions.run(principal.scope, await text_field(body, "model_id"))
        return await _passed(request, door, run, body)


@answer("POST", "/forward", KeyScope.MANAGE, by=By.TRAINER, note="of clients before 0.25")
async def forward(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    """A pass without gradients."""
    return await forward_backward(request, door, principal)


@answer("POST", "/optim_step", KeyScope.MANAGE, by=By.TRAINER)
async def optim_step(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    """A step of a model's optimizer."""
    return await _small(request, door, principal)


@answer("POST", "/save_weights", KeyScope.MANAGE, by=By.TRAINER)
async def save_weights(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    """Save a model, to go on from."""
    return await _small(request, door, principal)


@answer("POST", "/save_weights_for_sampler", KeyScope.MANAGE, by=By.TRAINER)
async def save_weights_for_sampler(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    """Save a model, to sample from."""
    return await _small(request, door, principal)


@answer(
    "POST",
    "/save_weights_external",
    KeyScope.MANAGE,
    by=By.TRAINER,
    note="a PEFT adapter or a transformers checkpoint; age recipients may be native keys, no SSH keys",
)
async def save_weights_external(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    """Export a model, to be downloaded."""
    return await _small(request, door, principal)


@answer("POST", "/unload_model", KeyScope.MANAGE, by=By.TRAINER, note="of clients before 0.26")
async def unload_model(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    """Let go of a model."""
    return await _small(request, door, principal)


@answer("POST", "/load_weights", KeyScope.MANAGE, by=By.TRAINER, note="the server says where the weights lie")
async def load_weights(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    """Load what was saved into a model."""
    document = await read_document(request)
    if document.get("model_id") is None and document.get("session_id") is not None:
        message = "this server makes a model first (create_model) and loads weights into it then"
        return accepted_failure(message, Category.USER)
    if named := [name for name in _OF_A_NEW_MODEL if document.get(name) is not None]:
        message = f"{', '.join(named)}: set by create_model; weights are loaded into a model as it is"
        return accepted_failure(message, Category.USER)
    run = await door.sessions.run(principal.scope, parse(OfModel, document).model_id)
    token = document.pop("weights_access_token", None)
    extra: dict[bytes, bytes] = {}
    try:
        path = str(document.get("path"))
        lent_by = token if isinstance(token, str) and is_plain(token) else None
        found = await door.weights(principal.scope, path, access_token=lent_by)
        extra[SOURCE] = door.source(found.checkpoint).encode()
    except NotFoundError:
        pass  # its trainer says so through the future, and counts the request
    return await _passed(request, door, run, json.dumps(document).encode(), extra=extra)


@answer("POST", "/retrieve_future", KeyScope.VIEW, by=By.TRAINER, note="of create_model by the server")
async def retrieve_future(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    """What came of a request; held until there is something to say."""
    body = await read_body(request, MAX_SMALL_BYTES)
    request_id = _request_id(body)
    if (failure := failure_of(request_id)) is not None:
        return failed(*failure)
    if (model_id := created_model(request_id)) is not None:
        return await _creation(door, principal, request_id, model_id)
    trainer = trainer_of_future(request_id)
    if trainer is None:
        raise NotFoundError(f"there is no future {request_id[:128]}")
    await door.trainers.require(principal.account_id, trainer.job_id)
    try:
        response = await door.trainers.pass_on(request, trainer, body)
        if request.headers.get("x-tinker-request-type") in _SAVES:
            await _registered(door, principal, response)
        return response
    except TrainerGoneError as gone:
        message = await door.epitaph(gone, principal.account_id, model_of_future(request_id))
        return failed(message, Category.SERVER)
    except BrokenOffError:
        await asyncio.sleep(BREAK_S)
        return try_again(request_id)


@answer("POST", "/cancel_future", KeyScope.MANAGE, by=By.TRAINER, note="of samples")
async def cancel_future(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    """Nobody waits for a sample any more."""
    body = await read_body(request, MAX_SMALL_BYTES)
    trainer = trainer_of_future(_request_id(body))
    if trainer is None:
        return ok({})
    await door.trainers.require(principal.account_id, trainer.job_id)
    try:
        return await door.trainers.pass_on(request, trainer, body)
    except TrainerGoneError:
        return ok({})


async def _small(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    body = await read_body(request, MAX_SMALL_BYTES)
    run = await door.sessions.run(principal.scope, parse(OfModel, parse_json(body)).model_id)
    return await _passed(request, door, run, body)


async def _passed(
    request: Request, door: TinkerDoor, run: TinkerRun, body: Body | bytes, *, extra: dict[bytes, bytes] | None = None
) -> Response:
    """The answer of the trainer that has a model; when there is none any more, a future that says so."""
    door.use.used(run.model_id)
    try:
        if run.trainer is None:
            return await _refused(body, _not_made(run), Category.USER, run)
        content = await body.content() if isinstance(body, Body) else body
        return await door.trainers.pass_on(request, run.trainer, content, extra=extra)
    except TrainerGoneError as gone:
        return await _refused(body, await door.epitaph(gone, run.account_id, run.model_id), Category.SERVER, run)


async def _refused(body: Body | bytes, message: str, category: Category, run: TinkerRun) -> Response:
    if isinstance(body, Body):
        await body.drain()  # a client hears no answer before it has said everything
    return accepted_failure(message, category, model_id=run.model_id)


def _not_made(run: TinkerRun) -> str:
    if run.state is RunState.FAILED:
        return f"model {run.model_id} was never made: {run.error}"
    return f"model {run.model_id} is not made yet; wait for its create_model"


async def _registered(door: TinkerDoor, principal: Principal, response: Response) -> None:
    """Wait until what a trainer saved is on record: its client may ask for it next."""
    try:
        document = json.loads(bytes(getattr(response, "body", b"{}")))
    except (ValueError, RecursionError):
        return  # the outcome of something else: what it is called is the client's word
    path = document.get("path") if isinstance(document, dict) else None
    deadline = time.monotonic() + REGISTER_WITHIN_S
    while isinstance(path, str) and time.monotonic() < deadline:
        try:
            await door.weights(principal.scope, path)
            return
        except NotFoundError:
            await asyncio.sleep(LOOK_EVERY_S)
    if isinstance(path, str):
        _log.warning("%s is saved, and not on record after %.0f s", path, REGISTER_WITHIN_S)


async def _creation(door: TinkerDoor, principal: Principal, request_id: str, model_id: str) -> Response:
    run = await door.sessions.run(principal.scope, model_id)
    made = await door.creations.outcome(run, created_by=principal.name, hold_s=HOLD_S)
    if made is None:
        queue_state, reason = await door.waiting(principal.scope, model_id)
        return try_again(request_id, queue_state=queue_state, reason=reason)
    if made.state is RunState.FAILED:
        return failed(made.error, made.category)
    return ok({"model_id": made.model_id, "type": "create_model"})


def _request_id(body: bytes) -> str:
    document = parse_json(body)
    return plain_id(document.get("request_id") if isinstance(document, dict) else None, "request_id")

"""Operations on models, which their trainers carry out, and the futures of operations.

A client numbers its operations on a model, and the trainer carries them out in that order. Which failures are HTTP
statuses, and which are reported through a future:

- An HTTP status, if the request never reaches a model: no valid key (401, 403), no `model_id` or an unreadable body
  (422), too large a body (413), one that stalls (408), too many large ones at a time (429), no such model in the
  account (404).
- An HTTP status, if the trainer does not answer (502): the client tries again. A status of the trainer is passed on.
- A failed future, in a response with status 200, for a known model whose creation failed or is not finished, or whose
  trainer has ended; and for a `load_weights` of weights that do not exist, or that asks for a new model.
"""

from __future__ import annotations

import json
import logging

from starlette.requests import Request
from starlette.responses import Response

from trainmaster.protocol.trainer_requests import SOURCE_HEADER, TINKER, owner_of_future, trainer_of_future
from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.core.spec.documents import parse
from trainmaster.server.doors import futures
from trainmaster.server.doors.bodies import IncomingBody, is_plain, plain_id, text_field
from trainmaster.server.doors.tinker.door import TinkerDoor
from trainmaster.server.doors.tinker.model_creation import created_model
from trainmaster.server.doors.tinker.records import RunState, TinkerRun
from trainmaster.server.doors.tinker.router import AnsweredBy, answer, read_document
from trainmaster.server.doors.tinker.wire import ModelRequest
from trainmaster.server.doors.trainers import TrainerGoneError, location_of
from trainmaster.server.http.auth import Principal
from trainmaster.server.http.requests import parse_json, read_body

_log = logging.getLogger(__name__)

HOLD_S = 20.0
"""How long a poll of a future is held: clients ask again at once, and give up on an answer after 45 s."""
_SAVES = frozenset({"SaveWeights", "SaveWeightsForSampler", "SaveWeightsExternal"})
"""Clients' names for requests whose results are paths of weights."""
_OF_A_NEW_MODEL = ("base_model", "user_metadata", "optimizer_config")
"""Fields of a load_weights that creates a model."""
_SMALL_OPERATIONS = {
    "optim_step": "",
    "save_weights": "",
    "save_weights_for_sampler": "",
    "save_weights_external": "a PEFT adapter or a transformers checkpoint; age recipients must be native keys, "
    "not SSH keys",
    "unload_model": "only from clients before 0.26",
}
"""Operations whose body is small JSON, with the note on each."""


@answer("POST", "/forward_backward", KeyScope.MANAGE, by=AnsweredBy.TRAINER, note="protobuf or JSON, streamed")
@answer("POST", "/forward", KeyScope.MANAGE, by=AnsweredBy.TRAINER, note="only from clients before 0.25")
async def forward_backward(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    async with IncomingBody(request, principal.account_id) as body:
        run = await door.sessions.run(principal.scope, await text_field(body, "model_id"))
        return await _pass_on(request, door, run, body)


async def _small_operation(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    body = await read_body(request, futures.MAX_SMALL_BYTES)
    run = await door.sessions.run(principal.scope, parse(ModelRequest, parse_json(body)).model_id)
    return await _pass_on(request, door, run, body)


for _name, _note in _SMALL_OPERATIONS.items():
    answer("POST", f"/{_name}", KeyScope.MANAGE, by=AnsweredBy.TRAINER, note=_note)(_small_operation)


@answer(
    "POST",
    "/load_weights",
    KeyScope.MANAGE,
    by=AnsweredBy.TRAINER,
    note="the server tells the trainer where the weights are",
)
async def load_weights(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    document = await read_document(request)
    if document.get("model_id") is None and document.get("session_id") is not None:
        message = "this server makes a model first (create_model) and loads weights into it then"
        return futures.accepted_failure(message, futures.Category.USER)
    if named := [name for name in _OF_A_NEW_MODEL if document.get(name) is not None]:
        message = f"{', '.join(named)}: set by create_model; weights are loaded into a model as it is"
        return futures.accepted_failure(message, futures.Category.USER)
    run = await door.sessions.run(principal.scope, parse(ModelRequest, document).model_id)
    token = document.pop("weights_access_token", None)
    extra: dict[str, str] = {}
    try:
        lent_by = token if isinstance(token, str) and is_plain(token) else None
        found = await door.weights(principal.scope, str(document.get("path")), access_token=lent_by)
        extra[SOURCE_HEADER] = location_of(door.context, found.checkpoint)
    except NotFoundError:
        pass  # the trainer says so through the future, and counts the request
    return await _pass_on(request, door, run, json.dumps(document).encode(), extra=extra)


@answer(
    "POST", "/retrieve_future", KeyScope.VIEW, by=AnsweredBy.TRAINER, note="for create_model: answered by the server"
)
async def retrieve_future(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    """Held until there is an outcome, or for `HOLD_S`."""
    body = await read_body(request, futures.MAX_SMALL_BYTES)
    request_id = _request_id(body)
    if (failure := futures.failure_of(request_id)) is not None:
        return futures.failed(*failure)
    if (model_id := created_model(request_id)) is not None:
        return await _creation(door, principal, request_id, model_id)
    if (trainer := trainer_of_future(request_id)) is None:
        raise NotFoundError(f"there is no future {request_id[:128]}")
    await door.trainers.require(principal.account_id, trainer.job_id)

    async def ask() -> Response:
        response = await door.trainers.pass_on(request, trainer, body, door=TINKER)
        if request.headers.get("x-tinker-request-type") in _SAVES:
            await _wait_until_registered(
                door, principal, futures.text_of(bytes(getattr(response, "body", b"")), "path")
            )
        return response

    async def lost(how_it_ended: str) -> str:
        return await door.explain_loss(how_it_ended, principal.account_id, owner_of_future(request_id))

    return await futures.poll(request_id, ask(), lost)


@answer("POST", "/cancel_future", KeyScope.MANAGE, by=AnsweredBy.TRAINER, note="for samples only")
async def cancel_future(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    body = await read_body(request, futures.MAX_SMALL_BYTES)
    if (trainer := trainer_of_future(_request_id(body))) is None:
        return futures.ok({})
    await door.trainers.require(principal.account_id, trainer.job_id)
    try:
        return await door.trainers.pass_on(request, trainer, body, door=TINKER)
    except TrainerGoneError:
        return futures.ok({})


async def _pass_on(
    request: Request,
    door: TinkerDoor,
    run: TinkerRun,
    body: IncomingBody | bytes,
    *,
    extra: dict[str, str] | None = None,
) -> Response:
    """The response of the model's trainer; where there is none any more, a future that says so."""
    door.heartbeats.used(run.model_id)
    try:
        if run.trainer is None:
            return await _refuse(body, _why_not_created(run), futures.Category.USER, run)
        content = await body.content() if isinstance(body, IncomingBody) else body
        return await door.trainers.pass_on(request, run.trainer, content, door=TINKER, extra=extra)
    except TrainerGoneError as gone:
        message = await door.explain_loss(gone.message, run.account_id, run.model_id)
        return await _refuse(body, message, futures.Category.SERVER, run)


async def _refuse(body: IncomingBody | bytes, message: str, category: futures.Category, run: TinkerRun) -> Response:
    if isinstance(body, IncomingBody):
        await body.drain()
    return futures.accepted_failure(message, category, model_id=run.model_id)


def _why_not_created(run: TinkerRun) -> str:
    if run.state is RunState.FAILED:
        return f"model {run.model_id} was never made: {run.error}"
    return f"model {run.model_id} is not made yet; wait for its create_model"


async def _wait_until_registered(door: TinkerDoor, principal: Principal, path: str) -> None:
    async def is_registered() -> bool:
        try:
            await door.weights(principal.scope, path)
        except NotFoundError:
            return False
        return True

    if path and not await futures.wait_until(is_registered):
        _log.warning("%s is saved, and not on record after %.0f s", path, futures.REGISTERED_WITHIN_S)


async def _creation(door: TinkerDoor, principal: Principal, request_id: str, model_id: str) -> Response:
    run = await door.sessions.run(principal.scope, model_id)
    if (made := await door.creations.outcome(run, created_by=principal.name, hold_s=HOLD_S)) is None:
        queue_state, reason = await door.waiting(principal.scope, model_id)
        return futures.try_again(request_id, queue_state=queue_state, reason=reason)
    if made.state is RunState.FAILED:
        return futures.failed(made.error, made.category)
    return futures.ok({"model_id": made.model_id, "type": "create_model"})


def _request_id(body: bytes) -> str:
    document = parse_json(body)
    return plain_id(document.get("request_id") if isinstance(document, dict) else None, "request_id")

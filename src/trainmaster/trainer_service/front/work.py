"""Requests that are work: acknowledged at once, done by the engine, fetched as futures."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial, wraps
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from trainmaster.protocol.trainer_requests import JSON, TINKER, content_type_of, owner_of_future
from trainmaster.trainer_service.front import requests
from trainmaster.trainer_service.front.futures import Future, is_count
from trainmaster.trainer_service.front.models import QueuedOperation, digest_of_fields
from trainmaster.trainer_service.front.request_bodies import BusyError, Received, RequestRefusedError, size_of_fields
from trainmaster.trainer_service.front.requests import door_of, front_of, operation_of, read_fields, source_of
from trainmaster.trainer_service.front.state import Front
from trainmaster.trainer_service.messages import Request as EngineRequest
from trainmaster.trainer_service.schema import shown

Handler = Callable[[Request], Awaitable[Response]]

_MAX_SEQ_ID = 2**31 - 1
_NOT_OFFERED = {
    "weight_sync": "weights are not synchronised over RDMA here: save_weights_for_sampler, then load what it saved",
}
"""Operations that have a place in the order of their model all the same."""


def _refused_by_future(**also: Any) -> Callable[[Handler], Handler]:
    """Accept a refused request with a future that has failed: clients look for errors there."""

    def decorate(handler: Handler) -> Handler:
        @wraps(handler)
        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except RequestRefusedError as refused:
                ack = front_of(request).training.refuse(str(refused), category=refused.category)
                return requests.as_json({**ack, **also})

        return answer

    return decorate


@_refused_by_future()
async def create_model(request: Request) -> Response:
    front = front_of(request)
    fields = await read_fields(request, front)
    session_id, door = fields.get("session_id"), door_of(request)
    refusal = ""
    if isinstance(session_id, str):
        if door == TINKER:
            front.sessions.adopt(session_id)
        refusal = front.sessions.touch(session_id)
    ack = front.training.create(fields, door=door, source=source_of(request), refusal=refusal)
    return requests.as_json(ack)


@_refused_by_future()
async def passes(request: Request) -> Response:
    """A forward_backward or a forward: the engine gets its body as it came."""
    front = front_of(request)
    op, encoding = operation_of(request), requests.encoding_of(request)
    received = await front.intake.read(request)
    content_type = content_type_of(request.headers.get("content-type", ""))
    limit = front.settings.max_body_bytes
    too_large = "" if received.whole else f"a body may have {limit} bytes, and this one has more"
    try:
        place = _place(requests.peek(received, content_type, encoding), received, op)
    except RequestRefusedError as refused:
        front.intake.drop(received)
        raise RequestRefusedError(too_large or str(refused)) from None
    except BusyError:
        front.intake.drop(received)
        raise
    sent = _sent(request, *place, body=received.data, content_type=content_type, encoding=encoding)
    digest = op.encode() + received.digest
    return _accept(
        front,
        QueuedOperation(request=sent, digest=digest, size=received.size, shared=received.shared, refusal=too_large),
    )


@_refused_by_future()
async def steps(request: Request) -> Response:
    front = front_of(request)
    op = operation_of(request)
    fields = await read_fields(request, front)
    if op == "load_weights" and "model_id" not in fields:
        raise RequestRefusedError("a model is not made by loading weights here: create_model, then load_weights")
    model_id, seq_id = _place(fields, None, op)
    digest, size = digest_of_fields(op, fields), size_of_fields(fields)
    asked, done = fields, None
    model, number = front.training.get(model_id), fields.get("sampling_session_seq_id")
    if op == "save_weights_for_sampler" and not fields.get("path") and model is not None and is_count(number):
        asked = {**fields, "sampling_session_id": front.trainer.sampling_session_id(model.session_id, number)}
        done = partial(
            front.samples.register,
            model.session_id,
            number,
            base_model=str(model.fields.get("base_model")),
            model_path=None,
        )
    sent = _sent(request, model_id, seq_id, fields=asked, source=source_of(request))
    refusal = _NOT_OFFERED.get(op) or requests.refusal_of(request)
    front.intake.add(size)
    return _accept(front, QueuedOperation(request=sent, digest=digest, size=size, refusal=refusal, done=done))


@_refused_by_future()
async def unload_model(request: Request) -> Response:
    front = front_of(request)
    fields = await read_fields(request, front)
    model_id = fields.get("model_id")
    if not isinstance(model_id, str):
        raise RequestRefusedError("unload_model needs a model_id")
    return requests.as_json(front.training.unload(model_id))


@_refused_by_future()
async def create_custom_loss(request: Request) -> Response:
    await read_fields(request, front_of(request))
    raise RequestRefusedError("custom losses are computed by the client here: use forward_backward_custom")


async def create_sampling_session(request: Request) -> Response:
    """Answered when the weights are loaded, or when that takes long."""
    front = front_of(request)
    fields = await read_fields(request, front)
    session_id, number = fields.get("session_id"), fields.get("sampling_session_seq_id")
    if not isinstance(session_id, str) or not is_count(number):
        raise RequestRefusedError("create_sampling_session needs a session_id and a sampling_session_seq_id")
    for name in ("base_model", "model_path"):
        if not isinstance(fields.get(name), str | None):
            raise RequestRefusedError(f"{name} must be text, not {shown(fields[name])}")
    if door_of(request) == TINKER:
        front.sessions.adopt(session_id)
    if refusal := front.sessions.touch(session_id):
        return requests.error(410, refusal)
    path = fields.get("model_path")
    base_model = fields.get("base_model") or (front.saved.base_model(path) if path else "")
    session = front.samples.register(session_id, number, base_model=base_model, model_path=path)
    outcome = await front.samples.open(
        session, fields, door=door_of(request), source=source_of(request), hold_s=front.settings.hold_s
    )
    if outcome is not None and outcome.error:
        status = 400 if outcome.category == "user" else 500
        return requests.error(status, outcome.error, {"x-should-retry": "false"})
    return requests.as_json({"type": "create_sampling_session", "sampling_session_id": session.sampling_session_id})


@_refused_by_future(sample_sequence_ids=[])
async def asample(request: Request) -> Response:
    front = front_of(request)
    encoding = requests.encoding_of(request)
    received = await front.intake.read(request)
    try:
        peeked = requests.peek(received, JSON, encoding)
        if (session := front.samples.get(str(peeked.get("sampling_session_id")))) is not None:
            front.sessions.touch(session.session_id)
        return requests.as_json(front.samples.accept(peeked, received, encoding=encoding))
    except (RequestRefusedError, BusyError):
        front.intake.drop(received)
        raise


async def cancel_future(request: Request) -> Response:
    front = front_of(request)
    fields = await read_fields(request, front)
    return requests.as_json({"cancelled": front.samples.cancel(str(fields.get("request_id")))})


async def retrieve_future(request: Request) -> Response:
    """Held until there is an outcome, or for `hold_s`."""
    front = front_of(request)
    fields = await read_fields(request, front)
    request_id = fields.get("request_id")
    future = front.futures.get(request_id) if isinstance(request_id, str) else None
    if future is None:
        return _not_there(front, request_id)
    outcome = await front.futures.wait(future, front.settings.hold_s)
    if outcome is None:
        # Clients log a warning for each pending future that is answered with 200, and none with 408.
        reason = front.training.why_waiting(future.owner)
        said = {"type": "try_again", "queue_state": "active", **({"queue_state_reason": reason} if reason else {})}
        return requests.as_json(said, HTTPStatus.REQUEST_TIMEOUT)
    response, all_of_it = await requests.result(
        future,
        outcome,
        accept=request.headers.get("accept", ""),
        metadata_first=fields.get("allow_metadata_only") is True,
    )
    if all_of_it:
        front.futures.fetch(future)
    return response


async def retrieve_futures(request: Request) -> Response:
    front = front_of(request)
    fields = await read_fields(request, front)
    target, cursor = fields.get("target"), fields.get("prev_cursor", 0)
    if not isinstance(target, dict) or target.get("type") != "sampling_session" or not is_count(cursor):
        raise RequestRefusedError("retrieve_futures needs a target of the type sampling_session, and a prev_cursor")
    retrieved, clone = fields.get("retrieved_request_ids") or [], target.get("cloned_sampler_id") or 0
    if not isinstance(retrieved, list) or not is_count(clone):
        raise RequestRefusedError("retrieved_request_ids must be a list, and cloned_sampler_id a number")
    sampling_session_id = target.get("sampling_session_id")
    session = front.samples.get(sampling_session_id) if isinstance(sampling_session_id, str) else None
    if session is None:
        return requests.error(410, f"there is no sampling session {sampling_session_id!r} here")
    for request_id in retrieved:
        front.futures.forget(str(request_id))
    futures, cursor = await front.samples.ended_since(session, cursor, clone, front.settings.hold_s)
    return requests.as_json({"completions": [_completion(future) for future in futures], "cursor": cursor})


def _sent(request: Request, model_id: str, seq_id: int, **sent: Any) -> EngineRequest:
    request_id = front_of(request).trainer.future_id(model_id, seq_id)
    op, door = operation_of(request), door_of(request)
    return EngineRequest(request_id=request_id, op=op, model_id=model_id, seq_id=seq_id, door=door, **sent)


def _accept(front: Front, operation: QueuedOperation) -> Response:
    if (model := front.training.get(operation.request.model_id)) is not None:
        front.sessions.touch(model.session_id)
    return requests.as_json(front.training.accept(operation))


def _place(fields: dict[str, Any], received: Received | None, op: str) -> tuple[str, int]:
    """The model and the number of an operation. Raises RequestRefusedError where the body does not say."""
    model_id, seq_id = fields.get("model_id"), fields.get("seq_id")
    if received is not None and (model_id is None or seq_id is None) and received.shared is not None:
        raise RequestRefusedError(
            f"{op}: a large body must have its model_id and its seq_id at its beginning or at its end"
        )
    if not isinstance(model_id, str) or not model_id or not is_count(seq_id) or not 1 <= seq_id <= _MAX_SEQ_ID:
        raise RequestRefusedError(
            f"{op} needs a model_id and a seq_id from 1 on, not {shown(model_id)} and {shown(seq_id)}"
        )
    return model_id, seq_id


def _not_there(front: Front, request_id: object) -> Response:
    owner = owner_of_future(request_id) if isinstance(request_id, str) else ""
    if not owner:
        return requests.error(404, f"there is no future {request_id!r}")
    if front.trainer.made_future(str(request_id)):
        return requests.error(410, f"the result of {request_id!r} is not kept any more")
    return requests.as_json({"error": front.training.why_lost(owner), "category": "server"})


def _completion(future: Future) -> dict[str, Any]:
    outcome = future.outcome
    if outcome is None or outcome.error:
        return {"state": "failed", "request_id": future.request_id}
    size = len(outcome.body or b"")
    return {"state": "finished", "request_id": future.request_id, "response_payload_uncompressed_size": size}

"""The front as an ASGI application: its routes, who may call it, and how many requests start at a time."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from trainmaster.protocol.environment import TOKEN_HEADER
from trainmaster.protocol.trainer_requests import TINKER
from trainmaster.trainer_service.front import requests, work
from trainmaster.trainer_service.front.request_bodies import BusyError, RequestRefusedError, StoppedError
from trainmaster.trainer_service.front.requests import door_of, front_of, read_fields
from trainmaster.trainer_service.front.state import Front
from trainmaster.trainer_service.front.work import Handler
from trainmaster.trainer_service.messages import TRAINING_OPS

PREFIX = "/api/v1"
HEALTH = f"{PREFIX}/healthz"
_CLIENT_GONE = 499
_COUNT_ALONE = "copies of a sampling client count for themselves here"
_SERVER_ANSWERS = ("training_runs", "checkpoints", "sessions", "audit", "billing", "auth", "copy_weights")
"""What begins so is about records, which the server keeps and a trainer does not."""


async def healthz(request: Request) -> Response:
    link = front_of(request).link
    if link.gone:
        return requests.as_json({"status": "stopped", "error": link.gone}, 503)
    if not link.ready.is_set():
        return requests.as_json({"status": "loading", "error": "the model is being loaded"}, 503)
    return requests.as_json({"status": "ok"})


async def create_session(request: Request) -> Response:
    front = front_of(request)
    await read_fields(request, front)
    session_id = front.sessions.create(request.headers.get("x-idempotency-key", ""))
    return requests.as_json({"type": "create_session", "session_id": session_id})


async def session_heartbeat(request: Request) -> Response:
    front = front_of(request)
    session_id = str((await read_fields(request, front)).get("session_id"))
    if door_of(request) == TINKER:
        front.sessions.adopt(session_id)
    if refusal := front.sessions.touch(session_id):
        return requests.error(410, refusal)
    return requests.as_json({"type": "session_heartbeat"})


async def finish_session(request: Request) -> Response:
    """Models of an interrupted session are saved before they go."""
    front = front_of(request)
    reason = (await read_fields(request, front)).get("reason")
    interrupted = isinstance(reason, dict) and reason.get("type") == "interrupted"
    why = "was interrupted" if interrupted else "was finished by its client"
    front.end_session(request.path_params["session_id"], why, save=interrupted)
    return requests.as_json({"status": "finished"})


async def telemetry(request: Request) -> Response:
    """Read and dropped: clients retry telemetry that is refused for ever."""
    async for _ in request.stream():
        pass
    return requests.as_json({"status": "accepted"})


async def get_server_capabilities(request: Request) -> Response:
    return requests.as_json(front_of(request).link.capabilities)


async def get_info(request: Request) -> Response:
    front = front_of(request)
    model_id = str((await read_fields(request, front)).get("model_id"))
    created = front.futures.get(front.trainer.future_id(model_id, "create"))
    if created is not None:
        await front.futures.wait(created, front.settings.hold_s)
    model = front.training.get(model_id)
    if model is None:
        return requests.error(404, front.training.why_lost(model_id))
    name = model.info.get("base_model") or model.fields.get("base_model")
    return requests.as_json(
        {
            "type": "get_info",
            "model_id": model_id,
            "model_data": {"model_name": name, "tokenizer_id": model.info.get("tokenizer_id") or name},
            "model_name": name,
            "is_lora": model.info.get("is_lora"),
            "lora_rank": model.info.get("lora_rank"),
        }
    )


async def weights_info(request: Request) -> Response:
    front = front_of(request)
    fields = await read_fields(request, front)
    path = str(fields.get("tinker_path") or fields.get("path"))
    info = front.saved.weights_info(path)
    return requests.error(404, f"no weights were saved as {path!r} here") if info is None else requests.as_json(info)


async def list_checkpoints(request: Request) -> Response:
    return requests.as_json({"checkpoints": front_of(request).saved.names()})


async def sampler(request: Request) -> Response:
    front = front_of(request)
    sampler_id = request.path_params["sampler_id"]
    session = front.samples.get(sampler_id)
    if session is None:
        return requests.error(404, f"there is no sampling session {sampler_id!r} here")
    return requests.as_json(
        {"sampler_id": sampler_id, "base_model": session.base_model, "model_path": session.model_path}
    )


def _always(answer: Callable[[], Response]) -> Handler:

    async def handle(request: Request) -> Response:
        await read_fields(request, front_of(request))
        return answer()

    return handle


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        return requests.error(405, f"{path} is not asked with {request.method}", error.headers)
    if path.removeprefix(f"{PREFIX}/").partition("/")[0] in _SERVER_ANSWERS:
        return requests.error(404, f"{request.method} {path} is about records: ask the server, not a trainer")
    return requests.error(error.status_code, f"a trainer has no answer to {request.method} {path}")


async def _failed(request: Request, error: Exception) -> Response:
    match error:
        case RequestRefusedError():
            return requests.error(400, str(error))
        case BusyError():
            return requests.error(429, str(error), {"retry-after": "1"})
        case StoppedError():
            why = f"The trainer has stopped: {front_of(request).link.gone}."
            return requests.error(503, why, {"retry-after": "1"})
        case ClientDisconnect():
            return Response(status_code=_CLIENT_GONE)
        case _:
            return requests.error(500, f"the trainer has a fault: {type(error).__name__}: {error}")


def _when_ready(handler: Handler) -> Handler:
    """Wait a while for the engine: a client that is refused asks again at once."""

    async def wait(request: Request) -> Response:
        front = front_of(request)
        if not front.link.ready.is_set():
            try:
                await asyncio.wait_for(front.link.ready.wait(), front.settings.hold_s)
            except TimeoutError:
                return requests.error(503, "the model is being loaded", {"retry-after": "5"})
        return await handler(request)

    return wait


def _post(name: str, handler: Handler) -> Route:
    return Route(f"{PREFIX}/{name}", _when_ready(handler), methods=["POST"])


ROUTES = [
    _post("retrieve_future", work.retrieve_future),
    _post("asample", work.asample),
    _post("forward_backward", work.passes),
    _post("forward", work.passes),
    *(_post(op, work.steps) for op in sorted({*TRAINING_OPS, "weight_sync"} - {"forward", "forward_backward"})),
    Route(f"{PREFIX}/session_heartbeat", session_heartbeat, methods=["POST"]),
    Route(f"{PREFIX}/telemetry", telemetry, methods=["POST"]),
    Route(HEALTH, healthz, methods=["GET"]),
    _post("create_session", create_session),
    _post("sessions/{session_id}/finish", finish_session),
    _post("create_model", work.create_model),
    _post("unload_model", work.unload_model),
    _post("get_info", get_info),
    _post("weights_info", weights_info),
    _post("create_sampling_session", work.create_sampling_session),
    _post("join_sampling_session", _always(lambda: requests.error(404, _COUNT_ALONE))),
    _post("cancel_future", work.cancel_future),
    _post("retrieve_futures", work.retrieve_futures),
    _post("create_custom_loss", work.create_custom_loss),
    _post("client/config", _always(lambda: requests.as_json({}))),
    _post("client/dynamic_config", _always(lambda: requests.as_json({"sample_cancel_enabled": True}))),
    Route(f"{PREFIX}/get_server_capabilities", _when_ready(get_server_capabilities), methods=["GET"]),
    Route(f"{PREFIX}/list_checkpoints", _when_ready(list_checkpoints), methods=["GET"]),
    Route(f"{PREFIX}/samplers/{{sampler_id}}", _when_ready(sampler), methods=["GET"]),
]

URGENT = frozenset({f"{PREFIX}/session_heartbeat", HEALTH})
"""What is answered before everything else: who is not heard is taken for dead."""

EXCEPTION_HANDLERS = {
    HTTPException: _unknown,
    **dict.fromkeys((RequestRefusedError, BusyError, StoppedError, ClientDisconnect, Exception), _failed),
}


REQUESTS_A_ROUND = 8
"""A request takes about a quarter of a millisecond of the event loop, which looks for new ones after a round."""


class PacingMiddleware:
    """Begins a few requests in each round of the event loop, in order: many samples must not delay a heartbeat."""

    def __init__(self, app: ASGIApp, *, urgent: frozenset[str]) -> None:
        self._app = app
        self._urgent = urgent
        self._places = REQUESTS_A_ROUND
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._counting = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._urgent:
            await self._turn()
        await self._app(scope, receive, send)

    async def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._counting:
            self._counting = True
            loop.call_soon(self._next_round)
        if self._places:
            self._places -= 1
        else:
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append(turn)
            await turn

    def _next_round(self) -> None:
        self._places = REQUESTS_A_ROUND
        while self._waiting and self._places:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._places -= 1
        # Rounds are counted until one passes in which nobody begins.
        self._counting = self._places < REQUESTS_A_ROUND
        if self._counting:
            asyncio.get_running_loop().call_soon(self._next_round)


_HEADER = TOKEN_HEADER.encode()
_REFUSAL = "this is a trainer's own port: go through the server, which knows your key"


class TokenMiddleware:
    """Requires a token: others on this machine can reach the port without a key."""

    def __init__(self, app: ASGIApp, *, token: str, open_to_all: frozenset[str]) -> None:
        self._app = app
        self._token = token.encode()
        self._open = open_to_all

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open and not self._knows(scope):
            await requests.error(HTTPStatus.UNAUTHORIZED, _REFUSAL)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        sent = next((value for name, value in scope["headers"] if name == _HEADER), b"")
        return hmac.compare_digest(sent, self._token)


def make_app(front: Front, end: socket.socket, *, stop: Callable[[], None], token: str = "") -> ASGIApp:
    """`stop` is called when the server should end. Without a token, everybody may call it."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async def run() -> None:
            try:
                await front.run(end)
            finally:
                stop()

        task = asyncio.create_task(run())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        front.link.close()

    app = Starlette(routes=ROUTES, exception_handlers=EXCEPTION_HANDLERS, lifespan=lifespan)
    app.state.front = front
    paced = PacingMiddleware(app, urgent=URGENT)
    return TokenMiddleware(paced, token=token, open_to_all=frozenset({HEALTH})) if token else paced

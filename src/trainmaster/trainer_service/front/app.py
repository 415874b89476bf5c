"""The front as an ASGI application: who may call it, how many requests begin at a time, and how long it lives."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from trainmaster.protocol.environment import TOKEN_HEADER
from trainmaster.trainer_service.front.requests import error
from trainmaster.trainer_service.front.routes import EXCEPTION_HANDLERS, HEALTH, ROUTES, URGENT
from trainmaster.trainer_service.front.state import Front

REQUESTS_A_ROUND = 8
"""A request takes about a quarter of a millisecond of the event loop; a round is what the loop does before it looks
for new ones."""


class Paced:
    """An application whose requests begin a few in each round of the event loop, in the order in which they came.

    A burst of a thousand samples must not keep a heartbeat waiting.
    """

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


class Guarded:
    """Requires a token: others on this machine can reach the port without a key."""

    def __init__(self, app: ASGIApp, *, token: str, open_to_all: frozenset[str]) -> None:
        self._app = app
        self._token = token.encode()
        self._open = open_to_all

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open and not self._knows(scope):
            await error(HTTPStatus.UNAUTHORIZED, _REFUSAL)(scope, receive, send)
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
    paced = Paced(app, urgent=URGENT)
    return Guarded(paced, token=token, open_to_all=frozenset({HEALTH})) if token else paced

"""The front as an ASGI application, whose life is that of the engine it speaks for."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

from starlette.applications import Starlette
from starlette.types import ASGIApp

from trainmaster.trainer_service.front.authentication import Guarded
from trainmaster.trainer_service.front.concurrency_limit import Paced
from trainmaster.trainer_service.front.routes import EXCEPTION_HANDLERS, HEALTH, ROUTES, URGENT
from trainmaster.trainer_service.front.state import Front


def make_app(front: Front, end: socket.socket, *, stop: Callable[[], None], token: str = "") -> ASGIApp:
    """The application; `stop` is called when it should end. With a token, it is for those alone who know it."""

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

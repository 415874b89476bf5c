"""Where jobs can run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Response

from trainmaster.server.core.reports import EngineFacts
from trainmaster.server.http.auth import Viewer
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import Ok, ok
from trainmaster.server.http.router import StrictRoute, errors
from trainmaster.server.http.wire.backends import BackendList, BackendResource, BackendSummary, engine_resource

router = APIRouter(route_class=StrictRoute, tags=["cluster"])

_PATIENCE_S = 8.0
_looks: dict[tuple[Callable[[str], EngineFacts | None], str], Future[EngineFacts | None]] = {}
"""The looks at engines that are under way, by whom they ask, and for which backend."""

BackendName = Annotated[str, Path(min_length=1, max_length=64, pattern=r"^[^\x00]*$")]


@router.get("/backends", response_model=Ok[BackendList], responses=errors())
async def list_backends(
    principal: Viewer,  # noqa: ARG001 - it is what lets the request in
    context: Context,
) -> Response:
    """List where jobs can run."""
    default, known = context.commands.default_backend, context.commands.backends
    return ok(
        BackendList(
            backends=[
                BackendSummary(name=name, default=name == default, images=known[name].images)
                for name in sorted(known, key=lambda name: name != default)
            ]
        )
    )


@router.get("/backends/{name}", response_model=Ok[BackendResource], responses=errors(HTTPStatus.NOT_FOUND))
async def show_backend(
    principal: Viewer,  # noqa: ARG001 - it is what lets the request in
    context: Context,
    name: BackendName,
) -> Response:
    """Show one backend, and the engine that runs its jobs, where there is one."""
    capable = context.commands.backend(name)
    return ok(
        BackendResource(
            name=name,
            default=name == context.commands.default_backend,
            images=capable.images,
            engine=engine_resource(await _looked_at(context.engine, name)),
        )
    )


async def _looked_at(ask: Callable[[str], EngineFacts | None], name: str) -> EngineFacts | None:
    """What runs the jobs of a backend, asked now: once for all who want to know, and in a thread of its own.

    An engine that hangs keeps none of the threads that other requests need.
    """
    look = _looks.get((ask, name))
    if look is None:
        look = _looks[ask, name] = Future()
        look.set_running_or_notify_cancel()  # so that nobody who goes takes it from the others
        threading.Thread(target=_look, args=(look, ask, name), name=f"look at {name}", daemon=True).start()
    try:
        return await asyncio.wait_for(asyncio.wrap_future(look), _PATIENCE_S)
    except TimeoutError:
        return EngineFacts(problem=f"the engine has not answered for {_PATIENCE_S:.0f} s")


def _look(look: Future[EngineFacts | None], ask: Callable[[str], EngineFacts | None], name: str) -> None:
    try:
        found = ask(name)
    except Exception as error:  # whoever waits for it shall know
        look.set_exception(error)
    else:
        look.set_result(found)
    finally:
        del _looks[ask, name]

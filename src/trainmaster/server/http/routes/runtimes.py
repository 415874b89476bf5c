"""Training runtimes that lie beside the server: handed out as they are, and read by clients."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Response
from starlette.concurrency import run_in_threadpool

from trainmaster.server.http.auth import Viewer
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import Ok, ok
from trainmaster.server.http.router import StrictRoute, errors
from trainmaster.server.http.wire.runtimes import RuntimeList, RuntimeResource, runtime_list, runtime_resource

router = APIRouter(route_class=StrictRoute, tags=["runtimes"])

RuntimeName = Annotated[str, Path(min_length=1, max_length=256, pattern=r"^[^\x00]*$")]


@router.get("/runtimes", response_model=Ok[RuntimeList], responses=errors())
async def list_runtimes(
    principal: Viewer,  # noqa: ARG001 - it is what lets the request in
    context: Context,
) -> Response:
    """List the runtimes of this server, for every account the same; built-in ones are the clients'."""
    return ok(runtime_list(await run_in_threadpool(context.runtimes)))


@router.get("/runtimes/{name}", response_model=Ok[RuntimeResource], responses=errors(HTTPStatus.NOT_FOUND))
async def show_runtime(
    principal: Viewer,  # noqa: ARG001 - it is what lets the request in
    context: Context,
    name: RuntimeName,
) -> Response:
    """Show one runtime."""
    return ok(runtime_resource((await run_in_threadpool(context.runtimes)).get(name)))

"""Where jobs can run."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Response
from starlette.concurrency import run_in_threadpool

from trainmaster.api.auth import Viewer
from trainmaster.api.context import Context
from trainmaster.api.envelope import Ok, ok
from trainmaster.api.routing import StrictRoute, errors
from trainmaster.api.wire.backends import BackendList, BackendResource, BackendSummary, engine_resource

router = APIRouter(route_class=StrictRoute, tags=["cluster"])

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
            # It is asked now, and may take its time.
            engine=engine_resource(await run_in_threadpool(context.engine, name)),
        )
    )

"""Puts the application together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from http import HTTPStatus

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from trainmaster import __version__
from trainmaster.server.core.errors import Problem, SpecError, TrainmasterError
from trainmaster.server.doors import fireworks, tinker
from trainmaster.server.doors.trainers import Trainers
from trainmaster.server.http import gateway
from trainmaster.server.http.auth import ConcurrencyLimit, Gate, refuse_unguarded
from trainmaster.server.http.context import ApiContext
from trainmaster.server.http.envelope import failure, request_id_of
from trainmaster.server.http.errors import InternalError, UnknownRouteError, WrongMethodError
from trainmaster.server.http.followers import Followers
from trainmaster.server.http.middleware import ServerApp
from trainmaster.server.http.requests import PREFIX
from trainmaster.server.http.router import Handler, QuickHandler, RawRoute, install_openapi
from trainmaster.server.http.routes import (
    accounts,
    artifacts,
    backends,
    blobs,
    checkpoints,
    cluster,
    controls,
    events,
    foreign_jobs,
    jobs,
    logs,
    metrics,
    monitoring,
    queues,
    submissions,
    worker,
    worker_files,
)
from trainmaster.server.settings.settings import Role

DOORS = (tinker.DOOR, fireworks.DOOR)
"""Foreign APIs. A door is added here, and is gone without its entry."""
ROOT = (monitoring.health_router, monitoring.router)
"""Routers at the root, on servers of any role."""
_RESOURCES = (
    submissions.router,
    jobs.listing,
    jobs.router,
    controls.router,
    logs.router,
    metrics.router,
    events.router,
    cluster.nodes_router,
    queues.router,
    cluster.router,
    backends.router,
    foreign_jobs.router,
    artifacts.router,
    checkpoints.router,
    queues.usage_router,
    checkpoints.retention_router,
    blobs.router,
    submissions.data_router,
    cluster.runtimes_router,
    events.webhooks_router,
    worker.router,
    worker_files.router,
    accounts.router,
    accounts.keys_router,
)


def routers_of(roles: Collection[Role]) -> list[APIRouter]:
    """The routers of a server, whose routes have their whole paths."""
    found = [*ROOT]
    for door in DOORS:
        found += door.gateway_routers if Role.GATEWAY in roles else ()
        found += door.api_routers if Role.API in roles else ()
    return [*found, *(_RESOURCES if Role.API in roles else ()), *((gateway.router,) if Role.GATEWAY in roles else ())]


def create_app(context: ApiContext) -> ServerApp:
    """The application of one server, with the routes of its roles."""
    roles = context.settings.roles
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url="/openapi.json", redirect_slashes=False)
    app.state.context = context
    app.state.followers = Followers(context.database)
    app.state.gateway = gateway.Gateway(context)
    app.state.submissions = submissions.Submissions(context)
    app.state.summaries = jobs.Summaries()
    app.state.trial_deliveries = ConcurrencyLimit(events.AT_ONCE_OF_AN_ACCOUNT)
    app.state.gate = Gate(context)
    trainers = Trainers(context)
    opened = {door.name: door.make(context, app.state.gate, trainers) for door in DOORS}
    for name, state in opened.items():
        setattr(app.state, name, state)
    for router in routers_of(roles):
        refuse_unguarded(router)
        # Not by `include_router`, which makes every route once more: half a second at the first requests of a server.
        app.router.routes.extend(router.routes)
    app.add_exception_handler(TrainmasterError, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse_parameters)
    app.add_exception_handler(HTTPException, _refuse_route)
    app.add_exception_handler(Exception, _fail)
    install_openapi(app, __version__)
    # Routes that are asked for a thousand times a second: there even the router is a cost.
    shortcuts: dict[tuple[str, str], Handler | QuickHandler] = {}
    if Role.API in roles:
        submit = RawRoute("/jobs", submissions.submit, methods=["POST"]).get_route_handler()
        shortcuts["POST", f"{PREFIX}/jobs"] = submit
        shortcuts["GET", f"{PREFIX}/jobs"] = jobs.list_quickly
        shortcuts["GET", f"{PREFIX}/jobs/{{job_id}}"] = jobs.show_quickly
    if Role.GATEWAY in roles:
        for door in DOORS:
            shortcuts |= door.shortcuts
    return ServerApp(
        app,
        context,
        app.state.gate,
        shortcuts,
        render_error=failure_at,
        on_open=tuple(state.open for state in opened.values() if Role.GATEWAY in roles),
        on_close=(app.state.followers.close, *(state.close for state in opened.values()), trainers.close),
    )


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, TrainmasterError)
    return _failure(request, error)


async def _refuse_parameters(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = []
    for found in error.errors():
        field = str(found["loc"][1]) if len(found["loc"]) > 1 else "request"
        message = found["msg"].removeprefix("Input ").replace("should be", "must be", 1)  # as our other messages
        problems.append(Problem(field=field, message=message))
    return _failure(request, SpecError(problems))


async def _refuse_route(request: Request, error: Exception) -> Response:
    """Answer what the router itself refuses: an unknown address or method."""
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return _failure(request, WrongMethodError(), {"Allow": ", ".join(_methods(request))})
    if error.status_code == HTTPStatus.NOT_FOUND:
        path = str(request.scope["path"])
        known = (found for door in DOORS if door.absent and (found := door.absent(path)))
        return _failure(request, next(known, UnknownRouteError()))
    return _failure(request, InternalError())


def _methods(request: Request) -> list[str]:
    """The methods that an address accepts; several routes may share it."""
    return [
        method
        for method in gateway.METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in request.app.routes)
    ]


async def _fail(request: Request, error: Exception) -> Response:  # noqa: ARG001 - logged where it is caught
    return _failure(request, InternalError())


def _failure(request: Request, error: TrainmasterError, headers: Mapping[str, str] | None = None) -> Response:
    return failure_at(str(request.scope["path"]), error, request_id_of(request), headers)


def failure_at(
    path: str, error: TrainmasterError, request_id: str, headers: Mapping[str, str] | None = None
) -> Response:
    """The response to a refused request: in the form of the door that has the path, or in the server's own envelope."""
    for door in DOORS:
        if door.failure and (response := door.failure(path, error, headers)):
            return response
    return failure(error, request_id, headers)

"""How the door's routes are made: declared one by one with who answers, so that a page can list them.

Public clients retry what they take for a fault of the moment, which includes 409: what will not get better is refused
with 400 here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from fastapi import APIRouter, Request, Response

from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.errors import ConflictError, RefusedError
from trainmaster.server.doors.tinker.connections import BrokenOffError
from trainmaster.server.doors.tinker.door import TinkerDoor, door_of
from trainmaster.server.http.auth import Principal, guard, require
from trainmaster.server.http.errors import BadGatewayError
from trainmaster.server.http.router import Handler

PREFIX = "/api/v1"

Endpoint = Callable[[Request, TinkerDoor, Principal], Awaitable[Response]]


class By(StrEnum):
    """Who answers."""

    SERVER = "server"
    TRAINER = "trainer"
    REFUSED = "refused"
    UNUSED = "unused"  # clients ask for it where they are told to, and here they are not


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorRoute:
    """One route of the door."""

    method: str
    path: str
    by: By
    note: str
    """What there is to know; of a refused one, why."""
    scope: KeyScope
    handler: Handler


ROUTES: list[DoorRoute] = []
"""All of them, in the order of their declaration."""


def answer(
    method: str, path: str, scope: KeyScope, *, by: By = By.SERVER, note: str = ""
) -> Callable[[Endpoint], Endpoint]:
    """Declare the endpoint of a route."""

    def declare(endpoint: Endpoint) -> Endpoint:
        handler = _handler(endpoint, scope)
        ROUTES.append(DoorRoute(method=method, path=path, by=by, note=note, scope=scope, handler=handler))
        return endpoint

    return declare


def router() -> APIRouter:
    """All routes, as the application takes them."""
    made = APIRouter(prefix=PREFIX, include_in_schema=False)  # the protocol is described by its clients
    for route in ROUTES:
        made.add_api_route(route.path, route.handler, methods=[route.method], name=f"tinker {route.path}")
    return made


def shortcuts() -> dict[tuple[str, str], Handler]:
    """The routes without a parameter, which need no router: most of them are asked for many times a second."""
    return {(route.method, PREFIX + route.path): route.handler for route in ROUTES if "{" not in route.path}


def _handler(endpoint: Endpoint, scope: KeyScope) -> Handler:
    @guard
    async def handler(request: Request) -> Response:
        principal = require(request, scope)
        try:
            return await endpoint(request, door_of(request), principal)
        except BrokenOffError as error:
            raise BadGatewayError(str(error)) from None
        except ConflictError as error:
            raise RefusedError(error.message) from None

    handler.__name__ = getattr(endpoint, "__name__", "handler")
    return handler

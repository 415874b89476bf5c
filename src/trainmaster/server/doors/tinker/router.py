"""The table of the Tinker door's routes, which also lists who answers each of them; small requests and answers.

Public clients retry 409, so a conflict that will not go away gets 400.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.errors import ConflictError, Problem, RefusedError, SpecError
from trainmaster.server.core.spec.documents import parse
from trainmaster.server.http.proxy import BrokenOffError
from trainmaster.server.doors.tinker.door import TinkerDoor, door_of
from trainmaster.server.doors.tinker.names import Category, failure_id
from trainmaster.server.http.auth import Principal, guard, require
from trainmaster.server.http.errors import BadGatewayError
from trainmaster.server.http.requests import parse_json, read_body
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


MAX_SMALL_BYTES = 1 << 20
"""Of requests that are read here: a name, a path, some metadata."""
MAX_PAGE = 1000
_MOST_DIGITS = 12
_LONGEST_MESSAGE = 4096
"""Of a failure whose future's id holds it."""

ModelT = TypeVar("ModelT", bound=BaseModel)


async def read(request: Request, model: type[ModelT]) -> ModelT:
    """A small request.

    Raises:
        SpecError: it has a wrong shape or value.
    """
    return parse(model, await read_document(request))


async def read_document(request: Request) -> dict[str, Any]:
    """The object that a small request holds; nothing stands for an empty one.

    Raises:
        SpecError: it is none.
    """
    body = await read_body(request, MAX_SMALL_BYTES)
    document = parse_json(body) if body.strip() else {}
    if not isinstance(document, dict):
        raise SpecError([Problem(field="body", message="must be an object")])
    return document


def page_of(request: Request, default: int) -> tuple[int, int]:
    """The limit and the offset that a list is asked for with.

    Raises:
        SpecError: one is no number, or out of bounds.
    """
    found = []
    for name, usual, low, high in (("limit", default, 1, MAX_PAGE), ("offset", 0, 0, 2**31 - 1)):
        said = request.query_params.get(name, str(usual))
        if not said.isdecimal() or len(said) > _MOST_DIGITS or not low <= int(said) <= high:
            raise SpecError([Problem(field=name, message=f"must be from {low} to {high}")])
        found.append(int(said))
    return found[0], found[1]


def ok(document: object, status: int = HTTPStatus.OK) -> Response:
    """An answer as JSON, without an envelope."""
    return Response(json.dumps(document), status_code=status, media_type="application/json")


def failed(message: str, category: str) -> Response:
    """The answer of a future that failed."""
    return ok({"error": message, "category": category})


def try_again(request_id: str, *, queue_state: str = "active", reason: str | None = None) -> Response:
    """The answer of a future that is pending: 408, as clients log a warning for each that comes with 200."""
    document = {"type": "try_again", "request_id": request_id, "queue_state": queue_state}
    return ok({**document, "queue_state_reason": reason} if reason else document, HTTPStatus.REQUEST_TIMEOUT)


def accepted_failure(message: str, category: Category, **fields: Any) -> Response:
    """Take a request that has failed already: its sender learns it from the future, where it looks for errors."""
    return ok({"request_id": failure_id(message[:_LONGEST_MESSAGE], category), **fields})

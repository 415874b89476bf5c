"""The Tinker door's routes, and who answers or refuses each. Clients retry 409, so a lasting conflict gets 400."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.errors import ConflictError, RefusedError
from trainmaster.server.core.spec.documents import parse
from trainmaster.server.doors.bodies import IncomingBody
from trainmaster.server.doors.futures import MAX_SMALL_BYTES, Category, accepted_failure, ok
from trainmaster.server.doors.tinker.door import TinkerDoor, door_of
from trainmaster.server.http.auth import Principal, guard, require
from trainmaster.server.http.errors import BadGatewayError, wrong
from trainmaster.server.http.proxy import BrokenOffError
from trainmaster.server.http.requests import parse_json, read_body
from trainmaster.server.http.router import Handler

PREFIX = "/api/v1"
MAX_PAGE = 1000
_MAX_DIGITS = 12

Endpoint = Callable[[Request, TinkerDoor, Principal], Awaitable[Response]]
ModelT = TypeVar("ModelT", bound=BaseModel)


class AnsweredBy(StrEnum):
    SERVER = "server"
    TRAINER = "trainer"
    REFUSED = "refused"
    UNUSED = "unused"  # clients call it only when told to, and this server never tells them


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorRoute:
    method: str
    path: str
    by: AnsweredBy
    note: str
    """For the compatibility page; of a refused route, why it is."""
    scope: KeyScope
    handler: Handler


ROUTES: list[DoorRoute] = []


def answer(
    method: str, path: str, scope: KeyScope, *, by: AnsweredBy = AnsweredBy.SERVER, note: str = ""
) -> Callable[[Endpoint], Endpoint]:
    def declare(endpoint: Endpoint) -> Endpoint:
        handler = _handler(endpoint, scope)
        ROUTES.append(DoorRoute(method=method, path=path, by=by, note=note, scope=scope, handler=handler))
        return endpoint

    return declare


def api_router() -> APIRouter:
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


async def read(request: Request, model: type[ModelT]) -> ModelT:
    return parse(model, await read_document(request))


async def read_document(request: Request) -> dict[str, Any]:
    """The object in a small body; empty where there is no body. Raises SpecError where it is something else."""
    body = await read_body(request, MAX_SMALL_BYTES)
    document = parse_json(body) if body.strip() else {}
    if not isinstance(document, dict):
        raise wrong("body", "must be an object")
    return document


def page_of(request: Request, default: int) -> tuple[int, int]:
    """The limit and the offset of a list. Raises SpecError where one is no number, or out of bounds."""
    found = []
    for name, usual, low, high in (("limit", default, 1, MAX_PAGE), ("offset", 0, 0, 2**31 - 1)):
        given = request.query_params.get(name, str(usual))
        if not given.isdecimal() or len(given) > _MAX_DIGITS or not low <= int(given) <= high:
            raise wrong(name, f"must be from {low} to {high}")
        found.append(int(given))
    return found[0], found[1]


REFUSED = {
    ("GET", "/audit"): "this server keeps no audit log; GET /v1/events lists everything that happened to jobs",
    ("GET", "/billing/usage/events"): "nothing is billed here; `trainmaster usage` shows GPU-hours and CPU-hours",
    ("POST", "/auth/token"): "this server accepts keys directly; there are no tokens to exchange them for",
    ("DELETE", "/auth/apikey/me"): "a key cannot revoke itself here; use `trainmaster keys revoke`",
    ("POST", "/copy_weights"): "this server does not copy weights; publish them and load them by their path",
}
_NO_TRACES = "this server keeps no traces; `trainmaster metrics JOB` shows what the trainer measures"
_NO_CUSTOM_LOSSES = "custom losses run in the client"


def _refuse(method: str, path: str, why: str, by: AnsweredBy = AnsweredBy.REFUSED) -> None:
    @answer(method, path, KeyScope.VIEW, by=by, note=why)
    async def refuse(request: Request, door: TinkerDoor, principal: Principal) -> Response:  # noqa: ARG001
        raise RefusedError(why)


for (_method, _path), _why in REFUSED.items():
    _refuse(_method, _path, _why)
_refuse("POST", "/join_sampling_session", "copies of a sampling client choose their own numbers", AnsweredBy.UNUSED)


@answer("GET", "/sessions/{session_id}/trace_export", KeyScope.VIEW, by=AnsweredBy.REFUSED, note=_NO_TRACES)
async def trace_export(request: Request, door: TinkerDoor, principal: Principal) -> Response:  # noqa: ARG001
    """Clients poll until there is a trace, or until they are told that there will be none."""
    return ok({"status": "failed", "error": _NO_TRACES})


@answer("POST", "/create_custom_loss", KeyScope.MANAGE, by=AnsweredBy.UNUSED, note=_NO_CUSTOM_LOSSES)
async def create_custom_loss(request: Request, door: TinkerDoor, principal: Principal) -> Response:  # noqa: ARG001
    """Refused through its future, where clients look for errors."""
    async with IncomingBody(request, principal.account_id) as body:
        await body.drain()
    return accepted_failure(_NO_CUSTOM_LOSSES, Category.USER)

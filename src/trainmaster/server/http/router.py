"""How routes are made: strict about query parameters, and with their error answers in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from http import HTTPStatus
from typing import Any, ClassVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from trainmaster.server.core.errors import Problem, SpecError, nearest, shown
from trainmaster.server.core.spec.problems import MAX_PROBLEMS
from trainmaster.server.http.envelope import ErrorEnvelope
from trainmaster.server.http.sse import EVENT_STREAM

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
QuickHandler = Callable[[Request], Coroutine[Any, Any, Response | None]]
"""Answers a request, or leaves it to the route by returning None."""

_MEANINGS = {
    HTTPStatus.BAD_REQUEST: "Well-formed, but refused.",
    HTTPStatus.UNAUTHORIZED: "No credentials, or wrong ones.",
    HTTPStatus.FORBIDDEN: "The key lacks a scope.",
    HTTPStatus.NOT_FOUND: "There is no such thing, or it is not yours to see.",
    HTTPStatus.CONFLICT: "Not now.",
    HTTPStatus.GONE: "It has ended.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The body is too large.",
    HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE: "The file is shorter than that.",
    HTTPStatus.UNPROCESSABLE_ENTITY: "A wrong shape or value; the details name the fields.",
    HTTPStatus.TOO_MANY_REQUESTS: "Too many requests with this key; wait for `retry_after` seconds.",
    HTTPStatus.BAD_GATEWAY: "The service broke off.",
    HTTPStatus.SERVICE_UNAVAILABLE: "Not available now.",
}
_ALWAYS = (
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.UNPROCESSABLE_ENTITY,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.SERVICE_UNAVAILABLE,
)

REQUEST_MODELS: dict[str, type[BaseModel]] = {}
"""The models of request bodies that we read ourselves; the OpenAPI document takes their schemas from here."""


class StrictRoute(APIRoute):
    """A route that refuses query parameters which it does not know."""

    prefixes: ClassVar[tuple[str, ...]] = ()
    """Beginnings of names that are known too."""

    def get_route_handler(self) -> Handler:
        """The route's handler, behind the check."""
        return self._checked(super().get_route_handler())

    def _checked(self, handler: Handler) -> Handler:
        known = {field.alias for field in self.dependant.query_params}

        async def checked(request: Request) -> Response:
            if request.scope["query_string"]:
                refuse_unknown(request.query_params, known, self.prefixes)
            return await handler(request)

        return checked


class RawRoute(StrictRoute):
    """A route whose endpoint takes the request and nothing else: no dependency is solved, which is faster."""

    def get_route_handler(self) -> Handler:
        """The endpoint itself, behind the check."""
        endpoint: Handler = self.endpoint
        return self._checked(endpoint)


def refuse_unknown(names: Iterable[str], known: Iterable[str], prefixes: tuple[str, ...] = ()) -> None:
    """Raise SpecError when one of the query parameters is not known."""
    names_known = sorted(known)
    unknown = [name for name in names if name not in names_known and not (prefixes and name.startswith(prefixes))]
    problems = []
    for name in unknown[:MAX_PROBLEMS]:
        near = nearest(name, names_known)
        message = f"unknown parameter; did you mean '{near}'?" if near else "unknown parameter; leave it out"
        problems.append(Problem(field=shown(name), message=message))
    if problems:
        raise SpecError(problems)


def errors(*statuses: HTTPStatus) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route, for its `responses`; those that every route has are added."""
    return {int(status): {"model": ErrorEnvelope, "description": _MEANINGS[status]} for status in (*statuses, *_ALWAYS)}


def stream_too() -> dict[int | str, dict[str, Any]]:
    """For the `responses` of a route that also answers with a stream of events."""
    schema = {
        "type": "object",
        "description": "One event of a stream of server-sent events.",
        "properties": {
            "id": {"type": "string", "description": "The cursor after it, for `Last-Event-ID`."},
            "event": {"type": "string", "description": "What it is; `end` is the last but one."},
            "data": {"type": "string", "description": "A JSON document, or `[DONE]` at the very end."},
        },
    }
    return {int(HTTPStatus.OK): {"content": {EVENT_STREAM: {"schema": schema}}}}


def body(model: type[BaseModel], *, required: bool = False) -> dict[str, Any]:
    """The request body of a route that reads it itself, for its `openapi_extra`."""
    REQUEST_MODELS[model.__name__] = model
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


IDEMPOTENCY_PARAMETER: dict[str, Any] = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "The same key with the same request has an effect once; the answer to a repetition says "
    "`Idempotent-Replayed: true`.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": r"^[!-~]([ -~]*[!-~])?$"},
}

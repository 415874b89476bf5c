"""Route classes that check query parameters, shared parameter types, and the OpenAPI document."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from http import HTTPStatus
from typing import Annotated, Any, ClassVar

from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel, StringConstraints
from pydantic.json_schema import models_json_schema

from trainmaster.server.core.errors import Problem, SpecError, nearest, shown
from trainmaster.server.core.fields import Matches
from trainmaster.server.core.spec.problems import MAX_PROBLEMS
from trainmaster.server.http.envelope import ErrorEnvelope, Ok
from trainmaster.server.http.followers import EVENT_STREAM
from trainmaster.server.http.requests import ALIAS, PREFIX

PlainText = Annotated[str, StringConstraints(max_length=4096, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""Text without control characters."""
PageToken = Annotated[PlainText | None, Query(description="From the page before.")]
NO_NUL = Matches(r"[^\x00]*", "must not hold a NUL character")
"""Text that every database accepts."""
MAX_JOB_ID = 256
JobId = Annotated[str, Path(description="The job's id or handle.", min_length=1, max_length=MAX_JOB_ID)]
Sha256 = Annotated[str, Path(description="The SHA-256 of the content, in hexadecimal.", pattern=r"^[0-9a-f]{64}$")]
MAX_OFFSET = 2**62
"""More than any file or table will ever have, and small enough for every database."""
BINARY = "application/octet-stream"
BINARY_CONTENT: dict[str, Any] = {BINARY: {"schema": {"type": "string", "format": "binary"}}}
"""For `content` of a body or an answer in the OpenAPI document."""

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
QuickHandler = Callable[[Request], Coroutine[Any, Any, Response | None]]
"""Answers a request, or returns None to leave it to the route."""

_MEANINGS: dict[int, str] = {
    HTTPStatus.BAD_REQUEST: "Well-formed, but refused.",
    HTTPStatus.UNAUTHORIZED: "No credentials, or wrong ones.",
    HTTPStatus.FORBIDDEN: "The key lacks a scope.",
    HTTPStatus.NOT_FOUND: "Not found, or not visible to this key.",
    HTTPStatus.CONFLICT: "Not now.",
    HTTPStatus.GONE: "It has ended.",
    HTTPStatus.PRECONDITION_FAILED: "It has another version.",
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

Responses = dict[int | str, dict[str, Any]]

REQUEST_MODELS: dict[str, type[BaseModel]] = {}
"""The models of request bodies that routes read themselves, for the OpenAPI document."""


class StrictRoute(APIRoute):
    """A route that refuses unknown query parameters."""

    prefixes: ClassVar[tuple[str, ...]] = ()
    """Prefixes of names that are known, too."""

    def get_route_handler(self) -> Handler:
        return self._checked(super().get_route_handler())

    def _checked(self, handler: Handler) -> Handler:
        known = _query_parameters(self.dependant)

        async def checked(request: Request) -> Response:
            if request.scope["query_string"]:
                refuse_unknown(request.query_params, known, self.prefixes)
            return await handler(request)

        return checked


def _query_parameters(dependant: Dependant) -> set[str]:
    return {field.alias for field in dependant.query_params}.union(*map(_query_parameters, dependant.dependencies))


class RawRoute(StrictRoute):
    """A route whose endpoint takes only the request; it is faster, as no dependencies are solved."""

    def get_route_handler(self) -> Handler:
        endpoint: Handler = self.endpoint
        return self._checked(endpoint)


def refuse_unknown(names: Iterable[str], known: Iterable[str], prefixes: tuple[str, ...] = ()) -> None:
    names_known = sorted(known)
    unknown = [name for name in names if name not in names_known and not (prefixes and name.startswith(prefixes))]
    problems = []
    for name in unknown[:MAX_PROBLEMS]:
        near = nearest(name, names_known)
        message = f"unknown parameter; did you mean '{near}'?" if near else "unknown parameter; leave it out"
        problems.append(Problem(field=shown(name), message=message))
    if problems:
        raise SpecError(problems)


IDEMPOTENCY_PARAMETER: dict[str, Any] = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "The same key with the same request has an effect once; the answer to a repetition says "
    "`Idempotent-Replayed: true`.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": r"^[!-~]([ -~]*[!-~])?$"},
}
STREAM_TOO: Responses = {
    int(HTTPStatus.OK): {
        "content": {
            EVENT_STREAM: {
                "schema": {
                    "type": "object",
                    "description": "One event of a stream of server-sent events.",
                    "properties": {
                        "id": {"type": "string", "description": "The cursor after it, for `Last-Event-ID`."},
                        "event": {"type": "string", "description": "What it is; `end` is the last but one."},
                        "data": {"type": "string", "description": "A JSON document, or `[DONE]` at the very end."},
                    },
                }
            }
        }
    }
}
"""For `also` of a route that answers with a stream of events, too."""


def errors(*statuses: int) -> Responses:
    """The error answers of a route: of these statuses, and those that every route has."""
    return {int(each): {"model": ErrorEnvelope, "description": _MEANINGS[each]} for each in (*statuses, *_ALWAYS)}


def answers(
    data: Any,
    *statuses: int,
    body: type[BaseModel] | None = None,
    required: bool = False,
    raw_body: dict[str, Any] | None = None,
    keyed: bool = False,
    parameters: Sequence[dict[str, Any]] = (),
    security: Sequence[dict[str, Any]] | None = None,
    also: Responses | None = None,
) -> dict[str, Any]:
    """Keywords for the decorator of a route: what the OpenAPI document says of its answers and of its request.

    `data` is the type of `data` in a good answer, and None where the answer is not JSON, or not always. The route reads
    `body`, `raw_body` and `parameters` itself; a `required` body must not be empty. `statuses` are those of errors,
    beside those that every route may have. `keyed`: the route honours an idempotency key.
    """
    extra: dict[str, Any] = {}
    if body is not None:
        REQUEST_MODELS[body.__name__] = body
        statuses = (*statuses, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        raw_body = {"required": required, "content": {"application/json": {"schema": schema}}}
    if raw_body is not None:
        extra["requestBody"] = raw_body
    if keyed or parameters:
        extra["parameters"] = [*([IDEMPOTENCY_PARAMETER] if keyed else ()), *parameters]
    if security is not None:
        extra["security"] = security
    answer = {"response_class": Response} if data is None else {"response_model": Ok[data]}
    return {**answer, "responses": {**errors(*statuses), **(also or {})}, "openapi_extra": extra or None}


DESCRIPTION = f"""Training jobs: submit, follow and control them.

Every route below `{PREFIX}` is also found below `{PREFIX}{ALIAS}`. A good answer is `{{"status": "ok", "data": ...}}`,
a bad one `{{"status": "error", "error": {{"code", "message", ...}}, "meta": {{"request_id"}}}}`; branch on `code`.
Logs, metrics and events are pages of JSON, or server-sent events for `Accept: text/event-stream`.
"""

_BY_KEY: list[dict[str, Any]] = [{"bearer": []}, {"apiKey": []}]
BY_TOKEN: list[dict[str, Any]] = [{"attemptToken": []}]
BY_RANK_TOKEN: list[dict[str, Any]] = [{"rankToken": []}]
BY_KEY_OR_TOKEN = [*_BY_KEY, *BY_TOKEN]

_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key."},
    "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "An API key."},
    "attemptToken": {"type": "http", "scheme": "bearer", "description": "The token of one attempt's worker."},
    "rankToken": {"type": "http", "scheme": "bearer", "description": "The token of one attempt's ranks."},
}


def install_openapi(app: FastAPI, version: str) -> None:
    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title="Trainmaster", version=version, description=DESCRIPTION, routes=app.routes)
            components = document.setdefault("components", {})
            schemas = components.setdefault("schemas", {})
            schemas.update(_request_schemas())
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            components["securitySchemes"] = _SCHEMES
            document["security"] = _BY_KEY
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _request_schemas() -> dict[str, Any]:
    # Asked for one mode alone, pydantic leaves the mode out of the names.
    _, document = models_json_schema(
        [(model, "validation") for model in REQUEST_MODELS.values()], ref_template="#/components/schemas/{model}"
    )
    schemas: dict[str, Any] = document.get("$defs", {})
    return schemas

"""Reading the small requests of Tinker clients, and answering them."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from trainmaster.server.core.errors import Problem, SpecError
from trainmaster.server.core.spec import parse
from trainmaster.server.doors.tinker.names import Category, failure_id
from trainmaster.server.http.requests import parse_json, read_body

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

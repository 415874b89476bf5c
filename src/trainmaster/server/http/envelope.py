"""JSON answers: the envelope `{"status": "ok", "data": ...}` or `{"status": "error", ...}`, and its values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Generic, Literal, TypeVar, overload

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from trainmaster.server.core.errors import TrainmasterError
from trainmaster.server.http.errors import error_document, retry_after_s, status_of


@overload
def instant(seconds: float) -> datetime: ...
@overload
def instant(seconds: None) -> None: ...
def instant(seconds: float | None) -> datetime | None:
    """A time of ours: shown as ISO 8601, UTC."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def reported_at(seconds: object) -> datetime | None:
    """A time that a job or its worker wrote down; None when it is none."""
    found = number(seconds)
    try:
        return None if found is None else datetime.fromtimestamp(found, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if abs(found) < float("inf") else None


def numbers(values: object) -> dict[str, float | None]:
    """Named numbers."""
    return {clean(name): number(value) for name, value in values.items()} if isinstance(values, dict) else {}


def clean(value: Any) -> Any:
    """A JSON value with nothing in it that JSON cannot carry: no halves of characters, no infinities."""
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case float():
            return number(value)
        case dict():
            return {clean(str(name)): clean(item) for name, item in value.items()}
        case list() | tuple():
            return [clean(item) for item in value]
        case _:
            return value


JSON = "application/json"
REQUEST_ID = "X-Request-Id"

DataT = TypeVar("DataT")


class Wire(BaseModel):
    """A part of an answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Ok(BaseModel, Generic[DataT]):
    """A good answer."""

    model_config = ConfigDict(extra="forbid")

    status: Literal["ok"] = "ok"
    data: DataT


class FieldProblem(Wire):
    """What is wrong with one field."""

    field: str
    message: str


class TransitionDetails(Wire):
    """Why a job's state does not allow an action."""

    status: str
    action: str
    allowed_from: list[str]


class ErrorBody(Wire):
    """What went wrong. Branch on `code`."""

    code: str
    message: str
    retry_after: int | None = Field(default=None, description="Seconds; absent when trying again will not help.")
    details: list[FieldProblem] | TransitionDetails | None = None
    next_offset: int | None = Field(default=None, description="With STREAM_GAP: where the stream ends.")


class Meta(Wire):
    """About the request."""

    request_id: str


class ErrorEnvelope(BaseModel):
    """A bad answer."""

    status: Literal["error"] = "error"
    error: ErrorBody
    meta: Meta


class Nothing(Wire):
    """There is nothing to say but that it worked."""


def ok(data: BaseModel, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None) -> Response:
    """A good answer with `data`."""
    return ok_json(data.model_dump_json().encode(), status, headers)


def ok_json(data: bytes, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None) -> Response:
    """A good answer with data that is JSON already."""
    body = b'{"status":"ok","data":' + data + b"}"
    return Response(body, status_code=status, headers=headers, media_type=JSON)


def encoded(document: Mapping[str, object]) -> bytes:
    """A plain document as the JSON that a model with the same fields would give."""
    return to_json(document, inf_nan_mode="null")


def ok_document(document: object) -> Response:
    """A good answer with a document that exists already."""
    return Response(json.dumps({"status": "ok", "data": document}), media_type=JSON)


def failure(error: TrainmasterError, request_id: str, headers: Mapping[str, str] | None = None) -> Response:
    """The answer to a request that led to `error`."""
    document = {"status": "error", "error": error_document(error), "meta": {"request_id": request_id}}
    return error_response(document, error, status_of(error), headers)


def error_response(
    document: object, error: TrainmasterError, status: HTTPStatus, headers: Mapping[str, str] | None
) -> Response:
    """A document about an error, with the headers that its status calls for."""
    extra = dict(headers or {})
    if (wait_s := retry_after_s(error)) is not None:
        extra["Retry-After"] = str(wait_s)
    if status == HTTPStatus.UNAUTHORIZED:
        extra["WWW-Authenticate"] = "Bearer"
    if status == HTTPStatus.REQUEST_TIMEOUT:
        extra["Connection"] = "close"  # the rest of the body may still come
    return Response(json.dumps(document), status_code=status, headers=extra, media_type=JSON)


def request_id_of(request: Request) -> str:
    """The id under which the server's log has the request."""
    return str(request.scope.get("state", {}).get("request_id", ""))

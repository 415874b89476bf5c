"""JSON answers: the envelope `{"status": "ok", "data": ...}` or `{"status": "error", ...}`, and its values."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Generic, Literal, TypeVar, overload

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from trainmaster.server.core.errors import TrainmasterError
from trainmaster.server.http.errors import error_document, retry_after_s, status_of


@overload
def instant(seconds: float) -> str: ...
@overload
def instant(seconds: None) -> None: ...
def instant(seconds: float | None) -> str | None:
    """A Unix time as ISO 8601, in UTC."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def reported_at(seconds: object) -> str | None:
    """A Unix time that a job or its worker reported, as ISO 8601; None when it is not a time."""
    try:
        return instant(number(seconds))
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
    return {clean(name): number(value) for name, value in values.items()} if isinstance(values, dict) else {}


def clean(value: Any) -> Any:
    """A value without what JSON cannot carry: lone surrogates and infinities."""
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


ResourceT = TypeVar("ResourceT")


def resource(kind: Callable[..., ResourceT], source: object, /, **others: object) -> ResourceT:
    """A resource whose fields are `others` or attributes of `source`; times, `..._at`, become ISO 8601."""

    def value(name: str) -> object:
        if name in others:
            return others[name]
        found = getattr(source, name)
        return instant(found) if name.endswith("_at") else found

    return kind(**{name: value(name) for name in kind.__annotations__})


JSON = "application/json"
REQUEST_ID = "X-Request-Id"

DataT = TypeVar("DataT")


class Ok(BaseModel, Generic[DataT]):
    """A good answer. `DataT` is a `TypedDict`, which takes over the configuration."""

    model_config = ConfigDict(extra="forbid")

    status: Literal["ok"] = "ok"
    data: DataT


class _ErrorPart(BaseModel):
    model_config = ConfigDict(extra="forbid")


class FieldProblemBody(_ErrorPart):
    """What is wrong with one field."""

    field: str
    message: str


class TransitionDetails(_ErrorPart):
    """Why a job's state does not allow an action."""

    status: str
    action: str
    allowed_from: list[str]


class ErrorBody(_ErrorPart):
    """What went wrong. Branch on `code`."""

    code: str
    message: str
    retry_after: int | None = Field(default=None, description="Seconds; absent when trying again will not help.")
    details: list[FieldProblemBody] | TransitionDetails | None = None
    next_offset: int | None = Field(default=None, description="With STREAM_GAP: where the stream ends.")


class Meta(_ErrorPart):
    """About the request."""

    request_id: str


class ErrorEnvelope(BaseModel):
    """A bad answer."""

    status: Literal["error"] = "error"
    error: ErrorBody
    meta: Meta


class Nothing(TypedDict):
    """There is nothing to say but that it worked."""


def ok(data: Mapping[str, object], status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None) -> Response:
    return ok_json(encoded(data), status, headers)


def ok_json(data: bytes, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None) -> Response:
    return Response(b'{"status":"ok","data":' + data + b"}", status_code=status, headers=headers, media_type=JSON)


def encoded(document: Mapping[str, object]) -> bytes:
    """A document as JSON; numbers that are not finite are null."""
    return to_json(document, inf_nan_mode="null")


def ok_document(document: object) -> Response:
    """A good answer with any document, lone surrogates included."""
    return Response(json.dumps({"status": "ok", "data": document}), media_type=JSON)


def failure(error: TrainmasterError, request_id: str, headers: Mapping[str, str] | None = None) -> Response:
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
    return str(request.scope.get("state", {}).get("request_id", ""))

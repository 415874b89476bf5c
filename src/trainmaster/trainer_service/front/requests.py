"""HTTP of the front: what requests say, in headers and bodies, and how answers are written."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import zstandard
from starlette.requests import Request
from starlette.responses import Response

from trainmaster.protocol.documents import is_deeper
from trainmaster.protocol.trainer_requests import (
    DECODED_BYTES,
    DOOR_HEADER,
    FIREWORKS,
    JSON,
    PROTOBUF,
    REFUSAL_HEADER,
    SOURCE_HEADER,
    TINKER,
    PeekError,
    peek_json,
    peek_protobuf,
)
from trainmaster.trainer_service import wire
from trainmaster.trainer_service.front.futures import Future, ResultForm
from trainmaster.trainer_service.front.request_bodies import Received, RequestRefusedError, room
from trainmaster.trainer_service.front.state import Front
from trainmaster.trainer_service.messages import Reply
from trainmaster.trainer_service.schema import shown

METADATA_FIRST_BYTES = 1 << 20
"""Results of this size are announced before they are sent, to clients that ask for that."""
_IN_A_THREAD_BYTES = 1 << 18
"""Results of this size are converted to JSON in a thread."""
_MAX_FIELDS_BYTES = 4 << 20
"""Of a body that is decoded here."""
_MAX_VALUES = 100_000
"""In such a body, as in the server: a decoded value takes a hundred times the length of its text."""
_MAX_DEPTH = 64
"""Of such a body: it is encoded and decoded again on its way to the engine, deep inside other calls."""
_TOO_DEEP = f"the body goes more than {_MAX_DEPTH} levels deep"

_AS_JSON = {ResultForm.PASS: wire.pass_result_as_json, ResultForm.SAMPLE: wire.sample_result_as_json}


def front_of(request: Request) -> Front:
    front: Front = request.app.state.front
    return front


def door_of(request: Request) -> str:
    return TINKER if request.headers.get(DOOR_HEADER) == TINKER else FIREWORKS


def source_of(request: Request) -> str:
    """Where the checkpoint lies that a request names; empty where the server did not say."""
    # Starlette reads headers as Latin-1; this one is UTF-8.
    return request.headers.get(SOURCE_HEADER, "").encode("latin-1").decode("utf-8", "replace")


def refusal_of(request: Request) -> str:
    return unquote(request.headers.get(REFUSAL_HEADER, ""))


def operation_of(request: Request) -> str:
    return str(request.url.path.rpartition("/")[2])


def encoding_of(request: Request) -> str:
    given = request.headers.get("content-encoding", "").strip().lower()
    return "" if given == "identity" else given


async def read_fields(request: Request, front: Front) -> dict[str, Any]:
    """The JSON object in a request's body; empty without one. Raises RequestRefusedError, and as `BodyReader.read`."""
    received = await front.intake.read(request)
    try:
        if received.size > _MAX_FIELDS_BYTES:
            raise RequestRefusedError(f"the body may have {_MAX_FIELDS_BYTES} bytes, and this one has more")
        return _fields_of(received.read(0, received.size))
    finally:
        front.intake.drop(received)


def _fields_of(body: bytes) -> dict[str, Any]:
    if not body:
        return {}
    # Each value is the first in a bracket, or follows a comma.
    if sum(map(body.count, (b",", b"[", b"{"))) > _MAX_VALUES:
        raise RequestRefusedError(f"the body may hold {_MAX_VALUES} values, and this one holds more")
    try:
        fields = json.loads(body)
    except RecursionError:
        raise RequestRefusedError(_TOO_DEEP) from None
    except ValueError as error:
        raise RequestRefusedError(f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestRefusedError(f"the body must be a JSON object, not {shown(fields)}")
    if body.count(b"[") + body.count(b"{") > _MAX_DEPTH and is_deeper(fields, _MAX_DEPTH):
        raise RequestRefusedError(_TOO_DEEP)
    return fields


def peek(received: Received, content_type: str, encoding: str) -> dict[str, Any]:
    """The few members of a body by which it is routed; the engine decodes the rest. Raises RequestRefusedError."""
    try:
        if not encoding:
            look = peek_protobuf if content_type == PROTOBUF else peek_json
            return look(received.read, received.size)
        if encoding != "zstd" or content_type != PROTOBUF:
            raise RequestRefusedError(f"only protobuf may be compressed, and only with zstd, not with {encoding!r}")
        with room():
            compressed = memoryview(received.data) if received.shared is None else received.shared.map()
        with zstandard.ZstdDecompressor().stream_reader(compressed) as stream:
            head = stream.read(DECODED_BYTES)
        return peek_protobuf(lambda offset, count: head[offset : offset + count], len(head))
    except zstandard.ZstdError as error:
        raise RequestRefusedError(f"the body is not compressed with zstd: {error}") from error
    except PeekError as error:
        raise RequestRefusedError(str(error)) from error


async def result(future: Future, outcome: Reply, *, accept: str, metadata_first: bool) -> tuple[Response, bool]:
    """The response that tells an outcome, and whether that is all of it. Protobuf goes first: it is exact and small."""
    if outcome.error:
        return as_json({"error": outcome.error, "category": outcome.category}), True
    if outcome.body is None:
        return as_json(outcome.fields or {}), True
    if metadata_first and len(outcome.body) >= METADATA_FIRST_BYTES:
        return as_json({"status": "complete_metadata", "response_payload_size": len(outcome.body)}), False
    if PROTOBUF in accept:
        return Response(outcome.body, media_type=PROTOBUF), True
    convert = _AS_JSON[future.form]
    if len(outcome.body) < _IN_A_THREAD_BYTES:
        return as_json(convert(outcome.body)), True
    return await asyncio.to_thread(lambda body: as_json(convert(body)), outcome.body), True


def as_json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON for strict parsers: NaN and infinities are strings, as in the JSON form of protobuf."""
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)
    return Response(text, status_code=status, media_type=JSON, headers=dict(headers or {}))


def error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """Always with a body: clients take an error without one for a fault of a proxy."""
    return as_json({"error": message, "message": message}, status, headers)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value

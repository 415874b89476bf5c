"""What a request says of itself: in its address, in its headers, and in its body, whole or peeked at from its ends."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

import zstandard
from starlette.requests import Request
from starlette.responses import Response

from trainmaster.protocol.documents import is_deeper
from trainmaster.trainer_service import wire
from trainmaster.trainer_service.front.futures import Form, Future, Outcome
from trainmaster.trainer_service.front.intake import RefusedError
from trainmaster.trainer_service.front.state import Front
from trainmaster.trainer_service.messages import INLINE_BYTES
from trainmaster.trainer_service.schema import shown

# How an answer is written: protobuf for those who read it, JSON for the others.

METADATA_FIRST_BYTES = 1 << 20
"""Results from here on are announced before they are sent, to clients that mind their memory."""
_IN_A_THREAD_BYTES = 1 << 18
"""Results from here on are turned into JSON beside the event loop."""

_AS_JSON = {Form.PASS: wire.pass_result_as_json, Form.SAMPLE: wire.sample_result_as_json}


async def result(future: Future, outcome: Outcome, *, accept: str, metadata_first: bool) -> tuple[Response, bool]:
    """What a client reads of an outcome, and whether that is all of it.

    A client that takes protobuf and JSON gets protobuf: it is exact, and a fraction of the size.
    """
    if outcome.error:
        return as_json({"error": outcome.error, "category": outcome.category}), True
    if outcome.body is None:
        return as_json(outcome.fields or {}), True
    if metadata_first and len(outcome.body) >= METADATA_FIRST_BYTES:
        return as_json({"status": "complete_metadata", "response_payload_size": len(outcome.body)}), False
    if wire.PROTOBUF in accept:
        return Response(outcome.body, media_type=wire.PROTOBUF), True
    turn = _AS_JSON[future.form]
    if len(outcome.body) < _IN_A_THREAD_BYTES:
        return as_json(turn(outcome.body)), True
    return await asyncio.to_thread(lambda body: as_json(turn(body)), outcome.body), True


def as_json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON that strict parsers read too: numbers that it lacks are strings, as in the JSON form of protobuf."""
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)
    return Response(text, status_code=status, media_type=wire.JSON, headers=dict(headers or {}))


def error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """A refusal; never without a body, which clients would take for a fault of a proxy."""
    return as_json({"error": message, "message": message}, status, headers)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


DOOR = "x-trainmaster-door"
"""Which door the server let a request in by; it takes the header out of what clients send."""
SOURCE = "x-trainmaster-source"
"""Where the checkpoint lies that a request names, as the server found it; likewise."""
REFUSAL = "x-trainmaster-refusal"
"""Why a request cannot be done, where the server knows that, in percent-encoding; likewise."""

_MAX_FIELDS_BYTES = 4 << 20
"""Of a body that is decoded here."""
_MAX_VALUES = 100_000
"""Of what such a body holds, as in the server: each takes a hundred times its length."""
_MAX_DEPTH = 64
"""Of what such a body holds: it is written and read again on its way to the engine, deep inside other calls."""


def front_of(request: Request) -> Front:
    """The front that a request has come to."""
    front: Front = request.app.state.front
    return front


def door_of(request: Request) -> str:
    """`tinker` or `fireworks`."""
    return "tinker" if request.headers.get(DOOR) == "tinker" else "fireworks"


def source_of(request: Request) -> str:
    """Where the checkpoint lies that a request names; empty where the server did not say."""
    # A path in UTF-8, which headers are not read as.
    return request.headers.get(SOURCE, "").encode("latin-1").decode("utf-8", "replace")


def refusal_of(request: Request) -> str:
    """Why the server says that a request cannot be done; empty: it can."""
    return unquote(request.headers.get(REFUSAL, ""))


def operation_of(request: Request) -> str:
    """The last part of the address."""
    return str(request.url.path.rpartition("/")[2])


def content_type_of(request: Request) -> str:
    """What a body is written in: protobuf or JSON."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return wire.PROTOBUF if given in (wire.PROTOBUF, "application/protobuf") else wire.JSON


def encoding_of(request: Request) -> str:
    """What a body is compressed with; empty: nothing."""
    given = request.headers.get("content-encoding", "").strip().lower()
    return "" if given == "identity" else given


async def read_fields(request: Request, front: Front) -> dict[str, Any]:
    """The JSON object that is a request's body; no fields where there is no body.

    Raises:
        RefusedError: it is something else.
        BusyError: there is no room for it now.
        ClientDisconnect: the client left before it was there.
    """
    received = await front.intake.read(request)
    try:
        if received.size > _MAX_FIELDS_BYTES:
            raise RefusedError(f"the body may have {_MAX_FIELDS_BYTES} bytes, and this one has more")
        return fields_of(received.read(0, received.size))
    finally:
        front.intake.drop(received)


def fields_of(body: bytes) -> dict[str, Any]:
    """The members of a JSON object, none where nothing is written.

    Raises:
        RefusedError: it is none, holds too much, or goes too deep.
    """
    if not body:
        return {}
    # A value is the first in a bracket, or comes behind a comma.
    if sum(map(body.count, (b",", b"[", b"{"))) > _MAX_VALUES:
        raise RefusedError(f"the body may hold {_MAX_VALUES} values, and this one holds more")
    try:
        fields = json.loads(body)
    except RecursionError:
        raise RefusedError(_TOO_DEEP) from None
    except ValueError as error:
        raise RefusedError(f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RefusedError(f"the body must be a JSON object, not {shown(fields)}")
    if body.count(b"[") + body.count(b"{") > _MAX_DEPTH and is_deeper(fields, _MAX_DEPTH):
        raise RefusedError(_TOO_DEEP)
    return fields


_TOO_DEEP = f"the body goes more than {_MAX_DEPTH} levels deep"


# Peeking: a few names and numbers from the ends of a body, without decoding what lies between.

Read = Callable[[int, int], bytes]
"""Some bytes of a body, by offset and count; fewer at its end."""

_WINDOW = 4096
"""How much of either end is looked at; the public clients need a few hundred bytes."""
_MAX_FIELDS = 4096
"""More top-level protobuf fields than this are not walked over in search of two that belong in front."""

_VALUE = rb'"[^"\\]*"|-?[0-9][0-9.eE+-]*|true|false|null'
_MEMBER = re.compile(rb'"([^"\\]*)"\s*:\s*(' + _VALUE + rb")\s*")
_MEMBERS = rb'\s*"[^"\\]*"\s*:\s*(?:' + _VALUE + rb")\s*"
_HEAD = re.compile(rb"\s*\{(?:" + _MEMBERS + rb",)+")
_TAIL = re.compile(rb"(?:," + _MEMBERS + rb")+\}\s*\Z")


class PeekError(Exception):
    """The body does not say what it is about."""


def protobuf_fields(read: Read, size: int) -> dict[str, Any]:
    """The `model_id` and `seq_id` of a ForwardBackwardRequest.

    Raises:
        PeekError: it has no such fields in front.
    """
    found: dict[str, Any] = {}
    position = 0
    for _ in range(_MAX_FIELDS):
        if position >= size or len(found) == 2:
            break
        window = read(position, 24)
        tag, at = _varint(window, 0)
        field, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _varint(window, at)
            if field == 2:
                found["seq_id"] = value
            position += at
        elif kind == 2:
            length, at = _varint(window, at)
            position += at
            if field == 1:
                found["model_id"] = _text(read(position, min(length, _WINDOW)))
            position += length
        elif kind in (1, 5):
            position += at + (8 if kind == 1 else 4)
        else:
            raise PeekError("the body is no protobuf message")
    return found


def compressed_protobuf_fields(body: memoryview) -> dict[str, Any]:
    """The same of a body that is compressed with zstd; only its beginning is decompressed.

    Raises:
        PeekError: likewise, or it is not compressed.
    """
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as stream:
            head = stream.read(INLINE_BYTES)
    except zstandard.ZstdError as error:
        raise PeekError(f"the body is not compressed with zstd: {error}") from error
    return protobuf_fields(lambda offset, count: head[offset : offset + count], len(head))


def json_fields(read: Read, size: int) -> dict[str, Any]:
    """The plain top-level members at both ends of a JSON object.

    What lies outside the ends is not looked at. Both ends of an object are outside strings, so that members which
    reach there without a gap, and have no quotes inside, are its own and not of something that it holds.

    Raises:
        PeekError: it is no JSON object; only found out for a small one.
    """
    if size <= INLINE_BYTES:
        try:
            whole = json.loads(read(0, size))
        except (ValueError, RecursionError) as error:
            raise PeekError(f"the body is not JSON: {error}") from error
        if not isinstance(whole, dict):
            raise PeekError("the body is no JSON object")
        return whole
    found: dict[str, Any] = {}
    head = _HEAD.match(read(0, _WINDOW))
    tail = _TAIL.search(read(size - _WINDOW, _WINDOW))
    for members in (head, tail):
        if members is not None:
            for name, value in _MEMBER.findall(members.group()):
                found[name.decode("utf-8", "replace")] = _plain(value)
    return found


def _plain(value: bytes) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
    raise PeekError("the body is no protobuf message")


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise PeekError(f"model_id is no text: {error}") from error

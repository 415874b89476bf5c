"""What a request says of itself: in its address, in its headers, and in a body that is read here."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote

from starlette.requests import Request

from trainmaster.protocol.documents import is_deeper
from trainmaster.trainer_service import wire
from trainmaster.trainer_service.front.refusals import RefusedError
from trainmaster.trainer_service.front.state import Front
from trainmaster.trainer_service.tensors import shown

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

"""How an answer is written: protobuf for those who read it, JSON for the others."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from trainmaster.trainer_service import wire
from trainmaster.trainer_service.front.futures import Form, Future, Outcome

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

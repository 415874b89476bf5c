"""Futures at the doors: what their polls are answered, and futures that have failed before any trainer had them.

Clients look for errors in the future of a request. So a request that cannot be carried out is accepted, with a future
that has failed: its id contains the message, and any server can answer for it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from trainmaster.server.core.errors import SpecError
from trainmaster.server.doors.bodies import is_plain
from trainmaster.server.doors.trainers import TrainerGoneError
from trainmaster.server.http.envelope import JSON
from trainmaster.server.http.proxy import BrokenOffError
from trainmaster.server.http.requests import parse_json

MAX_SMALL_BYTES = 1 << 20
"""Of requests that are decoded at the doors: a name, a path, some metadata."""
BREAK_S = 1.0
"""How long a poll is held whose trainer broke off: by then it is known whether the trainer has ended."""
REGISTERED_WITHIN_S = 10.0
"""What a trainer saved is on record when the leader has read its report: usually at once."""
LOOK_EVERY_S = 0.02
_FAILED = "failed:"
_MAX_MESSAGE = 4096


class Category(StrEnum):
    """Whose fault it is that an operation failed."""

    SERVER = "server"
    USER = "user"


def failure_id(message: str, category: Category) -> str:
    return f"{_FAILED}{category}:{base64.urlsafe_b64encode(message.encode()).decode()}"


def failure_of(request_id: str) -> tuple[str, str] | None:
    """The message and the category of a future that had failed already; None of another one."""
    kind, _, rest = request_id.partition(":")
    category, _, encoded = rest.partition(":")
    if f"{kind}:" != _FAILED:
        return None
    try:
        return base64.urlsafe_b64decode(encoded).decode(), str(Category(category))
    except ValueError:
        return None


def ok(document: object, status: int = HTTPStatus.OK) -> Response:
    return Response(json.dumps(document), status_code=status, media_type=JSON)


def failed(message: str, category: str) -> Response:
    return ok({"error": message, "category": category})


def try_again(request_id: str, *, queue_state: str = "active", reason: str | None = None) -> Response:
    """The answer for a pending future: with 408, as clients log a warning for each that comes with 200."""
    document = {"type": "try_again", "request_id": request_id, "queue_state": queue_state}
    return ok({**document, "queue_state_reason": reason} if reason else document, HTTPStatus.REQUEST_TIMEOUT)


def accepted_failure(message: str, category: Category, **fields: Any) -> Response:
    return ok({"request_id": failure_id(message[:_MAX_MESSAGE], category), **fields})


async def poll(request_id: str, ask: Awaitable[Response], lost: Callable[[str], Awaitable[str]]) -> Response:
    """The answer of the trainer that has a future; `lost` says what becomes of it when that trainer has ended."""
    try:
        return await ask
    except TrainerGoneError as gone:
        return failed(await lost(gone.message), Category.SERVER)
    except BrokenOffError:
        await asyncio.sleep(BREAK_S)
        return try_again(request_id)


async def wait_until(is_registered: Callable[[], Awaitable[bool]]) -> bool:
    """Wait until what a trainer saved is on record: its client may ask for it next. False when that takes too long."""
    deadline = time.monotonic() + REGISTERED_WITHIN_S
    while not await is_registered():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(LOOK_EVERY_S)
    return True


def text_of(body: bytes, member: str) -> str:
    """A text in a small JSON object; empty if there is none, or if it cannot be a name."""
    try:
        document = parse_json(body) if len(body) <= MAX_SMALL_BYTES else None
    except SpecError:
        return ""
    found = document.get(member) if isinstance(document, dict) else None
    return found if isinstance(found, str) and is_plain(found) else ""

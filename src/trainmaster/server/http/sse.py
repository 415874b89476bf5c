"""Server-sent events: how they are written, and the response that carries them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Send

from trainmaster.server.core.errors import TrainmasterError

EVENT_STREAM = "text/event-stream"
HEARTBEAT = b": still here\n\n"
"""A comment: keeps the connection open, and means nothing."""
DONE = b"data: [DONE]\n\n"
"""The last thing in every stream that came to its end."""


def event(kind: str, data: str, cursor: str | int | None = None) -> bytes:
    """One event. `data` is one line; `cursor` is what the client sends as Last-Event-ID to go on after it."""
    head = f"event: {kind}\n" if cursor is None else f"id: {cursor}\nevent: {kind}\n"
    return f"{head}data: {data}\n\n".encode()


def end(status: str, notice: str | None = None) -> bytes:
    """The end of a stream that is complete, with the status of its job, and why it was empty where that needs words."""
    return event("end", json.dumps({"status": status} | ({"notice": notice} if notice else {}))) + DONE


def failed(error: TrainmasterError) -> bytes:
    """The end of a stream that broke: the status was sent long ago."""
    return event("error", json.dumps({"code": error.code, "message": error.message})) + DONE


def wants_events(request: Request) -> bool:
    """Whether the client asks for a stream of events."""
    return EVENT_STREAM in request.headers.get("accept", "")


class EventStream(StreamingResponse):
    """A response that is a stream of events."""

    def __init__(self, content: AsyncGenerator[bytes, None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(content, media_type=EVENT_STREAM, headers=headers)
        self._content = content

    async def stream_response(self, send: Send) -> None:
        """Send the events; whoever leaves in the middle stops following at once."""
        async with contextlib.aclosing(self._content):
            await super().stream_response(send)

"""What every request passes first: an id, the check of its credentials, and the net below everything."""

from __future__ import annotations

import itertools
import json
import logging
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainmaster.api.auth import Gate
from trainmaster.api.context import ApiContext
from trainmaster.api.envelope import REQUEST_ID, failure
from trainmaster.api.errors import InternalError
from trainmaster.api.follow import Followers
from trainmaster.api.routing import Handler
from trainmaster.core.errors import TrainmasterError

_log = logging.getLogger(__name__)
_access = logging.getLogger("trainmaster.api.access")

_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_HEADER = REQUEST_ID.lower().encode()
_RUN = secrets.token_hex(4)
"""Of this process. Random bytes for each request would be dear: to get them, a thread gives way to all others."""
_numbers = itertools.count(1)


class Front:
    """The outermost application."""

    def __init__(
        self, app: ASGIApp, context: ApiContext, followers: Followers, shortcuts: Mapping[tuple[str, str], Handler]
    ) -> None:
        """Stand before `app`; requests with the method and path of a shortcut go straight to its handler."""
        self._app = app
        self._gate = Gate(context)
        self._followers = followers
        self._shortcuts = shortcuts

    def close(self) -> None:
        """Break off what would never end by itself, before the server stops. Called in the event loop."""
        self._followers.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "there are no web sockets here"})
        else:
            await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        request_id = _request_id(scope)
        # A copy: with a lifespan, the server hands every request the same state.
        scope["state"] = {**scope.get("state", {}), "request_id": request_id, "principal": None}
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self._gate.admit(scope, scope["path"])
            shortcut = self._shortcuts.get((scope["method"], scope["path"]))
            if shortcut is None:
                await self._app(scope, receive, answer)
            else:
                scope["app"] = self._app
                response = await shortcut(Request(scope, receive))
                await response(scope, receive, answer)
        except TrainmasterError as error:
            await failure(error, request_id)(scope, receive, answer)
        except ClientDisconnect:
            _log.debug("request %s: the client left in the middle of its body", request_id)
        except Exception:
            _log.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"])
            if not status:
                await failure(InternalError(), request_id)(scope, receive, answer)
        finally:
            if _access.isEnabledFor(logging.DEBUG):
                _access.debug("%s", json.dumps(_line(scope, request_id, status, time.perf_counter() - began)))


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == _HEADER and _SANE_ID.fullmatch(value):
            return str(value, "ascii")
    return f"req-{_RUN}-{next(_numbers)}"


def _line(scope: Scope, request_id: str, status: int, took_s: float) -> dict[str, Any]:
    principal = scope["state"]["principal"]
    return {
        "request_id": request_id,
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "ms": round(took_s * 1000, 2),
        "key": principal.key_id if principal else None,
    }

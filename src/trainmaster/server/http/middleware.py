"""The outermost application: request ids, authentication, shortcuts, unexpected errors, request metrics, access log."""

from __future__ import annotations

import itertools
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainmaster.server.core.errors import TrainmasterError
from trainmaster.server.http.auth import Gate
from trainmaster.server.http.context import ApiContext
from trainmaster.server.http.envelope import REQUEST_ID
from trainmaster.server.http.errors import InternalError
from trainmaster.server.http.requests import ALIAS, PREFIX
from trainmaster.server.http.router import Handler, QuickHandler
from trainmaster.server.settings import telemetry
from trainmaster.server.settings.telemetry import METERS

_log = logging.getLogger(__name__)

_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_HEADER = REQUEST_ID.lower().encode()
_RUN = secrets.token_hex(4)
"""Of this process. Random bytes for each request would be slow: reading them releases the interpreter lock."""
_numbers = itertools.count(1)
_SECOND = f"{PREFIX}{ALIAS}/"
_BELOW = f"{PREFIX}/"
ErrorRenderer = Callable[[str, TrainmasterError, str], Response]
"""Makes the answer to a failed request from its path, the error and the request's id: doors have forms of their own."""
NO_ROUTE = "none"
"""Counts requests for unknown routes: paths that clients make up must not become labels of metrics."""


class ServerApp:
    def __init__(
        self,
        app: ASGIApp,
        context: ApiContext,
        gate: Gate,
        shortcuts: Mapping[tuple[str, str], Handler | QuickHandler],
        *,
        render_error: ErrorRenderer,
        on_open: Sequence[Callable[[], None]],
        on_close: Sequence[Callable[[], None]],
    ) -> None:
        """Requests of a shortcut go to its handler first; to `app` if it returns None. Paths may end in `{name}`."""
        self._app = app
        self._gate = gate
        self._render_error = render_error
        self._on_open = on_open
        self._on_close = on_close
        self._shortcuts = {key: handler for key, handler in shortcuts.items() if not key[1].endswith("}")}
        self._shortcuts_below = {}
        for (method, route), handler in shortcuts.items():
            parent, _, last = route.rpartition("/")
            if last.endswith("}"):
                self._shortcuts_below[method, parent] = (route, last[1:-1], handler)
        self._behind_proxy = context.settings.behind_proxy
        self._access_level = telemetry.access_level(context.settings)

    def open(self) -> None:
        """Start background work. Called in the event loop."""
        for begin in self._on_open:
            begin()

    def close(self) -> None:
        """End streams and background work before the server stops. Called in the event loop."""
        for close in self._on_close:
            close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "there are no web sockets here"})
        else:
            await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        request_id = _request_id(scope)
        asked = scope["path"]
        if asked.startswith(_SECOND):  # one set of routes serves both prefixes
            scope["path"] = _BELOW + asked.removeprefix(_SECOND)
        # A copy: with a lifespan, the server hands every request the same state.
        scope["state"] = {**scope.get("state", {}), "request_id": request_id, "principal": None}
        telemetry.belong_to({"request_id": request_id})
        if self._behind_proxy:
            _believe_proxy(scope)
        status, route = 0, ""

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                METERS.answered(*_counted_as(scope, route), status, time.perf_counter() - began)
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self._gate.admit(scope, scope["path"])
            if principal := scope["state"]["principal"]:
                telemetry.belong_to(
                    {"request_id": request_id, "key": principal.key_id, "account": principal.account_id}
                )
            shortcut, route = self._shortcut(scope)
            with self._gate.under_way(principal):
                response = None
                if shortcut is not None:
                    scope["app"] = self._app
                    response = await shortcut(Request(scope, receive))
                if response is not None:
                    await response(scope, receive, answer)
                else:
                    route = ""  # the router will say
                    await self._app(scope, receive, answer)
        except TrainmasterError as error:
            await self._render_error(scope["path"], error, request_id)(scope, receive, answer)
        except ClientDisconnect:
            _log.debug("the client left in the middle of its body")
        except Exception:
            _log.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"])
            if not status:
                await self._render_error(scope["path"], InternalError(), request_id)(scope, receive, answer)
        finally:
            if telemetry.ACCESS.isEnabledFor(self._access_level):
                method, took_ms = scope["method"], round((time.perf_counter() - began) * 1000, 2)
                fields = {"method": method, "path": asked, "status": status, "ms": took_ms}
                telemetry.ACCESS.log(self._access_level, "%s %s %d", method, asked, status, extra={"fields": fields})

    def _shortcut(self, scope: Scope) -> tuple[Handler | QuickHandler | None, str]:
        """The shortcut of a request, if any, and the name of its route."""
        method, path = scope["method"], scope["path"]
        if (handler := self._shortcuts.get((method, path))) is not None:
            return handler, path
        parent, _, last = path.rpartition("/")
        if last and (below := self._shortcuts_below.get((method, parent))) is not None:
            route, parameter, handler = below
            scope["path_params"] = {parameter: last}
            return handler, route
        return None, ""


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == _HEADER and _SANE_ID.fullmatch(value):
            return str(value, "ascii")
    return f"req-{_RUN}-{next(_numbers)}"


def _believe_proxy(scope: Scope) -> None:
    """Take the client's address and scheme from the proxy's headers; the proxy added the last address itself."""
    for name, value in scope["headers"]:
        if name == b"x-forwarded-for":
            scope["client"] = (str(value, "latin-1").rpartition(",")[2].strip(), 0)
        elif name == b"x-forwarded-proto" and value in (b"http", b"https"):
            scope["scheme"] = str(value, "ascii")


def _counted_as(scope: Scope, route: str) -> tuple[str, str]:
    """The method and route that an answer is counted under."""
    route = route or getattr(scope.get("route"), "path", "")
    if not route:
        return "", NO_ROUTE
    # The framework names a route with its prefix or without, by its version.
    bare = route.removeprefix(PREFIX)
    return scope["method"], PREFIX + bare if scope["path"].startswith(_BELOW) else bare

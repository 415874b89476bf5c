"""Nobody but the server: others on this machine can reach the port, and would be asked for no key here."""

from __future__ import annotations

import hmac
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from trainmaster.protocol.environment import TOKEN_HEADER
from trainmaster.trainer_service.front.negotiation import error

_HEADER = TOKEN_HEADER.encode()
_REFUSAL = "this is a trainer's own port: go through the server, which knows your key"


class Guarded:
    """An application for those who know a token."""

    def __init__(self, app: ASGIApp, *, token: str, open_to_all: frozenset[str]) -> None:
        """Guard `app`, but for the addresses that are `open_to_all`."""
        self._app = app
        self._token = token.encode()
        self._open = open_to_all

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "http" and scope["path"] not in self._open and not self._knows(scope):
            await error(HTTPStatus.UNAUTHORIZED, _REFUSAL)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        sent = next((value for name, value in scope["headers"] if name == _HEADER), b"")
        return hmac.compare_digest(sent, self._token)

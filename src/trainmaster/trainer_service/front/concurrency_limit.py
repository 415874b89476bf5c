"""So many requests at a time, and no more: a burst of a thousand samples must not keep a heartbeat waiting."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

REQUESTS_A_ROUND = 8
"""A request takes about a quarter of a millisecond of the event loop; a round is what the loop does before it looks
for new ones."""


class Paced:
    """An application whose requests begin a few in each round of the event loop, in the order in which they came."""

    def __init__(self, app: ASGIApp, *, urgent: frozenset[str]) -> None:
        """Pace `app`, but not the requests to the addresses that are `urgent`."""
        self._app = app
        self._urgent = urgent
        self._places = REQUESTS_A_ROUND
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._counting = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request when it is its turn."""
        if scope["type"] == "http" and scope["path"] not in self._urgent:
            await self._turn()
        await self._app(scope, receive, send)

    async def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._counting:
            self._counting = True
            loop.call_soon(self._next_round)
        if self._places:
            self._places -= 1
        else:
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append(turn)
            await turn

    def _next_round(self) -> None:
        self._places = REQUESTS_A_ROUND
        while self._waiting and self._places:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._places -= 1
        # Rounds are counted until one passes in which nobody begins.
        self._counting = self._places < REQUESTS_A_ROUND
        if self._counting:
            asyncio.get_running_loop().call_soon(self._next_round)

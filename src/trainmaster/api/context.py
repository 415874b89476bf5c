"""What the routes need of the rest of the server."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from trainmaster import __version__
from trainmaster.coordinator.commands import Commands
from trainmaster.storage import Roots
from trainmaster.store.database import Database

API = "api"
GATEWAY = "gateway"

T = TypeVar("T")


def _no_hint(subject: str) -> None:
    """Whoever is not told finds out by looking."""


def _fine() -> str | None:
    """Nothing is known to be wrong."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiContext:
    """Handed to `create_app`; the same for every request."""

    database: Database
    commands: Commands
    roots: Roots
    roles: frozenset[str] = frozenset({API, GATEWAY})
    """`api`: all routes but the gateway's; `gateway`: those."""
    hint: Callable[[str], None] = _no_hint
    """Called with an attempt's id after its worker reported something."""
    healthy: Callable[[], str | None] = _fine
    """None while the rest of this process does its work; else what keeps it from that. Must not wait."""
    clock: Callable[[], float] = time.time
    version: str = __version__
    max_blob_bytes: int = 2 << 30

    async def read(self, question: Callable[[Connection], T]) -> T:
        """Ask the database something, without holding up other requests."""

        def ask() -> T:
            with self.database.read() as connection:
                return question(connection)

        return await run_in_threadpool(ask)


async def _context(request: Request) -> ApiContext:
    return context_of(request)


def context_of(request: Request) -> ApiContext:
    """The context of the application that got the request."""
    context: ApiContext = request.app.state.context
    return context


Context = Annotated[ApiContext, Depends(_context)]
"""The context, as a parameter of a route."""

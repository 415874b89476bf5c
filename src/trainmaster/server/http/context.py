"""What the routes need of the rest of the server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from trainmaster import __version__
from trainmaster.server.coordinator.base_models import BaseModels
from trainmaster.server.coordinator.commands import Commands
from trainmaster.server.coordinator.data_checks import DataChecks
from trainmaster.server.coordinator.explain import Explainer
from trainmaster.server.coordinator.operator_files import RuntimeFiles
from trainmaster.server.coordinator.promotion import Promotions
from trainmaster.server.coordinator.retention import Collector
from trainmaster.server.coordinator.vault import Vault
from trainmaster.server.coordinator.webhook_subscriptions import Subscriptions
from trainmaster.server.core.accounts import Account
from trainmaster.server.core.reports import EngineFacts
from trainmaster.server.core.shapes import Shapes
from trainmaster.server.http.token_exchange import TokenExchange
from trainmaster.server.storage import Roots
from trainmaster.server.store.database import Database

API = "api"
GATEWAY = "gateway"

T = TypeVar("T")


def _no_hint(subject: str) -> None:
    """Whoever is not told finds out by looking."""


def _fine() -> str | None:
    """Nothing is known to be wrong."""
    return None


def _leads_not() -> bool:
    """A process without a coordinator never leads."""
    return False


def _no_engine(backend: str) -> EngineFacts | None:  # noqa: ARG001 - the shape of a question
    """A process without a coordinator has no engine either."""
    return None


def _any_account(account: Account) -> None:
    """No machine is known whose users there would have to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiContext:
    """Handed to `create_app`; the same for every request."""

    database: Database
    commands: Commands
    explainer: Explainer
    vault: Vault
    subscriptions: Subscriptions
    collector: Collector
    """Collects what has outlived its job."""
    roots: Roots
    roles: frozenset[str] = frozenset({API, GATEWAY})
    """`api`: all routes but the gateway's; `gateway`: those."""
    hint: Callable[[str], None] = _no_hint
    """Called with an attempt's id after its worker reported something."""
    healthy: Callable[[], str | None] = _fine
    """None while the rest of this process does its work; else what keeps it from that. Must not wait."""
    disks: Mapping[str, Path] = field(default_factory=dict)
    """By what lies there, directories without whose disks the server can do no work."""
    clock: Callable[[], float] = time.time
    version: str = __version__
    max_blob_bytes: int = 2 << 30
    check_account: Callable[[Account], None] = _any_account
    """Raises when the jobs of an account could not run as the user whom it names."""
    token_exchange: TokenExchange | None = None
    """Where tokens come from that a request does not pass on; None: from nowhere."""
    data_checks: DataChecks | None = None
    """Looks at training data; None: nobody does."""
    allow_trust_remote_code: bool = False
    """Whether code that comes with a model may run."""
    leads: Callable[[], bool] = _leads_not
    """Whether this process leads."""
    engine: Callable[[str], EngineFacts | None] = _no_engine
    """What runs the jobs of a backend, asked now; None: nobody but the server, or another server knows."""
    rate_limit_per_s: float = 0.0
    """Requests of one key, in the long run; 0 means no limit."""
    rate_burst: int = 1000
    behind_proxy: bool = False
    """Whether a proxy in front tells by headers who is asking, and how."""
    open_metrics: bool = False
    """Whether the numbers for Prometheus need no key."""
    access_level: int = logging.DEBUG
    """Of the log's lines for each request."""
    models: BaseModels = field(default_factory=BaseModels)
    """What base models are called."""
    shapes: Shapes = field(default_factory=Shapes)
    """The training shapes that there are."""
    runtimes: Callable[[], RuntimeFiles] = RuntimeFiles
    """Reads the training runtimes that lie beside the server."""
    tinker_shape: str = ""
    """The one of trainers for plain Tinker clients; empty: whichever is good enough."""
    tinker_tempered_logprobs: bool = False
    """Whether those trainers give the log-probabilities of what was drawn from, and not the model's own."""
    tinker_silent_s: float = 1800.0
    """When a plain Tinker client is taken for dead that says nothing."""

    @property
    def promotions(self) -> Promotions:
        """Makes models of checkpoints."""
        return Promotions(self.database, self.roots, self.models, clock=self.clock)

    async def read(self, question: Callable[[Connection], T]) -> T:
        """Ask the database something, without holding up other requests."""

        def ask() -> T:
            with self.database.read() as connection:
                return question(connection)

        return await run_in_threadpool(ask)

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Have something written; returns when it is on disk."""
        return await asyncio.wrap_future(self.database.write(work))

    async def change_cluster(self, work: Callable[[Connection], T]) -> T:
        """Write something about nodes or queues, and have the coordinator look at it."""
        changed = await self.write(work)
        self.hint("")
        return changed


async def _context(request: Request) -> ApiContext:
    return context_of(request)


def context_of(request: Request) -> ApiContext:
    """The context of the application that got the request."""
    context: ApiContext = request.app.state.context
    return context


Context = Annotated[ApiContext, Depends(_context)]
"""The context, as a parameter of a route."""

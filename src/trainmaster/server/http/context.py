"""What the routes need of the rest of the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Concatenate, ParamSpec, TypeVar

from fastapi import Depends, Request
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from trainmaster.protocol.launch import Launch
from trainmaster.server.coordinator.base_models import BaseModels
from trainmaster.server.coordinator.clusters import Clusters
from trainmaster.server.coordinator.commands import Commands
from trainmaster.server.coordinator.data_checks import DataChecks
from trainmaster.server.coordinator.explain import Explainer
from trainmaster.server.coordinator.launch import JobSecrets
from trainmaster.server.coordinator.operator_files import RuntimeFiles
from trainmaster.server.coordinator.promotion import Promotions
from trainmaster.server.coordinator.retention import Collector
from trainmaster.server.coordinator.webhook_subscriptions import Subscriptions
from trainmaster.server.core.accounts import Account
from trainmaster.server.core.foreign_jobs import ForeignJobs
from trainmaster.server.core.job import Job
from trainmaster.server.core.reports import EngineFacts
from trainmaster.server.core.shapes import Shapes
from trainmaster.server.http.token_exchange import TokenExchange
from trainmaster.server.settings.settings import Settings
from trainmaster.server.storage import Roots
from trainmaster.server.store.database import Database

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiContext:
    settings: Settings
    database: Database
    commands: Commands
    explainer: Explainer
    vault: JobSecrets
    clusters: Clusters
    worker_package: Callable[[], Path]
    """The worker's archive, for the nodes of clusters."""
    subscriptions: Subscriptions
    collector: Collector
    roots: Roots
    data_checks: DataChecks
    hint: Callable[[str], None] = lambda _: None
    """Called with an attempt's id after its worker reported something."""
    healthy: Callable[[], str | None] = lambda: None
    """None while the rest of this process works; else what is wrong. Must not block."""
    disks: Mapping[str, Path] = field(default_factory=dict)
    """Directories whose disks the server needs, by what they hold."""
    clock: Callable[[], float] = time.time
    check_account: Callable[[Account], None] = lambda _: None
    """Raises when the jobs of an account cannot run as its user."""
    token_exchange: TokenExchange | None = None
    """Gets the tokens that a request does not forward; None: jobs go without."""
    leads: Callable[[], bool] = lambda: False
    engine: Callable[[str], EngineFacts | None] = lambda _: None
    """The engine that runs the jobs of a backend, asked now; None: the server itself, or another server knows."""
    foreign_jobs: Callable[[str], ForeignJobs | None] = lambda _: None
    """What others run on the engine of a backend; None: it shows nothing of that, or this server runs no jobs."""
    render: Callable[[Job, Launch], str | None] = lambda _job, _launch: None
    """What the job's backend would send to its engine; None: this server does not run jobs."""
    models: BaseModels = field(default_factory=BaseModels)
    shapes: Shapes = field(default_factory=Shapes)
    runtimes: Callable[[], RuntimeFiles] = RuntimeFiles

    @property
    def promotions(self) -> Promotions:
        return Promotions(self.database, self.roots, self.models, clock=self.clock)

    async def read(self, question: Callable[Concatenate[Connection, P], T], /, *args: P.args, **others: P.kwargs) -> T:
        """Query the database in a thread: call `question` with a connection and these arguments."""

        def ask() -> T:
            with self.database.read() as connection:
                return question(connection, *args, **others)

        return await run_in_threadpool(ask)

    async def write(self, work: Callable[Concatenate[Connection, P], T], /, *args: P.args, **others: P.kwargs) -> T:
        """Write to the database, as `read` reads; returns when the transaction is on disk."""
        return await asyncio.wrap_future(self.database.write(lambda connection: work(connection, *args, **others)))

    async def change_cluster(
        self, work: Callable[Concatenate[Connection, P], T], /, *args: P.args, **others: P.kwargs
    ) -> T:
        """Write something about nodes or queues, and have the coordinator look at it."""
        changed = await self.write(work, *args, **others)
        self.hint("")
        return changed


async def _context(request: Request) -> ApiContext:
    return context_of(request)


def context_of(request: Request) -> ApiContext:
    context: ApiContext = request.app.state.context
    return context


Context = Annotated[ApiContext, Depends(_context)]

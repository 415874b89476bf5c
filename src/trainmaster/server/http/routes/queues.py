"""Queues: weights, quotas, and the jobs that wait in them."""

from __future__ import annotations

import base64
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import Field, Strict
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from trainmaster.schema.cluster import EntryResource, QueueList, QueuePage, QueueResource
from trainmaster.server.coordinator.explain import QueueEntry
from trainmaster.server.core.fields import Matches, Model, Natural
from trainmaster.server.core.resources import Queue
from trainmaster.server.http.auth import ADMINS_ONLY, Viewer
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import Nothing, Ok, ok
from trainmaster.server.http.requests import read_model
from trainmaster.server.http.router import PlainText, StrictRoute, body, errors
from trainmaster.server.scheduling.obstacles import gpus_of
from trainmaster.server.settings.encryption import Sealer, SealError
from trainmaster.server.store import queues
from trainmaster.server.store.page_tokens import bad_token
from trainmaster.server.store.queues import QueueCounts
from trainmaster.server.store.scope import Scope


class QueueBody(Model):
    """A queue's weight and quota."""

    weight: Annotated[float, Strict(), Field(gt=0, le=1e6)] = Field(
        default=1.0, description="Its share of the cluster, in proportion to the other queues that have work."
    )
    quota_gpus: Natural | None = Field(
        default=None, description="The most GPUs that its jobs may hold at a time; null: no limit."
    )


def queue_resource(queue: Queue, counts: QueueCounts, now: float) -> QueueResource:
    oldest = counts.oldest_queued_at
    return QueueResource(
        name=queue.name,
        weight=queue.weight,
        quota_gpus=queue.quota_gpus,
        depth=counts.depth,
        running=counts.running,
        paused=counts.paused,
        gpus_held=counts.gpus_held,
        oldest_wait_seconds=None if oldest is None else round(max(0.0, now - oldest), 3),
    )


def entry_resource(entry: QueueEntry, scope: Scope, now: float) -> EntryResource:
    job = entry.job
    own = scope.admits(job.account_id)
    estimate = entry.estimated_wait_s
    return EntryResource(
        position=entry.position,
        job_id=job.job_id if own else None,
        name=job.name if own else None,
        priority=job.priority,
        gpus=gpus_of(job),
        wait_seconds=round(max(0.0, now - (job.queued_at or job.created_at)), 3),
        estimated_wait_seconds=None if estimate is None else round(estimate, 3),
        reason=entry.reason if own else None,
    )


router = APIRouter(route_class=StrictRoute, tags=["queues"])

QueueName = Annotated[
    str,
    Path(),
    Matches(
        r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}",
        "a queue's name has letters, digits, '.', '_' and '-', with a letter or digit first, and at most 128 of them",
    ),
]

_EVERYTHING = Scope.everything()


@router.get("/queues", response_model=Ok[QueueList], responses=errors())
async def list_queues(principal: Viewer, context: Context) -> Response:
    """List all queues, with what is in them over all accounts."""
    now = context.clock()

    def find(connection: Connection) -> QueueList:
        counts = queues.counts(connection, _EVERYTHING)
        found = queues.all(connection, principal.scope)
        return QueueList(queues=[queue_resource(queue, counts.get(queue.name, QueueCounts()), now) for queue in found])

    return ok(await context.read(find))


@router.put(
    "/queues/{name}",
    response_model=Ok[QueueResource],
    responses=errors(HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    openapi_extra=body(QueueBody),
    dependencies=ADMINS_ONLY,
)
async def put_queue(request: Request, context: Context, name: QueueName) -> Response:
    """Make a queue, or set its weight and quota."""
    wanted = await read_model(request, QueueBody)
    now = context.clock()

    def change(connection: Connection) -> QueueResource:
        queue = Queue(name=name, weight=wanted.weight, quota_gpus=wanted.quota_gpus)
        queues.put(connection, _EVERYTHING, queue, now)
        return queue_resource(queue, queues.counts(connection, _EVERYTHING, name).get(name, QueueCounts()), now)

    return ok(await context.change_cluster(change))


@router.delete(
    "/queues/{name}",
    response_model=Ok[Nothing],
    responses=errors(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
    dependencies=ADMINS_ONLY,
)
async def delete_queue(context: Context, name: QueueName) -> Response:
    """Remove a queue in which no job waits or runs."""
    now = context.clock()
    await context.change_cluster(lambda connection: queues.remove(connection, _EVERYTHING, name, now))
    return ok(Nothing())


@router.get("/queue", response_model=Ok[QueuePage], responses=errors(HTTPStatus.NOT_FOUND))
async def show_queue(
    principal: Viewer,
    context: Context,
    queue: Annotated[PlainText, Query(description="Which one.")] = queues.DEFAULT,
    page_size: Annotated[int, Query(ge=1, le=100)] = 20,
    page_token: Annotated[PlainText | None, Query(description="From the page before.")] = None,
) -> Response:
    """List the jobs that wait in a queue, in the order of the scheduler, with why and how long they wait."""
    now = context.clock()
    tokens = _Tokens(context.vault.sealer, f"page/{principal.account_id}/{queue}")
    after = tokens.read(page_token) if page_token else None

    def find() -> QueuePage:
        with context.database.read() as connection:
            found = queues.get(connection, principal.scope, queue)
            counts = queues.counts(connection, _EVERYTHING, found.name).get(found.name, QueueCounts())
        page = context.explainer.look_into(principal.scope, found.name, now=now, page_size=page_size, page_token=after)
        return QueuePage(
            queue=found.name,
            depth=counts.depth,
            running=counts.running,
            paused=counts.paused,
            entries=[entry_resource(entry, principal.scope, now) for entry in page.entries],
            next_page_token=tokens.write(page.next_page_token) if page.next_page_token else None,
        )

    return ok(await run_in_threadpool(find))


class _Tokens:
    """Encrypted page tokens: the job at which a page ends may be another account's."""

    def __init__(self, sealer: Sealer, about: str) -> None:
        self._sealer = sealer
        self._about = about

    def write(self, token: str) -> str:
        sealed = self._sealer.seal(token, about=self._about).encode()
        return base64.urlsafe_b64encode(sealed).decode().rstrip("=")

    def read(self, text: str) -> str:
        try:
            sealed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
            return self._sealer.open(sealed, about=self._about)
        except (ValueError, SealError):
            raise bad_token() from None

"""Queues: weights, quotas, and the jobs that wait in them. Usage: what jobs held, and for how long."""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import Field, Strict
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from trainmaster.schema.cluster import EntryResource, QueueList, QueuePage, QueueResource
from trainmaster.schema.reports import Usage, UsageRow
from trainmaster.server.coordinator.explain import QueueEntry
from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.fields import Matches, Model, Natural
from trainmaster.server.core.resources import JobQueue
from trainmaster.server.http.auth import ADMINS_ONLY, Viewer, require
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import Nothing, instant, ok, resource
from trainmaster.server.http.errors import wrong
from trainmaster.server.http.requests import PREFIX, not_a_time, parse_time, read_model
from trainmaster.server.http.router import PageToken, PlainText, StrictRoute, answers
from trainmaster.server.scheduling.obstacles import gpus_of
from trainmaster.server.settings.encryption import Sealer, SealError
from trainmaster.server.store import queues, usage
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


def queue_resource(queue: JobQueue, counts: QueueCounts, now: float) -> QueueResource:
    oldest = counts.oldest_queued_at
    return resource(
        QueueResource,
        counts,
        name=queue.name,
        weight=queue.weight,
        quota_gpus=queue.quota_gpus,
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


router = APIRouter(prefix=PREFIX, route_class=StrictRoute, tags=["queues"])

QueueName = Annotated[
    str,
    Path(),
    Matches(
        r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}",
        "a queue's name has letters, digits, '.', '_' and '-', with a letter or digit first, and at most 128 of them",
    ),
]

_EVERYTHING = Scope.everything()


@router.get("/queues", **answers(QueueList))
async def list_queues(principal: Viewer, context: Context) -> Response:
    """List all queues, with what is in them over all accounts."""
    now = context.clock()

    def find(connection: Connection) -> QueueList:
        counts = queues.counts(connection, _EVERYTHING)
        found = queues.all(connection, principal.scope)
        return QueueList(queues=[queue_resource(queue, counts.get(queue.name, QueueCounts()), now) for queue in found])

    return ok(await context.read(find))


@router.put("/queues/{name}", dependencies=ADMINS_ONLY, **answers(QueueResource, body=QueueBody))
async def put_queue(request: Request, context: Context, name: QueueName) -> Response:
    """Make a queue, or set its weight and quota."""
    wanted = await read_model(request, QueueBody)
    now = context.clock()

    def change(connection: Connection) -> QueueResource:
        queue = JobQueue(name=name, weight=wanted.weight, quota_gpus=wanted.quota_gpus)
        queues.put(connection, _EVERYTHING, queue, now)
        return queue_resource(queue, queues.counts(connection, _EVERYTHING, name).get(name, QueueCounts()), now)

    return ok(await context.change_cluster(change))


@router.delete("/queues/{name}", dependencies=ADMINS_ONLY, **answers(Nothing, 404, 409))
async def delete_queue(context: Context, name: QueueName) -> Response:
    """Remove a queue in which no job waits or runs."""
    await context.change_cluster(queues.remove, _EVERYTHING, name, context.clock())
    return ok(Nothing())


@router.get("/queue", **answers(QueuePage, 404))
async def show_queue(
    principal: Viewer,
    context: Context,
    queue: Annotated[PlainText, Query(description="Which one.")] = queues.DEFAULT,
    page_size: Annotated[int, Query(ge=1, le=100)] = 20,
    page_token: PageToken = None,
) -> Response:
    """List the jobs that wait in a queue, in the order of the scheduler, with why and how long they wait."""
    now = context.clock()
    tokens = _Tokens(context.vault.sealer, f"page/{principal.account_id}/{queue}")
    after = tokens.read(page_token) if page_token else None

    def find() -> QueuePage:
        with context.database.read() as connection:
            found = queues.get(connection, principal.scope, queue)
            counts = queues.counts(connection, _EVERYTHING, found.name).get(found.name, QueueCounts())
        entries, following = context.explainer.look_into(
            principal.scope, found.name, now=now, page_size=page_size, page_token=after
        )
        return QueuePage(
            queue=found.name,
            depth=counts.depth,
            running=counts.running,
            paused=counts.paused,
            entries=[entry_resource(entry, principal.scope, now) for entry in entries],
            next_page_token=tokens.write(following) if following else None,
        )

    return ok(await run_in_threadpool(find))


class _Tokens:
    """Encrypted page tokens: the job at which a page ends may be another account's."""

    def __init__(self, sealer: Sealer, about: str) -> None:
        self._sealer = sealer
        self._about = about

    def write(self, token: str) -> str:
        return base64.urlsafe_b64encode(self._sealer.seal(token, about=self._about).encode()).decode().rstrip("=")

    def read(self, text: str) -> str:
        try:
            sealed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
            return self._sealer.open(sealed, about=self._about)
        except (ValueError, SealError):
            raise bad_token() from None


usage_router = APIRouter(prefix=PREFIX, route_class=StrictRoute, tags=["usage"])

_GROUP = re.compile(rf"{'|'.join(usage.GROUPS)}|{usage.LABEL}[A-Za-z0-9._/-]{{1,63}}")
_LATEST = datetime(9999, 1, 1, tzinfo=UTC).timestamp()


@usage_router.get("/usage", **answers(Usage, 403))
async def show_usage(
    request: Request,
    principal: Viewer,
    context: Context,
    since: Annotated[
        PlainText | None, Query(alias="from", description="ISO 8601, or seconds since 1970; default: all time.")
    ] = None,
    until: Annotated[PlainText | None, Query(alias="to", description="The same; default: now.")] = None,
    group_by: Annotated[
        PlainText, Query(description="`job`, `attempt`, `queue`, `account`, `day` (of UTC) or `label:KEY`.")
    ] = "queue",
    all_accounts: Annotated[bool, Query(description="Of every account; needs `cluster_admin`.")] = False,
    limit: Annotated[int, Query(ge=1, le=10_000, description="The most groups.")] = 1000,
) -> Response:
    """Add up what attempts used: those that ended, as far as they lie in the interval; those that run, up to now."""
    if not _GROUP.fullmatch(group_by):
        known = ", ".join(usage.GROUPS)
        raise wrong("group_by", f"must be one of {known}, or {usage.LABEL}KEY")
    scope = principal.scope
    if all_accounts:
        require(request, KeyScope.CLUSTER_ADMIN)
        scope = Scope.everything()
    now = context.clock()
    begin = _parse_bound("from", since) if since else 0.0
    end = _parse_bound("to", until) if until else now
    if end < begin:
        raise wrong("to", "must not be before `from`")

    def find(connection: Connection) -> Usage:
        rows = usage.by_group(connection, scope, group_by, since=begin, until=end, now=now, limit=limit + 1)
        return {
            "from": instant(begin) if since else None,
            "to": instant(end),
            "group_by": group_by,
            "rows": [resource(UsageRow, used) for used in rows[:limit]],
            "total": resource(UsageRow, usage.total(connection, scope, since=begin, until=end, now=now)),
            "truncated": len(rows) > limit,
        }

    return ok(await context.read(find))


def _parse_bound(field: str, text: str) -> float:
    seconds = parse_time(field, text)
    if not 0 <= seconds <= _LATEST:
        raise not_a_time(field)
    return seconds

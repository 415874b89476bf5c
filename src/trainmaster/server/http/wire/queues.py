"""Queues: how full they are, and who waits in them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, Strict

from trainmaster.server.coordinator.explain import QueueEntry
from trainmaster.server.core.fields import Model, Natural
from trainmaster.server.core.resources import Queue
from trainmaster.server.http.envelope import Wire
from trainmaster.server.scheduling.obstacles import gpus_of
from trainmaster.server.store.queue_view import QueueCounts
from trainmaster.server.store.scope import Scope


class QueueResource(Wire):
    """A queue."""

    name: str
    weight: float = Field(description="Its share of the cluster, in proportion to the other queues that have work.")
    quota_gpus: int | None = Field(description="The most GPUs that its jobs may hold at a time; null: no limit.")
    depth: int = Field(description="Jobs that wait, of all accounts.")
    running: int = Field(description="Jobs that hold resources.")
    paused: int
    gpus_held: int
    oldest_wait_seconds: float | None = Field(description="How long the one waits that came first; null: none waits.")


class QueueList(Wire):
    """All queues."""

    queues: list[QueueResource]


class QueueBody(Model):
    """A queue's weight and quota."""

    weight: Annotated[float, Strict(), Field(gt=0, le=1e6)] = Field(
        default=1.0, description="Its share of the cluster, in proportion to the other queues that have work."
    )
    quota_gpus: Natural | None = Field(
        default=None, description="The most GPUs that its jobs may hold at a time; null: no limit."
    )


class EntryResource(Wire):
    """A job that waits. Of another account's it is shown how much it asks for, and no more."""

    position: int = Field(description="1 is next.")
    job_id: str | None = Field(description="Null: another account's.")
    name: str | None
    priority: int
    gpus: int = Field(description="What it asks for, over all its nodes.")
    wait_seconds: float = Field(description="How long it has waited.")
    estimated_wait_seconds: float | None = Field(description="How long it still will, as far as that can be known.")
    reason: str | None = Field(description="Why, in brief; null: another account's.")


class QueuePage(Wire):
    """A part of a queue, in the order of the scheduler."""

    queue: str
    depth: int
    running: int
    paused: int
    entries: list[EntryResource]
    next_page_token: str | None = Field(description="Send it as `page_token`; null on the last page.")


def queue_resource(queue: Queue, counts: QueueCounts, now: float) -> QueueResource:
    """A queue with what is in it."""
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
    """A job that waits, as an account sees it."""
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

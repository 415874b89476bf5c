"""Events of one job, and the feed of all jobs of an account: pages, or a stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import StringConstraints
from sqlalchemy import Connection

from trainmaster.schema.reports import EventPage, EventResource, FeedEvent, FeedPage
from trainmaster.server.core.job import Event
from trainmaster.server.core.states import TERMINAL, JobStatus
from trainmaster.server.http.auth import Viewer
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import Ok, clean, encoded, instant, ok
from trainmaster.server.http.followers import EventStream, StreamPiece, followers_of, sse_end, sse_event, wants_events
from trainmaster.server.http.router import MAX_OFFSET, JobId, StrictRoute, errors, stream_too
from trainmaster.server.store import events, jobs
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope


def event_resource(event: Event) -> EventResource:
    return {
        "job_id": event.job_id,
        "seq": event.seq,
        "ts": instant(event.at),
        "type": event.type,
        "from": event.from_status,
        "to": event.to_status,
        "actor": event.actor,
        "reason": event.reason,
        "attempt": event.attempt,
        "message": clean(event.message),
        "data": clean(dict(event.data)),
    }


def feed_event(cursor: int, event: Event) -> FeedEvent:
    return {**event_resource(event), "id": cursor}


router = APIRouter(route_class=StrictRoute, tags=["events"])

EventNumber = Annotated[str, StringConstraints(pattern=r"^[0-9]{0,18}$")]
After = Annotated[int | None, Query(ge=0, le=MAX_OFFSET, description="Only events after this cursor.")]
Limit = Annotated[int, Query(ge=1, le=1000, description="Events on a page.")]
LastEventId = Annotated[
    EventNumber | None, Header(alias="Last-Event-ID", description="The same as `after`, for streams.")
]


@router.get(
    "/jobs/{job_id}/events", response_model=Ok[EventPage], responses={**errors(HTTPStatus.NOT_FOUND), **stream_too()}
)
async def job_events(
    request: Request,
    principal: Viewer,
    context: Context,
    job_id: JobId,
    after: After = None,
    limit: Limit = 100,
    last_event_id: LastEventId = None,
) -> Response:
    """Read what happened to a job, or follow it with `Accept: text/event-stream`; the cursor is `seq`."""
    start = _cursor(last_event_id, after)
    job = await context.read(lambda connection: jobs.get(connection, principal.scope, job_id))
    if wants_events(request):
        source = JobEventSource(job_id=job.job_id, database=context.database)
        return EventStream(followers_of(request).follow(source, str(start or 0)))
    found = await context.read(
        lambda connection: events.page(connection, principal.scope, job.job_id, after_seq=start or 0, limit=limit)
    )
    last = found[-1].seq if found else start or 0
    return ok(EventPage(events=[event_resource(event) for event in found], next_cursor=last))


@router.get("/events", response_model=Ok[FeedPage], responses={**errors(), **stream_too()})
async def feed(
    request: Request,
    principal: Viewer,
    context: Context,
    after: After = None,
    limit: Limit = 100,
    last_event_id: LastEventId = None,
) -> Response:
    """Read what happened to all jobs, or follow it with `Accept: text/event-stream`; the cursor is `id`.

    Pages begin with the first event there is; a stream without a cursor begins now.
    """
    start = _cursor(last_event_id, after)
    if wants_events(request):
        if start is None:
            start = await context.read(lambda connection: events.last_id(connection, principal.scope))
        source = FeedSource(scope=principal.scope, database=context.database)
        return EventStream(followers_of(request).follow(source, str(start)))

    def find(connection: Connection) -> FeedPage:
        found = events.feed(connection, principal.scope, start or 0, limit)
        return FeedPage(
            events=[feed_event(cursor, event) for cursor, event in found],
            next_cursor=found[-1][0] if found else start or 0,
        )

    return ok(await context.read(find))


def _cursor(last_event_id: str | None, after: int | None) -> int | None:
    return int(last_event_id) if last_event_id else after


PIECE_EVENTS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class _EventSight:
    last: int
    status: JobStatus | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEventSource:
    """The events of one job, until it has ended. The cursor is the `seq` of the last one."""

    job_id: str
    database: Database = field(compare=False, repr=False)

    def look(self, connection: Connection, before: _EventSight | None, *, changed: bool) -> _EventSight:
        if before is not None and not changed:
            return before
        job = jobs.get(connection, Scope.everything(), self.job_id, deleted=True)
        return _EventSight(last=job.event_count, status=job.status)

    def read(self, sight: _EventSight, cursor: str) -> StreamPiece:
        after = int(cursor)
        pieces: list[bytes] = []
        if after < sight.last:
            with self.database.read() as connection:
                found = events.page(connection, Scope.everything(), self.job_id, after_seq=after, limit=PIECE_EVENTS)
            for event in found:
                pieces.append(sse_event("event", encoded(event_resource(event)).decode(), event.seq))
                after = event.seq
        ended = sight.status in TERMINAL and after >= sight.last
        if ended:
            pieces.append(sse_end(str(sight.status)))
        return StreamPiece(data=b"".join(pieces), cursor=str(after), end=ended)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedSource:
    """The events of all jobs of an account; it never ends. The cursor is the id of the last one."""

    scope: Scope
    database: Database = field(compare=False, repr=False)
    job_id: None = None

    def look(self, connection: Connection, before: _EventSight | None, *, changed: bool) -> _EventSight:
        return before if before and not changed else _EventSight(last=events.last_id(connection, self.scope))

    def read(self, sight: _EventSight, cursor: str) -> StreamPiece:
        after = int(cursor)
        if after >= sight.last:
            return StreamPiece(data=b"", cursor=cursor)
        with self.database.read() as connection:
            found = events.feed(connection, self.scope, after, PIECE_EVENTS)
        data = b"".join(sse_event("event", encoded(feed_event(id_, event)).decode(), id_) for id_, event in found)
        # Skip the events of other accounts for good.
        return StreamPiece(data=data, cursor=str(found[-1][0] if found else sight.last))

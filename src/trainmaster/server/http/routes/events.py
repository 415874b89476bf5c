"""Events: of one job, and the feed of all jobs of an account."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import StringConstraints
from sqlalchemy import Connection

from trainmaster.server.http.auth import Viewer
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import Ok, ok
from trainmaster.server.http.events import FeedSource, JobEventSource
from trainmaster.server.http.followers import followers_of
from trainmaster.server.http.params import MAX_OFFSET, JobId
from trainmaster.server.http.router import StrictRoute, errors, stream_too
from trainmaster.server.http.sse import EventStream, wants_events
from trainmaster.server.http.wire.events import EventPage, FeedPage, event_resource, feed_event
from trainmaster.server.store import events, jobs

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

"""Logs: pages of lines, or a stream of them."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import StringConstraints
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from trainmaster.server.core.errors import Problem, SpecError
from trainmaster.server.core.fields import MAX_INTEGER
from trainmaster.server.core.job import Job
from trainmaster.server.http.auth import Viewer
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import Ok, ok_json
from trainmaster.server.http.followers import followers_of
from trainmaster.server.http.logs.reader import Cursor, LogFilter, LogReader, LogSight
from trainmaster.server.http.logs.stream import LogSource
from trainmaster.server.http.params import JobId, PlainText
from trainmaster.server.http.router import StrictRoute, errors, stream_too
from trainmaster.server.http.sse import EventStream, wants_events
from trainmaster.server.http.wire.logs import LogPage, page_json, page_text
from trainmaster.server.store import jobs

router = APIRouter(route_class=StrictRoute, tags=["logs"])

MAX_LINES = 10_000
PAGE_LINES = 1000
TEXT_PAGE_BYTES = 4 << 20
PLAIN = "text/plain"
NEXT_CURSOR, AT_END = "X-Next-Cursor", "X-Log-End"

AttemptChoice = Annotated[str, StringConstraints(pattern=r"^([1-9][0-9]{0,8}|all)$")]


@router.get(
    "/jobs/{job_id}/logs", response_model=Ok[LogPage], responses={**errors(HTTPStatus.NOT_FOUND), **stream_too()}
)
async def logs(
    request: Request,
    principal: Viewer,
    context: Context,
    job_id: JobId,
    tail: Annotated[int | None, Query(ge=0, le=MAX_LINES, description="Begin with the last lines.")] = None,
    since: Annotated[PlainText | None, Query(description="Begin at a time: ISO 8601, or seconds since 1970.")] = None,
    node: Annotated[int | None, Query(ge=0, le=MAX_INTEGER, description="Only what ranks of this node wrote.")] = None,
    rank: Annotated[int | None, Query(ge=0, le=MAX_INTEGER)] = None,
    stream: Annotated[Literal["stdout", "stderr"] | None, Query()] = None,
    attempt: Annotated[
        AttemptChoice | None,
        Query(description="A number, or `all`. Without it: the latest attempt, and on into the next."),
    ] = None,
    step: Annotated[PlainText | None, Query(description="A step of the workload.")] = None,
    cursor: Annotated[PlainText | None, Query(description="Begin where a page ended, or after an event's id.")] = None,
    limit: Annotated[
        int | None, Query(ge=1, le=MAX_LINES, description=f"Lines on a page; {PAGE_LINES} where JSON is asked for.")
    ] = None,
    ranks: Annotated[bool, Query(description="As plain text: with the rank before each line.")] = False,
    times: Annotated[bool, Query(description="As plain text: with the time before each line.")] = False,
    follow: Annotated[bool, Query(description="Stream; so does `Accept: text/event-stream`.")] = False,
    last_event_id: Annotated[str | None, Header(alias="Last-Event-ID", description="The same as `cursor`.")] = None,
) -> Response:
    """Read a job's log, or follow it.

    As server-sent events every line is an `event: log` whose id is the cursor after it; `event: end` tells that there
    will be no more. A line that is being overwritten with carriage returns, such as a progress bar, is an
    `event: progress` when its newest state changes, at most once a second, and an `event: log` when it has ended.

    With `Accept: text/plain` a page is the lines alone, some megabytes of them; the header `X-Next-Cursor` has the
    cursor after it, and `X-Log-End: true` says that there is no more now.
    """
    number, whole = _attempt(attempt)
    chosen = LogFilter(attempt=number, node=node, rank=rank, stream=stream, step=step)
    given = last_event_id or cursor
    position = Cursor.decode(given) if given else None
    since_s = _seconds(since) if since is not None else None

    def find(connection: Connection) -> Job:
        return jobs.get(connection, principal.scope, job_id)

    job = await context.read(find)
    reader = LogReader(context.roots, job.job_id, chosen)

    def begin() -> tuple[LogSight, Cursor]:
        sight = reader.look(job)
        return sight, position or reader.start(sight, tail=tail, since=since_s, whole=whole)

    sight, start = await run_in_threadpool(begin)
    if follow or wants_events(request):
        source = LogSource(job_id=job.job_id, chosen=chosen, roots=context.roots)
        return EventStream(followers_of(request).follow(source, start.encode()))
    as_text = PLAIN in request.headers.get("accept", "")
    most = max(1, tail) if tail is not None else limit

    def read() -> Response:
        if not as_text:
            return ok_json(page_json(reader.read(sight, start, most or PAGE_LINES), sight.notice))
        page = reader.read(sight, start, most, TEXT_PAGE_BYTES)
        headers = {NEXT_CURSOR: page.cursor.encode(), AT_END: "true" if page.at_end else "false"}
        return Response(page_text(page, ranks=ranks, times=times), headers=headers, media_type=PLAIN)

    return await run_in_threadpool(read)


def _attempt(text: str | None) -> tuple[int | None, bool]:
    """The number of one attempt, or whether all are wanted."""
    return (None, text == "all") if text is None or text == "all" else (int(text), False)


def _seconds(text: str) -> float:
    """A time, in seconds since 1970."""
    with contextlib.suppress(ValueError):
        return float(text)
    with contextlib.suppress(ValueError, OverflowError):
        # In a query a '+' stands for a space.
        moment = datetime.fromisoformat(text.replace(" ", "+") if "T" in text else text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    message = "must be a time such as 2025-01-31T12:00:00Z, or seconds since 1970"
    raise SpecError([Problem(field="since", message=message)])

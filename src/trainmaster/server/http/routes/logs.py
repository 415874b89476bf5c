"""Logs: pages of lines, or a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import StringConstraints
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from trainmaster.schema.reports import LogPage
from trainmaster.server.core.fields import MAX_INTEGER
from trainmaster.server.http.auth import Viewer
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import ok_json, reported_at
from trainmaster.server.http.followers import EventStream, StreamPiece, followers_of, sse_end, sse_event, wants_events
from trainmaster.server.http.log_reader import Cursor, LogEntry, LogFilter, LogReader, LogSnapshot, Page
from trainmaster.server.http.requests import PREFIX, parse_time
from trainmaster.server.http.router import STREAM_TOO, JobId, PlainText, StrictRoute, answers
from trainmaster.server.storage import Roots
from trainmaster.server.store import jobs
from trainmaster.server.store.scope import Scope


def page_json(page: Page, notice: str | None) -> bytes:
    """A `LogPage`, written as text without an object for each line: logs are long."""
    lines = ",".join(text for entry in page.entries for text, _ in line_jsons(entry))
    open_lines = ",".join(map(open_line_json, page.open_lines))
    rest = {"next_cursor": page.cursor.encode(), "complete": page.complete, "notice": notice}
    return f'{{"lines":[{lines}],"open_lines":[{open_lines}],{json.dumps(rest)[1:]}'.encode()


def line_jsons(entry: LogEntry) -> Iterator[tuple[str, int]]:
    """Each line of an entry as a `LogLine`, and the offset of the next line in the file."""
    head, run = _head(entry), entry.run
    if b"\n" not in run.data:
        yield f"{head}{encode_basestring(run.shown())}}}", run.end
        return
    end = run.start
    for written, message in zip(run.data.split(b"\n"), run.shown().split("\n"), strict=True):
        end += len(written) + 1
        yield f"{head}{encode_basestring(message)}}}", end


def open_line_json(entry: LogEntry) -> str:
    return f'{_head(entry)}{encode_basestring(entry.run.shown())},"open":true}}'


def page_text(page: Page, *, ranks: bool, times: bool) -> bytes:
    """The lines of a page as plain text, with their ranks or times in front if asked for."""
    return "".join(_text(entry, ranks, times) for entry in (*page.entries, *page.open_lines)).encode()


def _text(entry: LogEntry, ranks: bool, times: bool) -> str:
    before = (f"{reported_at(entry.run.at) or '?'} " if times else "") + (f"[rank {entry.file.rank}] " if ranks else "")
    shown = entry.run.shown()
    return before + (shown.replace("\n", f"\n{before}") if before else shown) + "\n"


def _head(entry: LogEntry) -> str:
    """A `LogLine` up to its message."""
    file = entry.file
    rest = {"attempt": entry.attempt, "node": file.node, "rank": file.rank, "step": file.step, "stream": file.stream}
    return f'{json.dumps({"ts": reported_at(entry.run.at), **rest})[:-1]},"message":'


router = APIRouter(prefix=PREFIX, route_class=StrictRoute, tags=["logs"])

MAX_LINES = 10_000
PAGE_LINES = 1000
TEXT_PAGE_BYTES = 4 << 20
PLAIN = "text/plain"
NEXT_CURSOR, AT_END = "X-Next-Cursor", "X-Log-End"

AttemptChoice = Annotated[str, StringConstraints(pattern=r"^([1-9][0-9]{0,8}|all)$")]


@router.get("/jobs/{job_id}/logs", **answers(LogPage, 404, also=STREAM_TOO))
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

    As server-sent events every line is an `event: log` whose id is the cursor after it; `event: end` says that there
    will be no more. A line that is being overwritten with carriage returns, such as a progress bar, is an
    `event: progress` when its newest state changes, at most once a second, and an `event: log` when it has ended.

    With `Accept: text/plain` a page is the lines alone, some megabytes of them; the header `X-Next-Cursor` has the
    cursor after it, and `X-Log-End: true` says that there is no more now.
    """
    whole = attempt == "all"
    number = None if attempt is None or whole else int(attempt)
    chosen = LogFilter(attempt=number, node=node, rank=rank, stream=stream, step=step)
    given = last_event_id or cursor
    position = Cursor.decode(given) if given else None
    since_s = parse_time("since", since) if since is not None else None

    job = await context.read(jobs.get, principal.scope, job_id)
    reader = LogReader(context.roots, job.job_id, chosen)

    def begin() -> tuple[LogSnapshot, Cursor]:
        snapshot = reader.take_snapshot(job)
        return snapshot, position or reader.start(snapshot, tail=tail, since=since_s, whole=whole)

    snapshot, start = await run_in_threadpool(begin)
    if follow or wants_events(request):
        source = LogSource(job_id=job.job_id, chosen=chosen, roots=context.roots)
        return EventStream(followers_of(request).follow(source, start.encode()))
    as_text = PLAIN in request.headers.get("accept", "")
    most = max(1, tail) if tail is not None else limit

    def read() -> Response:
        if not as_text:
            return ok_json(page_json(reader.read(snapshot, start, most or PAGE_LINES), snapshot.notice))
        page = reader.read(snapshot, start, most, TEXT_PAGE_BYTES)
        headers = {NEXT_CURSOR: page.cursor.encode(), AT_END: "true" if page.at_end else "false"}
        return Response(page_text(page, ranks=ranks, times=times), headers=headers, media_type=PLAIN)

    return await run_in_threadpool(read)


PIECE_LINES = 1000
PIECE_BYTES = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSource:
    """The lines of a job's log that pass a filter, and the newest state of lines that are being overwritten."""

    job_id: str
    chosen: LogFilter
    roots: Roots = field(compare=False, repr=False)

    def take_snapshot(self, connection: Connection, before: LogSnapshot | None, *, changed: bool) -> LogSnapshot:
        reader = self._reader()
        if before is not None and not changed:
            return reader.look_again(before)
        return reader.take_snapshot(jobs.get(connection, Scope.everything(), self.job_id, deleted=True))

    def read(self, snapshot: LogSnapshot, cursor: str) -> StreamPiece:
        position = Cursor.decode(cursor)
        page = self._reader().read(snapshot, position, PIECE_LINES, PIECE_BYTES)
        attempt, offsets = position.attempt, dict(position.offsets)
        events: list[bytes] = []
        for entry in page.entries:
            if entry.attempt != attempt:
                attempt, offsets = entry.attempt, {}
            for text, end in line_jsons(entry):
                offsets[entry.file.name] = end
                events.append(sse_event("log", text, Cursor(attempt=attempt, offsets=offsets).encode()))
        if page.complete:
            events.append(sse_end(snapshot.status, snapshot.notice))
        passing = b"".join(sse_event("progress", open_line_json(entry)) for entry in page.open_lines)
        return StreamPiece(
            data=b"".join(events), cursor=page.cursor.encode(), end=page.complete, at_end=page.at_end, passing=passing
        )

    def _reader(self) -> LogReader:
        return LogReader(self.roots, self.job_id, self.chosen)

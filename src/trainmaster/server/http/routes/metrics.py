"""Metrics that rank 0 of a job reported, over all attempts: series, or a stream of reports."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from trainmaster.protocol.documents import read_lines
from trainmaster.protocol.run_directory import metrics_stream
from trainmaster.schema.reports import JobMetrics, MetricSeries, MetricsReport
from trainmaster.server.core.job import CheckpointRecord, Job
from trainmaster.server.core.states import TERMINAL, JobStatus
from trainmaster.server.http.auth import Viewer
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import encoded, number, numbers, ok, reported_at
from trainmaster.server.http.errors import wrong
from trainmaster.server.http.followers import EventStream, StreamPiece, followers_of, sse_end, sse_event
from trainmaster.server.http.job_json import checkpoint_resource
from trainmaster.server.http.log_reader import has_ended, removal_notice
from trainmaster.server.http.requests import PREFIX
from trainmaster.server.http.router import MAX_OFFSET, STREAM_TOO, JobId, PlainText, StrictRoute, answers
from trainmaster.server.storage import Roots, Streams, streams_of
from trainmaster.server.store import checkpoints, jobs
from trainmaster.server.store.scope import Scope

Point = tuple[int | None, str | None, float | None]
"""Step, time, value."""


router = APIRouter(prefix=PREFIX, route_class=StrictRoute, tags=["metrics"])

Names = Annotated[list[PlainText] | None, Query(description="Only these metrics; repeated, or parted by commas.")]
SinceStep = Annotated[int | None, Query(ge=0, le=MAX_OFFSET, description="Only from this step on.")]


@router.get("/jobs/{job_id}/metrics", **answers(JobMetrics, 404))
async def metrics(
    principal: Viewer,
    context: Context,
    job_id: JobId,
    names: Names = None,
    since_step: SinceStep = None,
    limit: Annotated[int, Query(ge=1, le=100_000, description="The newest points of each metric.")] = 1000,
) -> Response:
    """Read a job's metrics: the latest values and how they developed, over all attempts."""

    def find(connection: Connection) -> tuple[Job, list[CheckpointRecord]]:
        job = jobs.get(connection, principal.scope, job_id)
        return job, checkpoints.newest_of_job(connection, principal.scope, job.job_id)

    job, committed = await context.read(find)
    found = await run_in_threadpool(
        series, context.roots, job, names=_parted(names), since_step=since_step, limit=limit
    )
    shown = JobMetrics(
        job_id=job.job_id,
        status=job.status,
        step=job.progress.step,
        epoch=number(job.progress.epoch),
        latest=numbers(dict(job.progress.metrics)),
        series=found,
        checkpoints=[checkpoint_resource(job, each) for each in committed],
        best_checkpoint_id=job.best_checkpoint_id,
        notice=await run_in_threadpool(removal_notice, context.roots, job),
    )
    return ok(shown)


@router.get("/jobs/{job_id}/metrics/stream", **answers(None, 404, also=STREAM_TOO))
async def stream(
    request: Request,
    principal: Viewer,
    context: Context,
    job_id: JobId,
    names: Names = None,
    since_step: SinceStep = None,
    cursor: Annotated[PlainText | None, Query(description="An event's id: begin after it.")] = None,
    last_event_id: Annotated[str | None, Header(alias="Last-Event-ID", description="The same as `cursor`.")] = None,
) -> Response:
    """Follow a job's metrics: every report is an `event: metrics`; `event: end` says that there will be no more."""
    start = last_event_id or cursor or START
    decode_cursor(start)
    job = await context.read(jobs.get, principal.scope, job_id)
    source = MetricsSource(
        job_id=job.job_id, names=frozenset(_parted(names)), since_step=since_step, roots=context.roots
    )
    return EventStream(followers_of(request).follow(source, start))


def _parted(names: list[str] | None) -> list[str]:
    return [name for text in names or () for name in text.split(",") if name]


MAX_HISTORY_BYTES = 16 << 20
"""How much of the newest reports a series is read from."""
PIECE_BYTES = 1 << 17

START = "1:0"
"""The cursor before the first report."""

_STREAM = metrics_stream(0, 0)
_CURSOR = re.compile(r"([1-9]\d{0,8}):(\d{1,18})")


def series(
    roots: Roots, job: Job, *, names: Collection[str] = (), since_step: int | None = None, limit: int
) -> list[MetricSeries]:
    """The newest `limit` points of each metric; a later attempt's report of a step replaces an earlier one."""
    points: dict[str, list[Point]] = {}
    reported: dict[str, set[int]] = {}
    for record in _newest_first(roots, job):
        step = _integer(record.get("step"))
        if since_step is not None and (step is None or step < since_step):
            continue
        at = reported_at(record.get("t"))
        for name, value in _values(record, names).items():
            mine, steps = points.setdefault(name, []), reported.setdefault(name, set())
            if len(mine) < limit and step not in steps:
                mine.append((step, at, value))
                if step is not None:
                    steps.add(step)
    for mine in points.values():
        mine.reverse()
        mine.sort(key=lambda point: -1 if point[0] is None else point[0])
    return [MetricSeries(name=name, points=mine) for name, mine in sorted(points.items())]


@dataclass(frozen=True, slots=True, kw_only=True)
class _MetricsSnapshot:
    attempt: int
    ended: bool
    status: JobStatus
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSource:
    job_id: str
    names: frozenset[str] = frozenset()
    since_step: int | None = None
    roots: Roots = field(compare=False, repr=False)

    def take_snapshot(
        self, connection: Connection, before: _MetricsSnapshot | None, *, changed: bool
    ) -> _MetricsSnapshot:
        if before is not None and not changed:
            return before if before.ended else replace(before, size=_size(self._streams(before.attempt, ended=False)))
        job = jobs.get(connection, Scope.everything(), self.job_id, deleted=True)
        attempt, ended = max(1, job.attempt_count), has_ended(job)
        size = _size(self._streams(attempt, ended=ended))
        return _MetricsSnapshot(attempt=attempt, ended=ended, status=job.status, size=size)

    def read(self, snapshot: _MetricsSnapshot, cursor: str) -> StreamPiece:
        attempt, offset = decode_cursor(cursor)
        events: list[bytes] = []
        while attempt <= snapshot.attempt:
            is_latest = attempt == snapshot.attempt
            streams = self._streams(attempt, ended=snapshot.ended or not is_latest)
            size = snapshot.size if is_latest else _size(streams)
            before = -1
            while before < offset < size and not events:
                before, offset = offset, self._take(streams, attempt, offset, size, events)
            if events or attempt == snapshot.attempt:
                break
            attempt, offset = attempt + 1, 0
        complete = not events and snapshot.ended and snapshot.status in TERMINAL
        if complete:
            events.append(sse_end(snapshot.status))
        return StreamPiece(data=b"".join(events), cursor=f"{attempt}:{offset}", end=complete)

    def _streams(self, attempt: int, *, ended: bool) -> Streams:
        return streams_of(self.roots, self.job_id, attempt, ended=ended)

    def _take(self, streams: Streams, attempt: int, offset: int, size: int, events: list[bytes]) -> int:
        """Add the reports of the next piece of a stream; returns the offset after it."""
        data = streams.read(_STREAM, offset, min(PIECE_BYTES, size - offset))
        length = data.rfind(b"\n") + 1
        if not length and len(data) == PIECE_BYTES:
            return offset + len(data)  # no report is that long: skip it
        for line in data[:length].splitlines(keepends=True):
            offset += len(line)
            records, _ = read_lines(line)
            if records and (report := self._report(attempt, records[0])) is not None:
                events.append(sse_event("metrics", encoded(report).decode(), f"{attempt}:{offset}"))
        return offset

    def _report(self, attempt: int, record: Mapping[str, Any]) -> MetricsReport | None:
        step = _integer(record.get("step"))
        values = _values(record, self.names)
        if (self.names and not values) or (self.since_step is not None and (step is None or step < self.since_step)):
            return None
        return MetricsReport(
            ts=reported_at(record.get("t")),
            attempt=attempt,
            step=step,
            total_steps=_integer(record.get("total_steps")),
            epoch=number(record.get("epoch")),
            percent=number(record.get("percent")),
            eta_seconds=number(record.get("eta_s")),
            values=values,
        )


def decode_cursor(text: str) -> tuple[int, int]:
    if (match := _CURSOR.fullmatch(text)) is None:
        raise wrong("cursor", "is not a cursor of these metrics; leave it out")
    return int(match[1]), int(match[2])


def _newest_first(roots: Roots, job: Job) -> Iterator[Mapping[str, Any]]:
    left = MAX_HISTORY_BYTES
    for attempt in range(job.attempt_count, 0, -1):
        directory = streams_of(roots, job.job_id, attempt, ended=attempt < job.attempt_count or has_ended(job))
        position = _size(directory)
        rest = b""
        while position > 0 and left > 0:
            length = min(PIECE_BYTES, position)
            position -= length
            left -= length
            data = directory.read(_STREAM, position, length) + rest
            # The text before the first line end belongs to a line of the piece before.
            begin = data.find(b"\n") + 1 if position else 0
            rest = data[:begin]
            records, _ = read_lines(data[begin:])
            yield from reversed(records)


def _size(streams: Streams) -> int:
    status = streams.status(_STREAM)
    return status.st_size if status is not None else 0


def _values(record: Mapping[str, Any], names: Collection[str]) -> dict[str, float | None]:
    return {name: value for name, value in numbers(record.get("values")).items() if not names or name in names}


def _integer(value: object) -> int | None:
    found = number(value)
    return int(found) if found is not None and abs(found) < 2**63 else None

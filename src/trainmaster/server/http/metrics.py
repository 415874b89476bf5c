"""Metrics of jobs: what rank 0 reported, over all attempts, from files in the run directories."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import Connection

from trainmaster.protocol.documents import read_lines
from trainmaster.protocol.run_directory import RunDirectory, metrics_stream
from trainmaster.server.core.errors import Problem, SpecError
from trainmaster.server.core.job import Job
from trainmaster.server.core.states import TERMINAL, JobStatus
from trainmaster.server.http import sse
from trainmaster.server.http.followers import Piece
from trainmaster.server.http.logs.reader import has_ended
from trainmaster.server.http.wire.metrics import MetricSeries, MetricsReport, Point
from trainmaster.server.http.wire.reported import clean, number, reported_at
from trainmaster.server.storage import RUNS, Roots
from trainmaster.server.store import jobs
from trainmaster.server.store.scope import Scope

MAX_HISTORY_BYTES = 16 << 20
"""How much of the newest reports a series is made of."""
PIECE_BYTES = 1 << 17

START = "1:0"
"""The cursor before the first report."""

_STREAM = metrics_stream(0, 0)
_CURSOR = re.compile(r"([1-9]\d{0,8}):(\d{1,18})")


def series(
    roots: Roots, job: Job, *, names: Collection[str] = (), since_step: int | None = None, limit: int
) -> list[MetricSeries]:
    """The newest `limit` points of each metric; what a later attempt says of a step replaces what was said before."""
    points: dict[str, list[Point]] = {}
    said: dict[str, set[int]] = {}
    for record in _newest_first(roots, job):
        step = _integer(record.get("step"))
        if since_step is not None and (step is None or step < since_step):
            continue
        at = reported_at(record.get("t"))
        for name, value in _values(record, names).items():
            mine, steps = points.setdefault(name, []), said.setdefault(name, set())
            if len(mine) < limit and step not in steps:
                mine.append((step, at, value))
                if step is not None:
                    steps.add(step)
    for mine in points.values():
        mine.reverse()
        mine.sort(key=lambda point: -1 if point[0] is None else point[0])
    return [MetricSeries(name=name, points=mine) for name, mine in sorted(points.items())]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sight:
    attempt: int
    ended: bool
    status: JobStatus
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSource:
    """Every report of a job, until there will be no more."""

    job_id: str
    names: frozenset[str] = frozenset()
    since_step: int | None = None
    roots: Roots = field(compare=False, repr=False)

    def look(self, connection: Connection, before: _Sight | None, *, changed: bool) -> _Sight:
        """How far the reports go now."""
        if before is not None and not changed:
            return before if before.ended else replace(before, size=self._size(before.attempt))
        job = jobs.get(connection, Scope.everything(), self.job_id, deleted=True)
        attempt = max(1, job.attempt_count)
        return _Sight(attempt=attempt, ended=has_ended(job), status=job.status, size=self._size(attempt))

    def read(self, sight: _Sight, cursor: str) -> Piece:
        """Reports as events."""
        attempt, offset = decode_cursor(cursor)
        events: list[bytes] = []
        while attempt <= sight.attempt:
            size = sight.size if attempt == sight.attempt else self._size(attempt)
            before = -1
            while before < offset < size and not events:
                before, offset = offset, self._take(attempt, offset, size, events)
            if events or attempt == sight.attempt:
                break
            attempt, offset = attempt + 1, 0
        complete = not events and sight.ended and sight.status in TERMINAL
        if complete:
            events.append(sse.end(sight.status))
        return Piece(data=b"".join(events), cursor=f"{attempt}:{offset}", end=complete)

    def _take(self, attempt: int, offset: int, size: int, events: list[bytes]) -> int:
        """Add the reports of the next piece of a stream; returns where it ends."""
        data = _directory(self.roots, self.job_id, attempt).read(_STREAM, offset, min(PIECE_BYTES, size - offset))
        length = data.rfind(b"\n") + 1
        if not length and len(data) == PIECE_BYTES:
            return offset + len(data)  # No report is that long; whatever it is, go on after it.
        for line in data[:length].splitlines(keepends=True):
            offset += len(line)
            records, _ = read_lines(line)
            if records and (report := self._report(attempt, records[0])) is not None:
                events.append(sse.event("metrics", report.model_dump_json(), f"{attempt}:{offset}"))
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

    def _size(self, attempt: int) -> int:
        return _size(_directory(self.roots, self.job_id, attempt))


def decode_cursor(text: str) -> tuple[int, int]:
    """Attempt and offset of a cursor.

    Raises:
        SpecError: no server of ours made it.
    """
    match = _CURSOR.fullmatch(text)
    if match is None:
        raise SpecError([Problem(field="cursor", message="is not a cursor of these metrics; leave it out")])
    return int(match[1]), int(match[2])


def _newest_first(roots: Roots, job: Job) -> Iterator[Mapping[str, Any]]:
    left = MAX_HISTORY_BYTES
    for attempt in range(job.attempt_count, 0, -1):
        directory = _directory(roots, job.job_id, attempt)
        position = _size(directory)
        rest = b""
        while position > 0 and left > 0:
            length = min(PIECE_BYTES, position)
            position -= length
            left -= length
            data = directory.read(_STREAM, position, length) + rest
            # What comes before the first line end belongs to a line that begins further up.
            begin = data.find(b"\n") + 1 if position else 0
            rest = data[:begin]
            records, _ = read_lines(data[begin:])
            yield from reversed(records)


def _directory(roots: Roots, job_id: str, attempt: int) -> RunDirectory:
    return RunDirectory(roots.path(RUNS, f"{job_id}/{attempt}"))


def _size(directory: RunDirectory) -> int:
    status = directory.status(_STREAM)
    return status.st_size if status is not None else 0


def _values(record: Mapping[str, Any], names: Collection[str]) -> dict[str, float | None]:
    values = record.get("values")
    if not isinstance(values, dict):
        return {}
    return {clean(name): number(value) for name, value in values.items() if not names or name in names}


def _integer(value: object) -> int | None:
    found = number(value)
    return int(found) if found is not None and abs(found) < 2**63 else None

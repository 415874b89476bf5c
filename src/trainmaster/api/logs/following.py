"""A job's log as something to follow."""

from __future__ import annotations

from dataclasses import dataclass, field

from sqlalchemy import Connection

from trainmaster.api import sse
from trainmaster.api.follow import Piece
from trainmaster.api.logs.reading import Cursor, LogFilter, LogReader, LogSight
from trainmaster.api.wire.logs import log_line
from trainmaster.storage import Roots
from trainmaster.store import jobs
from trainmaster.store.scope import Scope

PIECE_LINES = 1000
PIECE_BYTES = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSource:
    """Every line of a job's log that a filter admits, until there will be no more."""

    job_id: str
    chosen: LogFilter
    roots: Roots = field(compare=False, repr=False)

    def look(self, connection: Connection, before: LogSight | None, *, changed: bool) -> LogSight:
        """How far the log goes now."""
        reader = self._reader()
        if before is not None and not changed:
            return reader.look_again(before)
        return reader.look(jobs.get(connection, Scope.everything(), self.job_id, deleted=True))

    def read(self, sight: LogSight, cursor: str) -> Piece:
        """Lines as events, each with the cursor after it."""
        position = Cursor.decode(cursor)
        page = self._reader().read(sight, position, PIECE_LINES, PIECE_BYTES)
        attempt, offsets = position.attempt, dict(position.offsets)
        events: list[bytes] = []
        for entry in page.entries:
            if entry.attempt != attempt:
                attempt, offsets = entry.attempt, {}
            offsets[entry.file.name] = entry.line.end
            after = Cursor(attempt=attempt, offsets=offsets).encode()
            events.append(sse.event("log", log_line(entry).model_dump_json(), after))
        if page.complete:
            events.append(sse.end(sight.status, sight.notice))
        return Piece(data=b"".join(events), cursor=page.cursor.encode(), end=page.complete)

    def _reader(self) -> LogReader:
        return LogReader(self.roots, self.job_id, self.chosen)

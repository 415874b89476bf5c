"""A job's log as something to follow."""

from __future__ import annotations

from dataclasses import dataclass, field

from sqlalchemy import Connection

from trainmaster.server.http import sse
from trainmaster.server.http.followers import Piece
from trainmaster.server.http.logs.reader import Cursor, LogFilter, LogReader, LogSight
from trainmaster.server.http.wire.logs import line_jsons, open_line_json
from trainmaster.server.storage import Roots
from trainmaster.server.store import jobs
from trainmaster.server.store.scope import Scope

PIECE_LINES = 1000
PIECE_BYTES = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSource:
    """Every line of a job's log that a filter admits, and the newest state of those that are being overwritten."""

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
            for text, end in line_jsons(entry):
                offsets[entry.file.name] = end
                events.append(sse.event("log", text, Cursor(attempt=attempt, offsets=offsets).encode()))
        if page.complete:
            events.append(sse.end(sight.status, sight.notice))
        passing = b"".join(sse.event("progress", open_line_json(entry)) for entry in page.open_lines)
        return Piece(
            data=b"".join(events),
            cursor=page.cursor.encode(),
            end=page.complete,
            at_end=page.at_end,
            passing=passing,
        )

    def _reader(self) -> LogReader:
        return LogReader(self.roots, self.job_id, self.chosen)

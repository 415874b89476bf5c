"""Events as something to follow: cursors over the events table."""

from __future__ import annotations

from dataclasses import dataclass, field

from sqlalchemy import Connection

from trainmaster.server.core.states import TERMINAL, JobStatus
from trainmaster.server.http import sse
from trainmaster.server.http.followers import Piece
from trainmaster.server.http.wire.events import event_resource, feed_event
from trainmaster.server.store import events, jobs
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

PIECE_EVENTS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sight:
    last: int
    status: JobStatus | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEventSource:
    """The events of one job, until it has ended. The cursor is the number of the last one."""

    job_id: str
    database: Database = field(compare=False, repr=False)

    def look(self, connection: Connection, before: _Sight | None, *, changed: bool) -> _Sight:
        """How many events there are now."""
        if before is not None and not changed:
            return before
        job = jobs.get(connection, Scope.everything(), self.job_id, deleted=True)
        return _Sight(last=job.event_count, status=job.status)

    def read(self, sight: _Sight, cursor: str) -> Piece:
        """Events after a cursor."""
        after = int(cursor)
        pieces: list[bytes] = []
        if after < sight.last:
            with self.database.read() as connection:
                found = events.page(connection, Scope.everything(), self.job_id, after_seq=after, limit=PIECE_EVENTS)
            for event in found:
                pieces.append(sse.event("event", event_resource(event).model_dump_json(), event.seq))
                after = event.seq
        ended = sight.status in TERMINAL and after >= sight.last
        if ended:
            pieces.append(sse.end(str(sight.status)))
        return Piece(data=b"".join(pieces), cursor=str(after), end=ended)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedSource:
    """The events of all jobs of an account; it never ends. The cursor is the id of the last one."""

    scope: Scope
    database: Database = field(compare=False, repr=False)
    job_id: None = None

    def look(self, connection: Connection, before: _Sight | None, *, changed: bool) -> _Sight:
        """Where the feed ends now."""
        return before if before and not changed else _Sight(last=events.last_id(connection, self.scope))

    def read(self, sight: _Sight, cursor: str) -> Piece:
        """Events after a cursor."""
        after = int(cursor)
        if after >= sight.last:
            return Piece(data=b"", cursor=cursor)
        with self.database.read() as connection:
            found = events.feed(connection, self.scope, after, PIECE_EVENTS)
        data = b"".join(sse.event("event", feed_event(id_, event).model_dump_json(), id_) for id_, event in found)
        # Past the events of others there is nothing to be found again.
        return Piece(data=data, cursor=str(found[-1][0] if found else sight.last))

"""Forgetting sessions that ended, but for runs that saved something."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Connection

from trainmaster.server.coordinator.retention import Collected
from trainmaster.server.core.retention import Keep
from trainmaster.server.doors.tinker import records
from trainmaster.server.doors.tinker.records import Leftover
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

_EVERYTHING = Scope.everything()


def collect_sessions(database: Database, keep: Keep, now: float, dry_run: bool) -> Iterator[Collected]:
    """Forget the records of sessions that ended long enough ago, and tell of them; a `Collect`."""
    if not keep.sessions_s:
        return
    before = now - keep.sessions_s
    after: str | None = ""
    while after is not None:

        def work(connection: Connection, after: str = after) -> list[Leftover]:
            gone, _ = records.leftovers(connection, _EVERYTHING, before=before, after=after)
            for each in gone:
                records.forget(connection, _EVERYTHING, each)
            return gone

        with database.read() as connection:
            gone, last = records.leftovers(connection, _EVERYTHING, before=before, after=after)
        if gone and not dry_run:
            gone = database.write_now(work)
        for each in gone:
            for what, names in (
                ("sampler", each.sampler_ids),
                ("training run", each.model_ids),
                ("session", (each.session_id,) if each.whole else ()),
            ):
                yield from (Collected(what=what, name=name, size_bytes=0) for name in names)
        after = last

"""Removes files that attempts began to send and will not complete: with the attempt, or after a day."""

from __future__ import annotations

from collections.abc import Iterator

from trainmaster.protocol import account_files
from trainmaster.server.attempt_store import UPLOADS
from trainmaster.server.coordinator.retention import Collected
from trainmaster.server.core.retention import RetentionPolicy
from trainmaster.server.storage import ARTIFACTS, Location, Roots
from trainmaster.server.store import jobs
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

ABANDONED_S = 24 * 3600.0


def collect_uploads(
    roots: Roots, database: Database, _: RetentionPolicy, now: float, dry_run: bool
) -> Iterator[Collected]:
    top = roots.path(ARTIFACTS, "")
    for attempt_id in account_files.directories_in(top, UPLOADS):
        place = f"{UPLOADS}/{attempt_id}"
        if not _is_current(database, attempt_id):
            yield from _removed(roots, place, dry_run=dry_run)
            continue
        for name in account_files.directories_in(top, place):
            if account_files.newest_in(top, f"{place}/{name}") < now - ABANDONED_S:
                yield from _removed(roots, f"{place}/{name}", dry_run=dry_run)


def _removed(roots: Roots, path: str, *, dry_run: bool) -> Iterator[Collected]:
    location = Location(root=ARTIFACTS, path=path)
    size = roots.size_of(location)
    if not dry_run:
        roots.remove(location)
    yield Collected(what="upload", name=path.partition("/")[2], size_bytes=size)


def _is_current(database: Database, attempt_id: str) -> bool:
    job_id, _, number = attempt_id.rpartition(".")
    with database.read() as connection:
        job = next(iter(jobs.load(connection, Scope.everything(), [job_id])), None)
    return job is not None and job.attempt is not None and str(job.attempt.number) == number

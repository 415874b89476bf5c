"""Tombstones: deleted jobs whose files are still there."""

from __future__ import annotations

from dataclasses import dataclass

from trainmaster.protocol import account_files
from trainmaster.server.core.job import Job
from trainmaster.server.core.workloads.job_class import KIND as JOB_CLASS
from trainmaster.server.storage import ARTIFACTS, RUNS, Location, Roots
from trainmaster.server.store import checkpoints, jobs
from trainmaster.server.store.database import Database
from trainmaster.server.store.page_tokens import position_of, token_after
from trainmaster.server.store.scope import Scope

_ORDER = "-deleted_at"
_BATCH = 500
_BATCHES = 10
"""The row of a purged job stays, and does not say so: a page reads this many batches in vain, then it is short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    job: Job
    deleted_at: float
    size_bytes: int


def tombstones(
    database: Database,
    roots: Roots,
    scope: Scope,
    *,
    name: str | None = None,
    page_size: int,
    page_token: str | None = None,
) -> tuple[list[Tombstone], str | None]:
    """A page of tombstones (which may be short), the last deleted first, and the token of the next; see
    `jobs.tombstones`."""
    found: list[Tombstone] = []
    stored = _Stored(roots)
    for _ in range(_BATCHES):
        after = None
        if page_token is not None:
            at, job_id = position_of(page_token, _ORDER, float)
            after = (float(at), job_id)
        with database.read() as connection:
            deleted = jobs.tombstones(connection, scope, name=name, after=after, limit=_BATCH)
        for job in deleted:
            deleted_at = job.deleted_at or 0.0
            page_token = token_after(_ORDER, deleted_at, job.job_id)
            if (size_bytes := _size_left(database, roots, stored, job)) is not None:
                found.append(Tombstone(job=job, deleted_at=deleted_at, size_bytes=size_bytes))
            if len(found) == page_size:
                return found, page_token
        if len(deleted) < _BATCH:
            return found, None
    return found, page_token


class _Stored:
    """What was moved to the object store, which is asked once which jobs it has anything of, and not for each job."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._present: dict[str, frozenset[str]] = {}

    def size_of(self, location: Location) -> int:
        archive = self._roots.archive
        if archive is None:
            return 0
        if location.root not in self._present:
            self._present[location.root] = frozenset(archive.directories(location.root))
        return self._roots.stored_size_of(location) if location.path in self._present[location.root] else 0


def _size_left(database: Database, roots: Roots, stored: _Stored, job: Job) -> int | None:
    places = [Location(root=root, path=job.job_id) for root in (RUNS, ARTIFACTS)]
    sizes = [roots.size_of(each) for each in places if account_files.exists(roots.path(each.root, ""), each.path)]
    sizes += [size for size in map(stored.size_of, places) if size]
    if job.workload_kind == JOB_CLASS:  # whose checkpoints lie outside
        with database.read() as connection:
            outside = checkpoints.total_size(connection, Scope(job.account_id), job.job_id, root=ARTIFACTS)
        sizes += [] if outside is None else [outside]
    return sum(sizes) if sizes else None

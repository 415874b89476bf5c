"""Deleted jobs whose files are still there, and how much room those take."""

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
"""The record of a purged job stays, and does not say so: a page looks at so many in vain, and then goes on later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    job: Job
    deleted_at: float
    size_bytes: int


class Tombstones:
    def __init__(self, database: Database, roots: Roots) -> None:
        self._database = database
        self._roots = roots

    def page(
        self, scope: Scope, *, name: str | None = None, page_size: int, page_token: str | None = None
    ) -> tuple[list[Tombstone], str | None]:
        """Deleted jobs, the last deleted first, and the token of the next page; a page may be short.

        `name` is a handle or the beginning of an id.
        """
        found: list[Tombstone] = []
        for _ in range(_BATCHES):
            buried = self._batch(scope, name, page_token)
            for job, deleted_at in buried:
                page_token = token_after(_ORDER, deleted_at, job.job_id)
                if (size_bytes := self._left(job)) is not None:
                    found.append(Tombstone(job=job, deleted_at=deleted_at, size_bytes=size_bytes))
                if len(found) == page_size:
                    return found, page_token
            if len(buried) < _BATCH:
                return found, None
        return found, page_token

    def _batch(self, scope: Scope, name: str | None, page_token: str | None) -> list[tuple[Job, float]]:
        after = None
        if page_token is not None:
            deleted_at, job_id = position_of(page_token, _ORDER, float)
            after = (float(deleted_at), job_id)
        with self._database.read() as connection:
            buried = jobs.tombstones(connection, scope, name=name, after=after, limit=_BATCH)
        return [(job, job.deleted_at) for job in buried if job.deleted_at is not None]

    def _left(self, job: Job) -> int | None:
        """The size of a job's files; None when there are none."""
        present = [root for root in (RUNS, ARTIFACTS) if account_files.exists(self._roots.path(root, ""), job.job_id)]
        sizes = [self._roots.size_of(Location(root=root, path=job.job_id)) for root in present]
        if job.workload_kind == JOB_CLASS:  # whose checkpoints lie outside
            with self._database.read() as connection:
                outside = checkpoints.total_size(connection, Scope(job.account_id), job.job_id, root=ARTIFACTS)
            sizes += [] if outside is None else [outside]
        return sum(sizes) if sizes else None

"""Blobs: files that clients shipped by content, and the jobs that use them. The bytes lie elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.core.job import Job
from trainmaster.server.store import schema
from trainmaster.server.store.scope import Scope
from trainmaster.server.store.statements import portions

_blobs, _uses, _jobs = schema.blobs, schema.blob_uses, schema.jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A file of an account."""

    account_id: str
    sha256: str
    size_bytes: int
    created_at: float
    last_used_at: float
    """When it was last shipped, or last used by a new job."""


_SELECT = sa.select(*(_blobs.c[name] for name in Blob.__dataclass_fields__))


def put(connection: Connection, scope: Scope, sha256: str, size_bytes: int, now: float) -> None:
    """Record that the account has a blob; once more is as good as once."""
    if not _touch(connection, scope.account, sha256, now):
        blob = Blob(account_id=scope.account, sha256=sha256, size_bytes=size_bytes, created_at=now, last_used_at=now)
        connection.execute(sa.insert(_blobs), {name: getattr(blob, name) for name in Blob.__dataclass_fields__})


def get(connection: Connection, scope: Scope, sha256: str) -> Blob | None:
    """The account's blob of a digest; in the scope of everything, any account's."""
    row = connection.execute(scope.limit(_SELECT.where(_blobs.c.sha256 == sha256), _blobs.c.account_id)).first()
    return None if row is None else Blob(**row._mapping)


def missing(connection: Connection, scope: Scope, digests: Iterable[str]) -> list[str]:
    """Those of the digests of which the account has no blob."""
    wanted = sorted(set(digests))
    kept: set[str] = set()
    for some in portions(wanted):
        query = sa.select(_blobs.c.sha256).where(_blobs.c.sha256.in_(some), _blobs.c.account_id == scope.account)
        kept.update(connection.execute(query).scalars())
    return [sha256 for sha256 in wanted if sha256 not in kept]


def use(connection: Connection, scope: Scope, job: Job, digests: Iterable[str], now: float) -> None:
    """Keep blobs for as long as a job of their account is there; the job is stored before.

    Raises:
        NotFoundError: the account has no blob of one of the digests.
    """
    scope.require(job.account_id)
    for sha256 in sorted(set(digests)):
        if not _touch(connection, job.account_id, sha256, now):
            raise NotFoundError(f"the file {sha256} was not uploaded")
        connection.execute(sa.insert(_uses), {"account_id": job.account_id, "job_id": job.job_id, "sha256": sha256})


def unused(connection: Connection, scope: Scope, before: float) -> list[Blob]:
    """Blobs that no job uses, but for deleted ones, and that were not touched since a time."""
    query = _SELECT.where(_unused_since(before)).order_by(_blobs.c.last_used_at)
    return [Blob(**row._mapping) for row in connection.execute(scope.limit(query, _blobs.c.account_id))]


def delete(connection: Connection, scope: Scope, blob: Blob, before: float) -> bool:
    """Forget a blob that is still unused; False when somebody has come to use it."""
    scope.require(blob.account_id)
    this = sa.and_(_blobs.c.sha256 == blob.sha256, _blobs.c.account_id == blob.account_id)
    if connection.execute(_SELECT.where(this, _unused_since(before))).first() is None:
        return False
    uses = sa.delete(_uses).where(_uses.c.sha256 == blob.sha256, _uses.c.account_id == blob.account_id)
    connection.execute(uses)  # of deleted jobs
    connection.execute(sa.delete(_blobs).where(this))
    return True


def _touch(connection: Connection, account_id: str, sha256: str, now: float) -> bool:
    touched = sa.update(_blobs).where(_blobs.c.sha256 == sha256, _blobs.c.account_id == account_id)
    return connection.execute(touched.values(last_used_at=now)).rowcount > 0


def _unused_since(before: float) -> sa.ColumnElement[bool]:
    used = sa.exists().where(
        _uses.c.sha256 == _blobs.c.sha256,
        _uses.c.account_id == _blobs.c.account_id,
        _jobs.c.job_id == _uses.c.job_id,
        _jobs.c.account_id == _uses.c.account_id,
        _jobs.c.deleted_at.is_(None),
    )
    return sa.and_(_blobs.c.last_used_at < before, ~used)

"""The inputs of jobs: uploaded files (blobs, whose bytes lie elsewhere), and sealed secrets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection, bindparam

from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.core.job import Job
from trainmaster.server.store import schema
from trainmaster.server.store.records import PreparedStatement, Records, ScopedQuery, portions
from trainmaster.server.store.scope import Scope

_blobs, _uses, _jobs = schema.blobs, schema.blob_uses, schema.jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    account_id: str
    sha256: str
    size_bytes: int
    created_at: float
    last_used_at: float
    """When it was last shipped, or last used by a new job."""


_BLOBS = Records(Blob, _blobs)


def put_blob(connection: Connection, scope: Scope, sha256: str, size_bytes: int, now: float) -> None:
    """Record that the account has a blob; repeating it does no harm."""
    if not _touch(connection, scope.account, sha256, now):
        blob = Blob(account_id=scope.account, sha256=sha256, size_bytes=size_bytes, created_at=now, last_used_at=now)
        _BLOBS.insert(connection, blob)


def get_blob(connection: Connection, scope: Scope, sha256: str) -> Blob | None:
    """The account's blob of a digest; in the scope of everything, any account's."""
    return _BLOBS.first(connection, scope, _blobs.c.sha256 == sha256)


def missing_blobs(connection: Connection, scope: Scope, digests: Iterable[str]) -> list[str]:
    wanted = sorted(set(digests))
    kept: set[str] = set()
    for some in portions(wanted):
        query = sa.select(_blobs.c.sha256).where(_blobs.c.sha256.in_(some), _blobs.c.account_id == scope.account)
        kept.update(connection.execute(query).scalars())
    return [sha256 for sha256 in wanted if sha256 not in kept]


def use_blobs(connection: Connection, scope: Scope, job: Job, digests: Iterable[str], now: float) -> None:
    """Keep blobs of a job's account for as long as the job, which is stored already; NotFoundError if one is absent."""
    scope.require(job.account_id)
    for sha256 in sorted(set(digests)):
        if not _touch(connection, job.account_id, sha256, now):
            raise NotFoundError(f"the file {sha256} was not uploaded")
        connection.execute(sa.insert(_uses), {"account_id": job.account_id, "job_id": job.job_id, "sha256": sha256})


def unused_blobs(connection: Connection, scope: Scope, before: float) -> list[Blob]:
    """Blobs that no job uses, except deleted ones, and that were not touched since a time."""
    return _BLOBS.find(connection, scope, _unused_since(before), order_by=[_blobs.c.last_used_at])


def delete_blob(connection: Connection, scope: Scope, blob: Blob, before: float) -> bool:
    """Delete the row of a blob that is still unused; False when a job has come to use it."""
    scope.require(blob.account_id)
    this = sa.and_(_blobs.c.sha256 == blob.sha256, _blobs.c.account_id == blob.account_id)
    if _BLOBS.first(connection, scope, this, _unused_since(before)) is None:
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


# Secrets of jobs, sealed: the store never sees their values.


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedSecret:
    name: str
    sealed: str
    until_end: bool = False
    """Forgotten with the change that ends the job."""


def put_secrets(connection: Connection, scope: Scope, job: Job, sealed: Sequence[SealedSecret]) -> None:
    """Store secrets of a job, in place of those with the same names."""
    scope.require(job.account_id)
    if not sealed:
        return
    rows = [_SECRETS.to_row(secret, job_id=job.job_id, account_id=job.account_id) for secret in sealed]
    _DELETE.execute_many(connection, [{**_key(job), "called": secret.name} for secret in sealed])
    _INSERT.execute_many(connection, rows)


def secrets_of_job(connection: Connection, scope: Scope, job_id: str) -> list[SealedSecret]:
    return [_SECRETS.from_row(row) for row in _OF_JOB.rows(connection, scope, key=job_id)]


def secrets_exist(connection: Connection, scope: Scope) -> bool:
    """Whether any account has a sealed secret, of a job or of a webhook."""
    scope.require_everything()
    return connection.execute(_ANY).first() is not None


def forget_secrets(connection: Connection, scope: Scope, job: Job, *, all_of_them: bool) -> None:
    """Delete the secrets that a job was given until its end, or all of its secrets."""
    scope.require(job.account_id)
    (_FORGET_ALL if all_of_them else _FORGET).execute(connection, _key(job))


def _key(job: Job) -> dict[str, str]:
    return {"key": job.job_id, "account": job.account_id}


_secrets = schema.secrets
_THE_JOBS = (_secrets.c.job_id == bindparam("key"), _secrets.c.account_id == bindparam("account"))

_SECRETS = Records(SealedSecret, _secrets)
_OF_JOB = ScopedQuery(_SECRETS.select.where(_secrets.c.job_id == bindparam("key")), _secrets.c.account_id)
_INSERT = PreparedStatement(sa.insert(_secrets))
_DELETE = PreparedStatement(sa.delete(_secrets).where(*_THE_JOBS, _secrets.c.name == bindparam("called")))
_ANY = sa.union_all(sa.select(_secrets.c.name), sa.select(schema.webhooks.c.url)).limit(1)
_FORGET_ALL = PreparedStatement(sa.delete(_secrets).where(*_THE_JOBS))
_FORGET = PreparedStatement(sa.delete(_secrets).where(*_THE_JOBS, _secrets.c.until_end))

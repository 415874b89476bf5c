"""The sealed secrets of jobs. What they hold is known to nobody here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection, bindparam

from trainmaster.server.core.job import Job
from trainmaster.server.store import schema
from trainmaster.server.store.scope import Scope
from trainmaster.server.store.statements import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedSecret:
    """One secret of a job."""

    name: str
    sealed: str
    until_end: bool = False
    """Forgotten with the change that ends the job."""


def put(connection: Connection, scope: Scope, job: Job, sealed: Sequence[SealedSecret]) -> None:
    """Store secrets of a job; each takes the place of one that had its name."""
    scope.require(job.account_id)
    if not sealed:
        return
    owner = {"job_id": job.job_id, "account_id": job.account_id}
    rows = [{**owner, "name": secret.name, "sealed": secret.sealed, "until_end": secret.until_end} for secret in sealed]
    _DELETE.execute_many(connection, [{**_key(job), "called": secret.name} for secret in sealed])
    _INSERT.execute_many(connection, rows)


def of_job(connection: Connection, scope: Scope, job_id: str) -> list[SealedSecret]:
    """Every secret of a job."""
    rows = connection.execute(scope.limit(_OF_JOB, _secrets.c.account_id), {"key": job_id})
    return [SealedSecret(name=row.name, sealed=row.sealed, until_end=row.until_end) for row in rows]


def exist(connection: Connection, scope: Scope) -> bool:
    """Whether anything is sealed in the whole database, a webhook's secret among it."""
    scope.require_everything()
    return connection.execute(_ANY).first() is not None


def forget(connection: Connection, scope: Scope, job: Job, *, all_of_them: bool) -> None:
    """Remove what a job has no use for any more: what it was given until its end, or everything."""
    scope.require(job.account_id)
    (_FORGET_ALL if all_of_them else _FORGET).execute(connection, _key(job))


def _key(job: Job) -> dict[str, str]:
    return {"key": job.job_id, "account": job.account_id}


_secrets = schema.secrets
_THE_JOBS = (_secrets.c.job_id == bindparam("key"), _secrets.c.account_id == bindparam("account"))

_INSERT = Prepared(sa.insert(_secrets))
_DELETE = Prepared(sa.delete(_secrets).where(*_THE_JOBS, _secrets.c.name == bindparam("called")))
_OF_JOB = sa.select(_secrets.c.name, _secrets.c.sealed, _secrets.c.until_end).where(
    _secrets.c.job_id == bindparam("key")
)
_ANY = sa.union_all(sa.select(_secrets.c.name), sa.select(schema.webhooks.c.url)).limit(1)
_FORGET_ALL = Prepared(sa.delete(_secrets).where(*_THE_JOBS))
_FORGET = Prepared(sa.delete(_secrets).where(*_THE_JOBS, _secrets.c.until_end))

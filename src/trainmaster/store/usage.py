"""Usage: what each attempt held and for how long. Written with the change that ends the attempt, so exactly once."""

from __future__ import annotations

from sqlalchemy import Connection, insert

from trainmaster.core.job import Attempt, Job
from trainmaster.store import schema
from trainmaster.store.prepared import Prepared
from trainmaster.store.scope import Scope

_usage = schema.usage
_INSERT = Prepared(insert(_usage))


def record(connection: Connection, scope: Scope, job: Job, attempt: Attempt) -> None:
    """Keep what an attempt that ended has used; one that never started used nothing."""
    scope.require(job.account_id)
    if attempt.started_at is None or attempt.ended_at is None:
        return
    row = {
        "account_id": job.account_id,
        "job_id": job.job_id,
        "attempt": attempt.number,
        "queue": job.queue,
        "started_at": attempt.started_at,
        "ended_at": attempt.ended_at,
        "gpus": sum(len(share.gpus) for share in attempt.shares),
        "cpu_cores": sum(share.cpu_cores for share in attempt.shares),
    }
    _INSERT.execute(connection, row)

"""An account sees and changes nothing of another's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection
from store_records import (
    ACME,
    EVERYTHING,
    OTHER,
    apply,
    change_of,
    checkpoint_of,
    event_of,
    new_job,
    node_of,
    placement_of,
    report,
    submission_of,
    submit,
)

from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.core.job import Job
from trainmaster.server.core.resources import JobQueue, Share
from trainmaster.server.store import (
    accounts,
    attempts,
    checkpoints,
    events,
    job_inputs,
    job_list,
    jobs,
    leases,
    nodes,
    queues,
)
from trainmaster.server.store.accounts import ApiKey
from trainmaster.server.store.database import Database
from trainmaster.server.store.leases import Lease

KEY = ApiKey(key_id="k", account_id="acme", name="n", scopes=(), hash="h", created_at=1.0)
BLOB = job_inputs.Blob(account_id="acme", sha256="a" * 64, size_bytes=1, created_at=1.0, last_used_at=1.0)
LEASE = Lease(epoch=1, holder="s", url="u", expires_at=1.0)


@pytest.fixture
def job(database: Database) -> Job:
    """A job of `acme` with one of everything."""
    report(database, node_of("n1"))
    job = submit(database, new_job(handle="tuner", labels={"team": "a"}))
    job = apply(database, placement_of(job, Share(node_id="n1", gpus=(0,))))
    kept = replace(checkpoint_of(job, "c-kept", 2), kind="training", name="kept")
    job = apply(database, change_of(job, checkpoints=(checkpoint_of(job, "c-1", 1), kept)))

    def fill(connection: Connection) -> None:
        accounts.ensure(connection, EVERYTHING, "acme", 1.0)
        accounts.create_key(connection, ACME, KEY)
        job_inputs.put_blob(connection, ACME, "a" * 64, 1, 1.0)
        jobs.record_use(connection, ACME, job.job_id, 1.0)

    database.write_now(fill)
    return job


READS: dict[str, Callable[[Connection, Any, Job], Any]] = {
    "load": lambda connection, scope, job: jobs.load(connection, scope, [job.job_id]),
    "unfinished": lambda connection, scope, job: jobs.unfinished(connection, scope),
    "page": lambda connection, scope, job: job_list.page(connection, scope, job_list.JobQuery()).jobs,
    "count": lambda connection, scope, job: job_list.page(connection, scope, job_list.JobQuery()).total_count,
    "labels": lambda connection, scope, job: (
        job_list.page(connection, scope, job_list.JobQuery(labels={"team": ("a",)})).jobs
    ),
    "attempts": lambda connection, scope, job: attempts.of_job(connection, scope, job.job_id),
    "checkpoints": lambda connection, scope, job: checkpoints.of_job(connection, scope, job.job_id),
    "checkpoint page": lambda connection, scope, job: (
        checkpoints.page(connection, scope, job.job_id, page_size=1).checkpoints
    ),
    "checkpoints by id": lambda connection, scope, job: checkpoints.named(connection, scope, job.job_id, ["c-1"]),
    "checkpoint paths": lambda connection, scope, job: checkpoints.paths(
        connection, scope, job.job_id, root="artifacts", start="", limit=1
    ),
    "checkpoints by name": lambda connection, scope, job: [
        *checkpoints.called(connection, scope, job.job_id, "c-kept"),
        *checkpoints.newest_of_kind(connection, scope, job.job_id, "training", most=1),
    ],
    "size of checkpoints": lambda connection, scope, job: checkpoints.total_size(
        connection, scope, job.job_id, root="artifacts"
    ),
    "limited checkpoints": lambda connection, scope, job: checkpoints.oldest_limited(connection, scope, job, 1),
    "limited checkpoint count": lambda connection, scope, job: checkpoints.count_limited(connection, scope, job),
    "overlapping checkpoints": lambda connection, scope, job: checkpoints.overlapping(
        connection, scope, replace(checkpoint_of(job, "c-1", 1), checkpoint_id="c-2")
    ),
    "events": lambda connection, scope, job: events.page(connection, scope, job.job_id),
    "feed": lambda connection, scope, job: events.feed(connection, scope, 0, 10),
    "changed jobs": lambda connection, scope, job: events.changed_jobs(connection, scope, 0)[1],
    "allocations": lambda connection, scope, job: attempts.all_allocations(connection, scope),
    "keys": lambda connection, scope, job: accounts.all_keys(connection, scope),
    "key": lambda connection, scope, job: accounts.find_key(connection, scope, "h"),
    "blob": lambda connection, scope, job: job_inputs.get_blob(connection, scope, "a" * 64),
    "unused blobs": lambda connection, scope, job: job_inputs.unused_blobs(connection, scope, 10.0),
    "activity": lambda connection, scope, job: jobs.last_use(connection, scope, job.job_id),
}

REFUSALS: dict[str, Callable[[Connection, Any, Job], Any]] = {
    "job": lambda connection, scope, job: jobs.get(connection, scope, job.job_id),
    "handle": lambda connection, scope, job: jobs.get(connection, scope, "tuner"),
    "queue position": lambda connection, scope, job: queues.position(connection, scope, job),
    "attempt": lambda connection, scope, job: attempts.get(connection, scope, f"{job.job_id}.1"),
    "checkpoint": lambda connection, scope, job: checkpoints.get(connection, scope, "c-1"),
    "insert": lambda connection, scope, job: jobs.insert(connection, scope, submission_of(new_job("job-2"))),
    "apply": lambda connection, scope, job: jobs.apply(connection, scope, change_of(job)),
    "attempt put": lambda connection, scope, job: attempts.put(connection, scope, job, job.live),
    "take": lambda connection, scope, job: attempts.take(connection, scope, job, job.live),
    "release": lambda connection, scope, job: attempts.release(connection, scope, job, job.live),
    "register": lambda connection, scope, job: checkpoints.register(connection, scope, job, ()),
    "forget": lambda connection, scope, job: checkpoints.forget(connection, scope, job),
    "append": lambda connection, scope, job: events.append(connection, scope, job, (event_of(job, 99),)),
    "touch": lambda connection, scope, job: jobs.record_use(connection, scope, job.job_id, 2.0),
    "use": lambda connection, scope, job: job_inputs.use_blobs(connection, scope, job, ["a" * 64], 2.0),
    "delete blob": lambda connection, scope, job: job_inputs.delete_blob(connection, scope, BLOB, 10.0),
    "account": lambda connection, scope, job: accounts.ensure(connection, scope, "acme", 2.0),
    "create key": lambda connection, scope, job: accounts.create_key(connection, scope, KEY),
    "revoke key": lambda connection, scope, job: accounts.revoke_key(connection, scope, "k", 2.0),
    "nodes": lambda connection, scope, job: nodes.put(connection, scope, ()),
    "node drain": lambda connection, scope, job: nodes.drain(connection, scope, "n1", 2.0),
    "queue": lambda connection, scope, job: queues.put(connection, scope, JobQueue(name="night"), 2.0),
    "acquire": lambda connection, scope, job: leases.acquire(connection, scope, "s", "u", 1.0, 5.0),
    "renew": lambda connection, scope, job: leases.renew(connection, scope, LEASE, 1.0, 5.0),
    "release lease": lambda connection, scope, job: leases.release(connection, scope, LEASE),
}


def test_read_shows_the_account_its_own_and_nothing_of_another(database: Database, job: Job) -> None:
    for name, read in READS.items():
        with database.read() as connection:
            assert read(connection, ACME, job), name
            assert read(connection, EVERYTHING, job), name
            assert not read(connection, OTHER, job), name


def test_what_belongs_to_another_account_or_to_none_is_refused(database: Database, job: Job) -> None:
    accepted = []
    for name, ask in REFUSALS.items():
        try:
            database.write_now(lambda connection, ask=ask: ask(connection, OTHER, job))
        except NotFoundError:
            continue
        accepted.append(name)
    assert not accepted


def test_error_of_the_database_holds_no_value(database: Database) -> None:
    def work(connection: Connection) -> None:
        connection.execute(sa.text("INSERT INTO there_is_no_such_table VALUES (:value)"), {"value": "canary"})

    with pytest.raises(sa.exc.DBAPIError) as failed:
        database.write_now(work)
    assert "there_is_no_such_table" in str(failed.value)
    assert "canary" not in str(failed.value)
    with pytest.raises(sa.exc.DBAPIError) as failed, database.read() as connection:
        work(connection)
    assert "canary" not in str(failed.value)

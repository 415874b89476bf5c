from __future__ import annotations

import pytest
from store_records import ACME, EVERYTHING, OTHER, apply, change_of, new_job, stored, submit

from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.core.job import Job
from trainmaster.server.core.states import JobStatus
from trainmaster.server.store import job_inputs, jobs
from trainmaster.server.store.database import Database
from trainmaster.server.store.job_inputs import SealedSecret
from trainmaster.server.store.scope import Scope

PASSWORD = SealedSecret(name="env.PASSWORD", sealed="v1.k.AAAA")
TOKEN = SealedSecret(name="scaidrive_token", sealed="v1.k.BBBB", until_end=True)


def put(database: Database, job: Job, *sealed: SealedSecret, scope: Scope = EVERYTHING) -> None:
    database.write_now(lambda connection: job_inputs.put_secrets(connection, scope, job, sealed))


def of_job(database: Database, job: Job, scope: Scope = EVERYTHING) -> set[SealedSecret]:
    with database.read() as connection:
        return set(job_inputs.secrets_of_job(connection, scope, job.job_id))


def test_secrets_of_a_job_are_its_own(database: Database) -> None:
    one, other = submit(database, new_job("job-1")), submit(database, new_job("job-2"))
    put(database, one, PASSWORD, TOKEN)
    put(database, other)
    assert of_job(database, one) == {PASSWORD, TOKEN}
    assert of_job(database, other) == set()


def test_secret_takes_the_place_of_one_of_its_name(database: Database) -> None:
    job = submit(database, new_job())
    put(database, job, PASSWORD, TOKEN)
    newer = SealedSecret(name=TOKEN.name, sealed="v1.k.CCCC", until_end=True)
    put(database, job, newer)
    assert of_job(database, job) == {PASSWORD, newer}


def test_secrets_stay_in_scope(database: Database) -> None:
    job = submit(database, new_job())
    put(database, job, PASSWORD, scope=ACME)
    assert of_job(database, job, OTHER) == set()
    with pytest.raises(NotFoundError):
        put(database, job, TOKEN, scope=OTHER)
    with pytest.raises(NotFoundError):
        database.write_now(lambda connection: job_inputs.forget_secrets(connection, OTHER, job, all_of_them=True))
    assert of_job(database, job, ACME) == {PASSWORD}


@pytest.mark.parametrize("status", [JobStatus.QUEUED, JobStatus.PAUSED, JobStatus.TRAINING])
def test_change_of_a_job_that_goes_on_keeps_its_secrets(database: Database, status: JobStatus) -> None:
    job = submit(database, new_job())
    put(database, job, PASSWORD, TOKEN)
    apply(database, change_of(job, status=status))
    assert of_job(database, job) == {PASSWORD, TOKEN}


def test_end_forgets_what_was_given_until_then_and_deletion_the_rest(database: Database) -> None:
    job = submit(database, new_job())
    put(database, job, PASSWORD, TOKEN)
    apply(database, change_of(job, status=JobStatus.FAILED))
    assert of_job(database, job) == {PASSWORD}
    apply(database, change_of(stored(database, job.job_id), deleted_at=1003.0))
    assert of_job(database, job) == set()


def test_stale_change_forgets_nothing(database: Database) -> None:
    job = submit(database, new_job())
    put(database, job, TOKEN)
    apply(database, change_of(job))
    stale = change_of(job, status=JobStatus.FAILED)
    assert not database.write_now(lambda connection: jobs.apply(connection, EVERYTHING, stale))
    assert of_job(database, job) == {TOKEN}


def test_secrets_exist_once_a_job_or_a_webhook_has_one(database: Database) -> None:
    def exist() -> bool:
        with database.read() as connection:
            return job_inputs.secrets_exist(connection, EVERYTHING)

    job = submit(database, new_job())
    assert not exist()
    put(database, job, PASSWORD)
    assert exist()

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa
from store_records import ACME, EVERYTHING, OTHER, new_job, submission_of

from trainmaster.server.core.errors import IdempotencyMismatchError
from trainmaster.server.store import accounts, jobs
from trainmaster.server.store.accounts import IdempotencyRecord
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope


def record(key: str = "k", **fields: Any) -> IdempotencyRecord:
    values: dict[str, Any] = {
        "key": key,
        "fingerprint": "f",
        "job_id": "job-1",
        "created_at": 100.0,
    }
    return IdempotencyRecord(**{**values, **fields})


def put(database: Database, scope: Scope, kept: IdempotencyRecord) -> None:
    database.write_now(lambda connection: accounts.record_request(connection, scope, kept))


def test_record_is_found_again_within_its_account(database: Database) -> None:
    kept = record()
    put(database, ACME, kept)
    with database.read() as connection:
        assert accounts.find_request(connection, ACME, "k", "f") == kept
        assert accounts.find_request(connection, ACME, "another", "f") is None
        assert accounts.find_request(connection, OTHER, "k", "f") is None


def test_key_of_a_different_request_is_refused(database: Database) -> None:
    put(database, ACME, record())
    with database.read() as connection, pytest.raises(IdempotencyMismatchError):
        accounts.find_request(connection, ACME, "k", "something else")


def test_one_key_in_two_accounts_is_two_keys(database: Database) -> None:
    put(database, ACME, record(job_id="job-1"))
    put(database, OTHER, record(job_id="job-2"))
    with database.read() as connection:
        found = accounts.find_request(connection, OTHER, "k", "f")
    assert found is not None
    assert found.job_id == "job-2"


def test_hundred_submissions_at_once_with_one_key_make_one_job(database: Database) -> None:
    def submit(number: int) -> str:
        def closure(connection: sa.Connection) -> str:
            earlier = accounts.find_request(connection, ACME, "k", "f")
            if earlier is not None:
                return str(earlier.job_id)
            job = new_job(f"job-{number}")
            jobs.insert(connection, ACME, submission_of(job))
            accounts.record_request(connection, ACME, record(job_id=job.job_id))
            return job.job_id

        return database.write_now(closure)

    with ThreadPoolExecutor(20) as pool:
        answers = set(pool.map(submit, range(100)))
    with database.read() as connection:
        assert {job.job_id for job in jobs.unfinished(connection, EVERYTHING)} == answers
    assert len(answers) == 1


def test_old_answers_are_forgotten(database: Database) -> None:
    put(database, ACME, record("old", created_at=10.0))
    put(database, OTHER, record("old", created_at=10.0))
    put(database, ACME, record("new", created_at=20.0))
    assert database.write_now(lambda connection: accounts.forget_requests(connection, ACME, 20.0)) == 1
    assert database.write_now(lambda connection: accounts.forget_requests(connection, EVERYTHING, 20.0)) == 1
    with database.read() as connection:
        assert accounts.find_request(connection, ACME, "old", "f") is None
        assert accounts.find_request(connection, ACME, "new", "f") is not None

from __future__ import annotations

import pytest
from store_records import ACME, EVERYTHING, OTHER, apply, change_of, new_job, submit

from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.core.job import Job
from trainmaster.server.store import job_inputs
from trainmaster.server.store.database import Database
from trainmaster.server.store.job_inputs import Blob
from trainmaster.server.store.scope import Scope

A, B = "a" * 64, "b" * 64


def put(database: Database, sha256: str, now: float, scope: Scope = ACME) -> None:
    database.write_now(lambda connection: job_inputs.put_blob(connection, scope, sha256, 2**40, now))


def use(database: Database, job: Job, *digests: str, now: float = 200.0) -> None:
    database.write_now(lambda connection: job_inputs.use_blobs(connection, ACME, job, digests, now))


def unused(database: Database, before: float) -> list[str]:
    with database.read() as connection:
        return [blob.sha256 for blob in job_inputs.unused_blobs(connection, EVERYTHING, before)]


def test_blob_that_is_put_twice_is_there_once(database: Database) -> None:
    put(database, A, 100.0)
    put(database, A, 150.0)
    with database.read() as connection:
        expected = Blob(account_id="acme", sha256=A, size_bytes=2**40, created_at=100.0, last_used_at=150.0)
        assert job_inputs.get_blob(connection, ACME, A) == expected
        assert job_inputs.get_blob(connection, ACME, B) is None
        assert job_inputs.get_blob(connection, OTHER, A) is None
        assert job_inputs.get_blob(connection, EVERYTHING, A) == expected


def test_what_an_account_lacks_is_told_however_much_is_asked(database: Database) -> None:
    put(database, A, 100.0)
    put(database, B, 100.0, OTHER)
    many = [f"{number:064x}" for number in range(1, 1200)]
    put(database, many[700], 100.0)
    with database.read() as connection:
        assert job_inputs.missing_blobs(connection, ACME, [B, A, B]) == [B]
        assert job_inputs.missing_blobs(connection, ACME, []) == []
        assert job_inputs.missing_blobs(connection, ACME, [*many, A]) == [each for each in many if each != many[700]]


def test_blob_is_unused_until_a_job_uses_it_and_after_that_job_is_deleted(database: Database) -> None:
    job = submit(database, new_job())
    put(database, A, 100.0)
    put(database, B, 150.0)
    assert unused(database, 100.0) == []
    assert unused(database, 300.0) == [A, B]
    use(database, job, A, A)
    assert unused(database, 300.0) == [B]
    apply(database, change_of(job, deleted_at=250.0))
    assert unused(database, 300.0) == [B, A]


def test_job_cannot_use_what_its_account_has_not_uploaded(database: Database) -> None:
    job = submit(database, new_job())
    put(database, A, 100.0, OTHER)
    with pytest.raises(NotFoundError):
        use(database, job, A)


def test_unused_blob_is_deleted_unless_somebody_came_to_use_it(database: Database) -> None:
    gone, live = submit(database, new_job("job-1")), submit(database, new_job("job-2"))
    put(database, A, 100.0)
    put(database, B, 100.0)
    use(database, gone, A)
    apply(database, change_of(gone, deleted_at=250.0))
    with database.read() as connection:
        first, second = sorted(job_inputs.unused_blobs(connection, EVERYTHING, 300.0), key=lambda blob: blob.sha256)
    use(database, live, B)
    assert database.write_now(lambda connection: job_inputs.delete_blob(connection, EVERYTHING, first, 300.0))
    assert not database.write_now(lambda connection: job_inputs.delete_blob(connection, EVERYTHING, second, 300.0))
    with database.read() as connection:
        assert job_inputs.get_blob(connection, ACME, A) is None
        assert job_inputs.get_blob(connection, ACME, B) is not None


def test_blob_that_was_shipped_again_is_not_deleted(database: Database) -> None:
    put(database, A, 100.0)
    with database.read() as connection:
        (blob,) = job_inputs.unused_blobs(connection, EVERYTHING, 200.0)
    put(database, A, 250.0)
    assert not database.write_now(lambda connection: job_inputs.delete_blob(connection, EVERYTHING, blob, 200.0))

"""Promoted models and the operations that make them, and what an account leaves behind."""

from __future__ import annotations

import pytest
from store_records import ACME, EVERYTHING, OTHER, apply, change_of, new_job, submit

from trainmaster.server.core.accounts import Account
from trainmaster.server.core.errors import ConflictError, NotFoundError
from trainmaster.server.core.job import Job
from trainmaster.server.store import accounts, promoted
from trainmaster.server.store.database import Database
from trainmaster.server.store.promoted import Operation, PromotedModel


@pytest.fixture
def job(database: Database) -> Job:
    account = Account(account_id=ACME.account, created_at=1.0)
    database.write_now(lambda connection: accounts.create(connection, EVERYTHING, account))
    return submit(database, new_job(account_id=ACME.account))


def model(job: Job, model_id: str = "m", **fields: object) -> PromotedModel:
    known = {"checkpoint_id": "c", "base_model": "b", "kind": "HF_PEFT_ADDON", "size_bytes": 2**40, "created_at": 1.0}
    return PromotedModel(account_id=job.account_id, model_id=model_id, job_id=job.job_id, **{**known, **fields})  # type: ignore[arg-type]


def operation(name: str = "o") -> Operation:
    return Operation(account_id=ACME.account, operation_id=name, request={"a": [1]}, created_at=1.0, worked_on_at=5.0)


def test_models_are_kept_listed_and_removed(database: Database, job: Job) -> None:
    first, second = model(job, "a", details={"r": 8, "target_modules": ["q"]}), model(job, "b")
    for each in (second, first):
        database.write_now(lambda connection, each=each: promoted.put(connection, ACME, each))
    with database.read() as connection:
        assert promoted.all(connection, ACME) == [first, second]
        assert promoted.get(connection, ACME, "a") == first
        assert promoted.all(connection, OTHER) == []
        with pytest.raises(NotFoundError):
            promoted.get(connection, OTHER, "a")
    database.write_now(lambda connection: promoted.put(connection, ACME, model(job, "a", size_bytes=1)))
    database.write_now(lambda connection: promoted.remove(connection, ACME, "b"))
    with database.read() as connection:
        assert [each.size_bytes for each in promoted.all(connection, ACME)] == [1]
    for scope in (ACME, OTHER):
        with pytest.raises(NotFoundError):
            database.write_now(lambda connection, scope=scope: promoted.remove(connection, scope, "b"))


def test_operation_is_taken_by_one_and_finished_once(database: Database, job: Job) -> None:
    asked = operation()
    database.write_now(lambda connection: promoted.begin(connection, ACME, asked))
    with database.read() as connection:
        assert promoted.operation(connection, ACME, "o") == asked
        with pytest.raises(NotFoundError):
            promoted.operation(connection, OTHER, "o")
    assert database.write_now(lambda connection: promoted.take(connection, ACME, asked, 6.0))
    # Who read it before that comes too late.
    assert not database.write_now(lambda connection: promoted.take(connection, ACME, asked, 7.0))
    database.write_now(lambda connection: promoted.finish(connection, ACME, asked, "it failed"))
    with database.read() as connection:
        ended = promoted.operation(connection, ACME, "o")
    assert (ended.done, ended.error, ended.worked_on_at) == (True, "it failed", 6.0)
    assert not database.write_now(lambda connection: promoted.take(connection, ACME, ended, 8.0))


def test_account_goes_with_its_operations_but_not_with_models(database: Database, job: Job) -> None:
    apply(database, change_of(job, deleted_at=2.0))
    database.write_now(lambda connection: promoted.begin(connection, ACME, operation()))
    database.write_now(lambda connection: promoted.put(connection, ACME, model(job)))
    with pytest.raises(ConflictError, match="promoted models"):
        database.write_now(lambda connection: accounts.remove(connection, EVERYTHING, ACME.account))
    database.write_now(lambda connection: promoted.remove(connection, ACME, "m"))
    database.write_now(lambda connection: accounts.remove(connection, EVERYTHING, ACME.account))

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import sqlalchemy as sa
from store_records import ACME, EVERYTHING, OTHER, new_job

from trainmaster.protocol.trainer_requests import ModelMode
from trainmaster.server.core.errors import NotFoundError, RefusedError
from trainmaster.server.core.job import Change, CheckpointRecord
from trainmaster.server.doors.tinker import records
from trainmaster.server.doors.tinker.records import SESSION_OVER, RunState, TinkerRun, TinkerSampler, TinkerSession
from trainmaster.server.store import accounts, checkpoints, jobs, schema
from trainmaster.server.store.database import Database


def session(session_id: str, account_id: str = "acme", **fields: Any) -> TinkerSession:
    values: dict[str, Any] = {"created_at": 100.0, "heartbeat_at": 100.0, "tags": ("a",), "user_metadata": {"b": [1]}}
    return TinkerSession(session_id=session_id, account_id=account_id, **{**values, **fields})


def run(model_id: str, account_id: str = "acme", **fields: Any) -> TinkerRun:
    values: dict[str, Any] = {
        "session_id": model_id.partition(":")[0],
        "base_model": "m",
        "mode": ModelMode.LORA,
        "request": {"lora_config": {"rank": 4}},
        "created_at": 100.0,
        "used_at": 100.0,
    }
    return TinkerRun(model_id=model_id, account_id=account_id, **{**values, **fields})


@pytest.fixture
def filled(database: Database) -> Database:
    def fill(connection: sa.Connection) -> None:
        for account_id in ("acme", "other"):
            accounts.ensure(connection, EVERYTHING, account_id, 99.0)
        jobs.insert(connection, ACME, Change(job=new_job("job-1")))
        for number in range(3):
            records.open_session(connection, ACME, session(f"s{number}", created_at=100.0 + number))
        records.open_session(connection, OTHER, session("theirs", "other"))

    database.write_now(fill)
    return database


def test_session_comes_back_as_it_was_stored(filled: Database) -> None:
    full = session("full", idempotency_key="k", project_id="p", display_name="d", sdk_version="1")
    filled.write_now(lambda connection: records.open_session(connection, ACME, full))
    with filled.read() as connection:
        assert records.get_session(connection, ACME, "full") == full
        with pytest.raises(NotFoundError):
            records.get_session(connection, OTHER, "full")


def test_session_of_one_request_is_made_once_in_its_account(filled: Database) -> None:
    first = filled.write_now(lambda c: records.open_session(c, ACME, session("a", idempotency_key="k")))
    again = filled.write_now(lambda c: records.open_session(c, ACME, session("b", idempotency_key="k")))
    theirs = filled.write_now(lambda c: records.open_session(c, OTHER, session("c", "other", idempotency_key="k")))
    assert (first.session_id, again.session_id, theirs.session_id) == ("a", "a", "c")


def test_sessions_are_listed_newest_first(filled: Database) -> None:
    with filled.read() as connection:
        assert [each.session_id for each in records.sessions(connection, ACME, limit=2)] == ["s2", "s1"]
        assert [each.session_id for each in records.sessions(connection, ACME, limit=2, offset=2)] == ["s0"]
        after = records.sessions(connection, ACME, limit=9, before=(102.0, "s2"))
        assert [each.session_id for each in after] == ["s1", "s0"]
        assert len(records.sessions(connection, EVERYTHING, limit=9)) == 4


def test_first_word_about_the_end_of_a_session_stands(filled: Database) -> None:
    for at, detail in ((5.0, "first"), (6.0, "second")):
        filled.write_now(
            lambda c, at=at, detail=detail: records.finish_session(c, ACME, "s0", at=at, finish={"detail": detail})
        )
    with filled.read() as connection:
        found = records.get_session(connection, ACME, "s0")
        assert (found.finished_at, found.finish) == (5.0, {"detail": "first"})
        assert records.get_session(connection, ACME, "s1").finished_at is None


def test_silent_sessions_are_ended_and_no_others(filled: Database) -> None:
    def work(connection: sa.Connection) -> list[str]:
        records.note_use(connection, EVERYTHING, sessions_heard={"s1": 500.0, "theirs": 10.0}, runs_used={})
        return records.end_silent(connection, EVERYTHING, before=200.0, at=600.0, finish={"detail": "silent"})

    assert set(filled.write_now(work)) == {"s0", "s2", "theirs"}
    assert filled.write_now(work) == []


def test_models_that_wait_are_given_up_in_the_moment_of_their_sessions_end(filled: Database) -> None:
    """s0 is finished, s1 is silent; s2 goes on, and waits for one of their jobs."""

    def fill(connection: sa.Connection) -> None:
        for number in (2, 3):
            jobs.insert(connection, ACME, Change(job=new_job(f"job-{number}")))
        for model_id, job_id in (("s0:train:0", "job-1"), ("s0:train:1", "job-2"), ("s1:train:0", "job-2")):
            records.open_run(connection, ACME, run(model_id, job_id=job_id))
        records.open_run(connection, ACME, run("s0:train:2", job_id="job-3", attempt=1, state=RunState.CREATED))
        records.open_run(connection, ACME, run("s2:train:0", job_id="job-1"))
        records.finish_session(connection, ACME, "s0", at=5.0, finish={})
        records.note_use(connection, EVERYTHING, sessions_heard={"s2": 500.0, "theirs": 500.0}, runs_used={})
        records.end_silent(connection, EVERYTHING, before=200.0, at=600.0, finish={})

    filled.write_now(fill)
    with filled.read() as connection:
        found = {
            each.model_id: each
            for name in ("s0", "s1", "s2")
            for each in records.runs_of_session(connection, ACME, name)
        }
    failed = {model_id for model_id, each in found.items() if each.state is RunState.FAILED}
    assert failed == {"s0:train:0", "s0:train:1", "s1:train:0"}
    assert {(found[model_id].error, found[model_id].category) for model_id in failed} == {(SESSION_OVER, "user")}
    for _ in range(2):
        assert filled.write_now(lambda c: records.abandon_pending(c, ACME, "s0")) == ["job-1", "job-2"]
    assert waited_for(filled, "job-1")
    assert not waited_for(filled, "job-2")
    # A model of the same kind may be about to have that job started again.
    filled.write_now(lambda c: records.open_run(c, ACME, run("s2:train:1", base_model="another")))
    assert not waited_for(filled, "job-2")
    filled.write_now(lambda c: records.open_run(c, ACME, run("s2:train:2")))
    assert waited_for(filled, "job-2")


def waited_for(database: Database, job_id: str) -> bool:
    with database.read() as connection:
        return records.is_waited_for(connection, "acme", job_id)


def test_model_that_waits_in_a_finished_session_keeps_no_job_from_being_let_go(filled: Database) -> None:
    """It was asked for in the moment of the end."""

    def fill(connection: sa.Connection) -> list[str]:
        records.open_run(connection, ACME, run("s0:train:0", job_id="job-1"))
        for session_id in ("s0", "s1"):
            records.finish_session(connection, ACME, session_id, at=5.0, finish={})
        records.open_run(connection, ACME, run("s1:train:0", job_id="job-1"))
        return records.abandon_pending(connection, ACME, "s0")

    assert filled.write_now(fill) == ["job-1"]
    assert not waited_for(filled, "job-1")


def test_run_comes_back_as_it_was_settled(filled: Database) -> None:
    made = filled.write_now(lambda c: records.open_run(c, ACME, run("s0:train:0")))
    again = filled.write_now(lambda c: records.open_run(c, ACME, run("s0:train:0", base_model="another")))
    assert made == again
    settled = replace(made, state=RunState.CREATED, job_id="job-1", attempt=3)
    filled.write_now(lambda c: records.settle_run(c, ACME, settled))
    with filled.read() as connection:
        assert records.get_run(connection, ACME, "s0:train:0") == settled
        assert records.runs_of_session(connection, ACME, "s0") == [settled]
        with pytest.raises(NotFoundError):
            records.get_run(connection, OTHER, "s0:train:0")


def test_runs_that_began_are_listed_newest_first_with_their_number(filled: Database) -> None:
    def fill(connection: sa.Connection) -> None:
        for number in range(4):
            began = {"state": RunState.FAILED if number == 3 else RunState.CREATED, "created_at": 100.0 + number}
            records.open_run(connection, ACME, run(f"s{number % 2}:train:{number}", **began))
        records.move_session(connection, ACME, "s1", "project")

    filled.write_now(fill)
    with filled.read() as connection:
        found, total = records.runs(connection, ACME, limit=2)
        assert ([each.model_id for each in found], total) == (["s0:train:2", "s1:train:1"], 3)
        found, total = records.runs(connection, ACME, limit=2, project_id="project")
        assert ([each.model_id for each in found], total) == (["s1:train:1"], 1)
        assert records.runs(connection, OTHER, limit=9) == ([], 0)


def test_use_of_runs_is_noted(filled: Database) -> None:
    filled.write_now(lambda c: records.open_run(c, ACME, run("s0:train:0")))
    filled.write_now(
        lambda c: records.note_use(c, EVERYTHING, sessions_heard={}, runs_used={"s0:train:0": 200.0, "gone": 1.0})
    )
    with filled.read() as connection:
        assert records.get_run(connection, ACME, "s0:train:0").used_at == 200.0


def test_samplers_belong_to_their_session(filled: Database) -> None:
    sampler = TinkerSampler(sampler_id="x", account_id="acme", session_id="s0", base_model="m", created_at=1.0)
    for _ in range(2):
        filled.write_now(lambda c: records.add_sampler(c, ACME, sampler))
    with filled.read() as connection:
        assert records.samplers_of_session(connection, ACME, "s0") == [sampler]
        assert records.find_sampler(connection, ACME, "x") == sampler
        assert records.find_sampler(connection, OTHER, "x") is None


def test_weights_of_a_run_are_found_and_the_latest_of_a_name_has_it(filled: Database) -> None:
    job = new_job("job-1")

    def saved(checkpoint_id: str, at: float, **fields: Any) -> CheckpointRecord:
        attributes = {"door": "tinker", "model_id": "s0:train:0", **fields.pop("attributes", {})}
        values = {"attempt": 1, "step": 1, "root": "artifacts", "path": checkpoint_id, "kind": "training", "name": "a"}
        return CheckpointRecord(
            checkpoint_id=checkpoint_id, job_id="job-1", created_at=at, attributes=attributes, **{**values, **fields}
        )

    made = [
        saved("first", 1.0),
        saved("second", 2.0),
        saved("sampler", 3.0, kind="sampler"),
        saved("other-run", 4.0, attributes={"model_id": "s1:train:0"}),
        saved("other-door", 5.0, attributes={"door": "fireworks"}),
        saved("own", 6.0, kind="", name=""),
    ]
    filled.write_now(lambda c: checkpoints.register(c, ACME, job, made))
    of_run = run("s0:train:0", job_id="job-1")
    with filled.read() as connection:
        found = records.weights_of_run(connection, ACME, of_run)
        assert [each.checkpoint_id for each in found] == ["sampler", "second"]
        everything = records.weights(connection, ACME)
        assert [each.checkpoint_id for each in everything] == ["other-run", "sampler", "second"]
        assert records.weights(connection, OTHER) == []
        assert records.weights_of_run(connection, ACME, run("s2:train:0")) == []


def test_what_is_left_of_ended_sessions_goes_but_for_runs_that_saved_something(filled: Database) -> None:
    """s0 ended with nothing saved, s1 with a run of two that saved; s2 has not ended, and theirs did so too late."""

    def fill(connection: sa.Connection) -> None:
        for model_id in ("s0:train:0", "s1:train:0", "s1:train:1", "s2:train:0"):
            records.open_run(connection, ACME, run(model_id, job_id="job-1"))
        records.open_run(connection, ACME, run("s0:train:1"))
        records.open_run(connection, OTHER, run("theirs:train:0", "other"))
        for session_id in ("s0", "s1", "s2"):
            sampler = TinkerSampler(
                sampler_id=f"{session_id}:sample:0",
                account_id="acme",
                session_id=session_id,
                base_model="m",
                created_at=1.0,
            )
            records.add_sampler(connection, ACME, sampler)
        for session_id, at in (("s0", 10.0), ("s1", 11.0), ("theirs", 500.0)):
            records.finish_session(connection, EVERYTHING, session_id, at=at, finish={})
        saved = CheckpointRecord(
            checkpoint_id="c",
            job_id="job-1",
            created_at=1.0,
            attributes={"door": "tinker", "model_id": "s1:train:1"},
            attempt=1,
            step=1,
            root="artifacts",
            path="c",
            kind="training",
            name="a",
        )
        checkpoints.register(connection, ACME, new_job("job-1"), [saved])

    filled.write_now(fill)
    with filled.read() as connection:
        found, last = records.leftovers(connection, EVERYTHING, before=400.0)
        assert last is None
        pages, after = [], ""
        while after is not None:
            page, after = records.leftovers(connection, EVERYTHING, before=400.0, after=after, limit=1)
            pages += page
        assert pages == found
        with pytest.raises(NotFoundError):
            records.leftovers(connection, ACME, before=400.0)
    first, second = found
    assert (first.session_id, first.whole) == ("s0", True)
    assert first.model_ids == ("s0:train:0", "s0:train:1")
    assert (second.session_id, second.whole) == ("s1", False)
    assert (second.model_ids, second.sampler_ids) == (("s1:train:0",), ("s1:sample:0",))
    with pytest.raises(NotFoundError):
        filled.write_now(lambda connection: records.forget(connection, OTHER, first))
    filled.write_now(lambda connection: [records.forget(connection, EVERYTHING, each) for each in found])
    with filled.read() as connection:
        assert {each.session_id for each in records.sessions(connection, EVERYTHING, limit=9)} == {"s1", "s2", "theirs"}
        left = [
            each.model_id for name in ("s0", "s1", "s2") for each in records.runs_of_session(connection, ACME, name)
        ]
        assert left == ["s1:train:1", "s2:train:0"]
        assert records.find_sampler(connection, ACME, "s1:sample:0") is None
        assert records.find_sampler(connection, ACME, "s2:sample:0") is not None
        assert records.leftovers(connection, EVERYTHING, before=400.0) == ([], None)
    # When the last weights of a run go, so does it.
    filled.write_now(lambda c: checkpoints.hide(c, ACME, new_job("job-1"), ["c"]))
    with filled.read() as connection:
        (third,), _ = records.leftovers(connection, EVERYTHING, before=400.0)
        assert (third.session_id, third.model_ids, third.whole) == ("s1", ("s1:train:1",), True)


def test_session_of_many_runs_goes_at_once(filled: Database, database_url: str) -> None:
    """PostgreSQL takes 65,535 values in one statement, and SQLite what it was built for, usually half of them."""
    count = 70_000 if database_url.startswith("postgresql") else 35_000

    numbers = sa.select(sa.literal(0).label("number")).cte(recursive=True)
    numbers = numbers.union_all(sa.select(numbers.c.number + 1).where(numbers.c.number < count - 1))

    def many(table: sa.Table, row: dict[str, Any]) -> sa.Insert:
        """Rows that differ in their first column, made by the database itself."""
        key = next(iter(row))
        row = {name: sa.literal(value, table.c[name].type) for name, value in row.items()}
        row[key] = sa.literal("many-") + sa.cast(numbers.c.number, sa.String)
        return sa.insert(table).from_select(list(row), sa.select(*row.values()).select_from(numbers))

    run_row = {**asdict(run("s0:train:0", state=RunState.FAILED)), "request": "{}"}
    sampler_row = {"sampler_id": "", "account_id": "acme", "session_id": "s0", "base_model": "m", "created_at": 1.0}

    def fill(connection: sa.Connection) -> None:
        records.open_run(connection, ACME, run("s0:train:0", state=RunState.FAILED))
        connection.execute(many(schema.tinker_runs, run_row))
        connection.execute(many(schema.tinker_samplers, sampler_row))
        records.finish_session(connection, ACME, "s0", at=5.0, finish={})

    filled.write_now(fill)
    with filled.read() as connection:
        ((gone,), _) = records.leftovers(connection, EVERYTHING, before=400.0)
    assert (len(gone.model_ids), len(gone.sampler_ids)) == (count + 1, count)
    filled.write_now(lambda c: records.forget(c, ACME, gone))
    with filled.read() as connection:
        for table in (schema.tinker_runs, schema.tinker_samplers):
            assert connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one() == 0
        assert "s0" not in {each.session_id for each in records.sessions(connection, EVERYTHING, limit=9)}


def test_half_a_character_is_refused(filled: Database) -> None:
    with pytest.raises(RefusedError), filled.read() as connection:
        records.get_run(connection, ACME, "\ud800")
    with pytest.raises(RefusedError):
        filled.write_now(lambda c: records.open_run(c, ACME, run("s0:train:0", base_model="\ud800")))


def test_nothing_is_written_out_of_scope(filled: Database) -> None:
    for write in (
        lambda c: records.open_session(c, OTHER, session("x")),
        lambda c: records.open_run(c, OTHER, run("s0:train:9")),
        lambda c: records.settle_run(c, OTHER, run("s0:train:9")),
        lambda c: records.finish_session(c, OTHER, "s0", at=1.0, finish={}),
        lambda c: records.move_session(c, OTHER, "s0", "p"),
        lambda c: records.note_use(c, ACME, sessions_heard={}, runs_used={}),
        lambda c: records.end_silent(c, ACME, before=1.0, at=1.0, finish={}),
    ):
        with pytest.raises(NotFoundError):
            filled.write_now(write)


def test_account_goes_with_its_sessions(filled: Database) -> None:
    def fill(connection: sa.Connection) -> None:
        records.open_run(connection, OTHER, run("theirs:train:0", "other"))
        sampler = {"account_id": "other", "session_id": "theirs", "base_model": "m", "created_at": 1.0}
        records.add_sampler(connection, OTHER, TinkerSampler(sampler_id="y", **sampler))
        accounts.remove(connection, EVERYTHING, "other")

    filled.write_now(fill)
    with filled.read() as connection, pytest.raises(NotFoundError):
        records.get_session(connection, EVERYTHING, "theirs")

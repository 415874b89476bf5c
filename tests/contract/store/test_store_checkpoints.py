"""Checkpoints that are pinned, hidden and forgotten, and the jobs that go on from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, event
from store_records import (
    ACME,
    EVERYTHING,
    OTHER,
    apply,
    change_of,
    checkpoint_of,
    end_of,
    new_job,
    node_of,
    placement_of,
    report,
    submit,
)

from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.core.job import Job
from trainmaster.server.core.resources import Share
from trainmaster.server.store import checkpoints
from trainmaster.server.store.database import Database


@pytest.fixture
def job(database: Database) -> Job:
    job = submit(database, new_job())
    saved = (checkpoint_of(job, "c1", 1), checkpoint_of(job, "c2", 2))
    return apply(database, change_of(job, checkpoints=saved))


def names(database: Database, job: Job) -> list[str]:
    with database.read() as connection:
        return [each.checkpoint_id for each in checkpoints.of_job(connection, ACME, job.job_id)]


def test_pinned_checkpoint_says_so_until_it_is_unpinned(database: Database, job: Job) -> None:
    for pinned in (True, False):
        database.write_now(lambda c, pinned=pinned: checkpoints.change(c, ACME, job, "c1", pinned=pinned))
        with database.read() as connection:
            assert checkpoints.get(connection, ACME, "c1").pinned is pinned
            assert checkpoints.get(connection, ACME, "c2").pinned is False


def test_named_checkpoints_are_kept_whole_and_found_by_their_latest(database: Database) -> None:
    job = submit(database, new_job())
    made = [
        replace(
            checkpoint_of(job, name, step), kind=kind, name="n", attributes={"a": [1, {"b": None}]}, expires_at=step
        )
        for name, step, kind in (("c1", 1, "training"), ("c2", 2, "training"), ("c3", 3, "sampler"))
    ]
    apply(database, change_of(job, checkpoints=tuple(made)))
    with database.read() as connection:
        assert checkpoints.of_job(connection, ACME, job.job_id) == made
        assert checkpoints.by_name(connection, ACME, job.job_id, "training", "n") == made[1]
        for scope, kind in ((OTHER, "training"), (ACME, "")):
            with pytest.raises(NotFoundError):
                checkpoints.by_name(connection, scope, job.job_id, kind, "n")
        assert [each.checkpoint_id for each in checkpoints.overdue(connection, EVERYTHING, 2.5)] == ["c1", "c2"]


def test_change_hides_what_is_replaced(database: Database, job: Job) -> None:
    change = change_of(job, checkpoints=(checkpoint_of(job, "c3", 3),))
    apply(database, replace(change, replaced=("c1", "nobodys")))
    assert names(database, job) == ["c2", "c3"]


def test_expiry_and_publication_are_changed_for_one_checkpoint(database: Database, job: Job) -> None:
    database.write_now(lambda connection: checkpoints.change(connection, ACME, job, "c1", expires_at=7.0))
    database.write_now(lambda connection: checkpoints.change(connection, ACME, job, "c1", public=True))
    with database.read() as connection:
        first, second = checkpoints.of_job(connection, ACME, job.job_id)
    assert (first.expires_at, first.public) == (7.0, True)
    assert (second.expires_at, second.public) == (None, False)
    database.write_now(lambda connection: checkpoints.change(connection, ACME, job, "c1", expires_at=None))
    with database.read() as connection:
        assert checkpoints.overdue(connection, EVERYTHING, 1e12) == []


def test_hidden_checkpoint_is_seen_by_nobody_until_it_is_dropped(database: Database, job: Job) -> None:
    database.write_now(lambda connection: checkpoints.hide(connection, ACME, job, ["c1"]))
    assert names(database, job) == ["c2"]
    with database.read() as connection:
        with pytest.raises(NotFoundError):
            checkpoints.get(connection, ACME, "c1")
        (hidden,) = checkpoints.hidden(connection, EVERYTHING)
    assert hidden.checkpoint_id == "c1"
    database.write_now(lambda connection: checkpoints.drop(connection, EVERYTHING, hidden))
    with database.read() as connection:
        assert checkpoints.hidden(connection, EVERYTHING) == []
    assert names(database, job) == ["c2"]


def test_jobs_that_go_on_from_a_checkpoint_are_its_users_until_they_end(database: Database, job: Job) -> None:
    def users() -> dict[str, set[str]]:
        with database.read() as connection:
            return checkpoints.users(connection, ACME, ["c1", "c2"])

    assert users() == {}
    child = submit(database, new_job("job-2", resume_checkpoint_id="c1"))
    assert users() == {"c1": {"job-2"}}
    report(database, node_of("n"))
    placed = placement_of(child, Share(node_id="n"))
    running = placed.job.evolve(resume_checkpoint_id=None, attempt=placed.job.live.evolve(resume_checkpoint_id="c1"))
    child = apply(database, type(placed)(job=running, events=placed.events))
    assert users() == {"c1": {"job-2"}}  # its attempt goes on from it
    with database.read() as connection:
        assert checkpoints.users(connection, OTHER, ["c1"]) == {}
    apply(database, end_of(child))
    assert users() == {}


def test_another_account_can_neither_pin_nor_hide(database: Database, job: Job) -> None:
    for refused in (
        lambda connection: checkpoints.change(connection, OTHER, job, "c1", pinned=True),
        lambda connection: checkpoints.hide(connection, OTHER, job, ["c1"]),
    ):
        with pytest.raises(NotFoundError):
            database.write_now(refused)
    assert names(database, job) == ["c1", "c2"]


@pytest.fixture
def longest_statement() -> Iterator[list[int]]:
    """The numbers of parameters of the statements that are executed meanwhile, one row at a time."""
    counts = [0]

    def count(connection: object, cursor: object, sql: str, parameters: Any, context: object, many: bool) -> None:
        counts.append(0 if many else len(parameters))

    event.listen(Engine, "before_cursor_execute", count)
    yield counts
    event.remove(Engine, "before_cursor_execute", count)


def test_thousands_of_checkpoints_need_no_long_statement(
    database: Database, job: Job, longest_statement: list[int]
) -> None:
    many = [checkpoint_of(job, f"many-{number}", number) for number in range(1500)]
    known = [checkpoint_of(job, "c1", 7), *many]  # registered before: stays as it is
    job = apply(database, change_of(job, checkpoints=tuple(known)))
    assert len(names(database, job)) == 1502
    ids = [each.checkpoint_id for each in many]
    going_on = apply(database, change_of(job, resume_checkpoint_id=ids[-1]))
    with database.read() as connection:
        assert checkpoints.users(connection, ACME, ids) == {ids[-1]: {job.job_id}}
    database.write_now(lambda connection: checkpoints.hide(connection, ACME, going_on, ids))
    assert names(database, job) == ["c1", "c2"]
    assert max(longest_statement) < 1000


def test_newest_checkpoints_of_a_job_are_bounded(database: Database) -> None:
    job = submit(database, new_job())
    made = tuple(checkpoint_of(job, f"c{step}", step) for step in range(checkpoints.MOST_SHOWN + 3))
    job = apply(database, change_of(job, checkpoints=made))
    with database.read() as connection:
        assert checkpoints.newest_of_job(connection, ACME, job.job_id) == list(made[3:])
        assert checkpoints.newest_of_job(connection, EVERYTHING, job.job_id) == list(made[3:])
        assert checkpoints.newest_of_job(connection, OTHER, job.job_id) == []
        assert checkpoints.newest_of_job(connection, ACME, job.job_id, most=2) == list(made[-2:])

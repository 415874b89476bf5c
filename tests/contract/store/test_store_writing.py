from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest
import sqlalchemy as sa
from store_records import EVERYTHING, apply, change_of, new_job, submission_of, submit

from patience import PATIENCE_S
from trainmaster.server import failpoints
from trainmaster.server.core.errors import HandleTakenError, JobNotFoundError, StoreUnavailableError
from trainmaster.server.store import accounts, events, job_list, jobs, schema
from trainmaster.server.store.database import Database


class Held:
    """Keeps the writer busy, so that what is queued meanwhile becomes one group."""

    def __init__(self, database: Database) -> None:
        self._release = threading.Event()
        entered = threading.Event()

        def hold(connection: sa.Connection) -> None:
            entered.set()
            assert self._release.wait(PATIENCE_S)

        self.holding = database.write(hold)
        assert entered.wait(PATIENCE_S)

    def release(self) -> None:
        self._release.set()
        self.holding.result(PATIENCE_S)


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm(None)


def remember(key: str) -> Callable[[sa.Connection], None]:
    return lambda connection: accounts.ensure(connection, EVERYTHING, key, 1.0)


def known(database: Database, *keys: str) -> list[str]:
    with database.read() as connection:
        found = set(connection.execute(sa.select(schema.accounts.c.account_id)).scalars())
    return [key for key in keys if key in found]


def test_write_returns_what_its_closure_returns(database: Database) -> None:
    assert database.write_now(lambda connection: connection.execute(sa.text("SELECT 41 + 1")).scalar_one()) == 42


def test_writes_from_many_threads_all_arrive(database: Database) -> None:
    def write(number: int) -> None:
        submit(database, new_job(f"job-{number}"))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(write, range(300)))
    with database.read() as connection:
        assert len(jobs.unfinished(connection, EVERYTHING)) == 300
        assert len(events.feed(connection, EVERYTHING, 0, 1000)) == 300


def test_failing_closure_does_not_hurt_the_others_of_its_group(database: Database) -> None:
    submit(database, new_job("taken", handle="tuner"))
    held = Held(database)

    def half_done(connection: sa.Connection) -> None:
        accounts.ensure(connection, EVERYTHING, "half", 1.0)
        raise LookupError("no more")

    def clash(connection: sa.Connection) -> None:
        accounts.ensure(connection, EVERYTHING, "clash", 1.0)
        jobs.insert(connection, EVERYTHING, submission_of(new_job("late", handle="tuner")))

    def broken(connection: sa.Connection) -> None:
        connection.execute(sa.text("INSERT INTO accounts (account_id, created_at) VALUES ('d', NULL)"))

    futures: list[Future[object]] = [
        database.write(closure) for closure in (remember("a"), half_done, remember("b"), clash, broken, remember("c"))
    ]
    held.release()
    wait(futures, PATIENCE_S)
    kinds = [type(future.exception()) for future in futures]
    assert kinds == [type(None), LookupError, type(None), HandleTakenError, sa.exc.IntegrityError, type(None)]
    assert known(database, "a", "b", "c", "half", "clash") == ["a", "b", "c"]


def test_lonely_failing_closure_leaves_nothing_and_the_writer_goes_on(database: Database) -> None:
    def half_done(connection: sa.Connection) -> None:
        accounts.ensure(connection, EVERYTHING, "half", 1.0)
        raise SystemExit

    with pytest.raises(SystemExit):
        database.write_now(half_done)
    database.write_now(remember("after"))
    assert known(database, "half", "after") == ["after"]


def test_closures_of_a_group_see_what_came_before_them(database: Database) -> None:
    held = Held(database)
    job = new_job()
    inserting = database.write(lambda connection: jobs.insert(connection, EVERYTHING, submission_of(job)))
    changing = database.write(lambda connection: jobs.apply(connection, EVERYTHING, change_of(job, message="seen")))
    held.release()
    inserting.result(PATIENCE_S)
    assert changing.result(PATIENCE_S) is True


def test_cancelled_write_is_not_made(database: Database) -> None:
    held = Held(database)
    kept, dropped = database.write(remember("kept")), database.write(remember("dropped"))
    assert dropped.cancel()
    held.release()
    kept.result(PATIENCE_S)
    assert known(database, "kept", "dropped") == ["kept"]


def test_nothing_is_resolved_before_its_commit(database: Database) -> None:
    committed_when: list[bool] = []
    held = Held(database)
    futures = [database.write(remember(key)) for key in "abc"]

    def look(point: str) -> None:
        if point == "store.before_commit":
            committed_when.extend(future.done() for future in futures)

    failpoints.arm(look)
    held.release()
    wait(futures, PATIENCE_S)
    assert committed_when
    assert not any(committed_when)


@pytest.mark.parametrize(("point", "found"), [("store.before_commit", []), ("store.after_commit", ["a", "b"])])
def test_failure_around_the_commit_reaches_every_future_of_the_group(
    database: Database, point: str, found: list[str]
) -> None:
    held = Held(database)
    futures = [database.write(remember(key)) for key in "ab"]

    def strike(reached: str) -> None:
        # Not for the group of the one that holds the writer.
        if reached == point and holding_done.is_set():
            raise ZeroDivisionError

    holding_done = threading.Event()
    held.holding.add_done_callback(lambda _: holding_done.set())
    failpoints.arm(strike)
    held.release()
    wait(futures, PATIENCE_S)
    failpoints.arm(None)
    assert [type(future.exception()) for future in futures] == [ZeroDivisionError] * 2
    assert known(database, "a", "b") == found
    database.write_now(remember("after"))
    assert known(database, "after") == ["after"]


CRASHING = """
import sys
sys.path.insert(0, {here!r})
from store_records import new_job, submit
from trainmaster.server import failpoints
from trainmaster.server.store.database import Database

failpoints.arm_from_environment()
submit(Database.open({url!r}), new_job("job-1", labels={{"team": "a"}}, event_count=3))
"""


@pytest.mark.parametrize(("point", "survives"), [("store.before_commit", False), ("store.after_commit", True)])
def test_crash_around_the_commit_leaves_all_or_nothing(database_url: str, point: str, survives: bool) -> None:
    script = CRASHING.format(here=os.path.dirname(__file__), url=database_url)
    crashed = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TRAINMASTER_FAILPOINT": f"{point}:1"},
        timeout=PATIENCE_S,
        check=False,
    )
    assert crashed.returncode == -signal.SIGKILL
    database = Database.open(database_url)
    try:
        with database.read() as connection:
            found = job_list.page(connection, EVERYTHING, job_list.JobQuery(labels={"team": ("a",)}))
            assert len(found.jobs) == int(survives)
            assert len(events.feed(connection, EVERYTHING, 0, 10)) == 3 * survives
        if survives:
            apply(database, change_of(found.jobs[0]))
        else:
            submit(database, new_job("job-1"))
    finally:
        database.close()


def test_close_writes_what_is_queued_and_then_refuses(database: Database, database_url: str) -> None:
    held = Held(database)
    futures = [database.write(remember(key)) for key in "abc"]
    closing = threading.Thread(target=database.close)
    closing.start()
    held.release()
    closing.join(PATIENCE_S)
    assert all(future.done() and future.exception() is None for future in futures)
    with pytest.raises(StoreUnavailableError):
        database.write(remember("late"))
    again = Database.open(database_url)
    assert known(again, "a", "b", "c", "late") == ["a", "b", "c"]
    again.close()


def test_read_sees_one_state_from_its_first_query_to_its_end(database: Database) -> None:
    with database.read() as connection:
        assert jobs.unfinished(connection, EVERYTHING) == []
        submit(database, new_job())
        with pytest.raises(JobNotFoundError):
            jobs.get(connection, EVERYTHING, "job-1")
    with database.read() as connection:
        assert jobs.get(connection, EVERYTHING, "job-1").job_id == "job-1"


def test_reading_connection_cannot_write(database: Database) -> None:
    with pytest.raises(StoreUnavailableError), database.read() as connection:
        accounts.ensure(connection, EVERYTHING, "key", 1.0)


def test_data_version_changes_with_every_commit_of_anybody(database: Database, database_url: str) -> None:
    before = database.data_version()
    assert database.data_version() == before
    database.write_now(remember("a"))
    after = database.data_version()
    assert after != before
    another = Database.open(database_url)
    another.write_now(remember("b"))
    another.close()
    assert database.data_version() != after

from __future__ import annotations

import itertools
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from store_records import ACME, EVERYTHING, OTHER, apply, change_of, event_of, new_job, stored, submit

from trainmaster.protocol.reasons import Reason
from trainmaster.server.core.job import Change
from trainmaster.server.core.states import Actor, JobStatus
from trainmaster.server.store import events, jobs
from trainmaster.server.store.database import Database


def test_event_with_every_field_set_comes_back_as_it_was(database: Database) -> None:
    job = new_job()
    event = event_of(
        job,
        1,
        actor=Actor.WORKER,
        from_status=JobStatus.TRAINING,
        to_status=JobStatus.FAILED,
        reason=Reason.TIMEOUT,
        message="too long — 長い",
        data={"after_s": 3.5, "ranks": [1, 2]},
    )
    submission = Change(job=job, events=(event,))
    database.write_now(lambda connection: jobs.insert(connection, ACME, submission))
    with database.read() as connection:
        assert events.page(connection, ACME, job.job_id) == [event]


def test_pages_of_events_go_on_after_a_number_or_back_from_the_end(database: Database) -> None:
    submit(database, new_job(event_count=7))
    with database.read() as connection:
        assert [e.seq for e in events.page(connection, ACME, "job-1", after_seq=2, limit=3)] == [3, 4, 5]
        assert [e.seq for e in events.page(connection, ACME, "job-1", limit=2, newest_first=True)] == [7, 6]
        assert events.page(connection, ACME, "job-1", after_seq=7) == []


def test_feed_is_in_the_order_of_commits(database: Database) -> None:
    with database.read() as connection:
        assert events.last_id(connection, EVERYTHING) == 0
    first = submit(database, new_job("job-1"))
    submit(database, new_job("job-2", account_id="other"))
    apply(database, change_of(first))
    with database.read() as connection:
        feed = events.feed(connection, EVERYTHING, 0, 10)
        assert [(event.job_id, event.seq) for _, event in feed] == [("job-1", 1), ("job-2", 1), ("job-1", 2)]
        cursors = [cursor for cursor, _ in feed]
        assert cursors == sorted(set(cursors))
        assert events.last_id(connection, EVERYTHING) == cursors[-1]
        assert events.feed(connection, EVERYTHING, cursors[0], 1) == [feed[1]]
        assert events.feed(connection, EVERYTHING, cursors[-1], 10) == []
        assert [event.job_id for _, event in events.feed(connection, OTHER, 0, 10)] == ["job-2"]


def test_changed_jobs_are_those_with_events_after_the_cursor(database: Database) -> None:
    first = submit(database, new_job("job-1"))
    submit(database, new_job("job-2"))
    with database.read() as connection:
        cursor, changed = events.changed_jobs(connection, EVERYTHING, 0)
        assert changed == {"job-1": 1, "job-2": 1}
    apply(database, change_of(apply(database, change_of(first))))
    with database.read() as connection:
        later, changed = events.changed_jobs(connection, EVERYTHING, cursor)
        assert (list(changed), later) == (["job-1"], events.last_id(connection, EVERYTHING))
        assert events.changed_jobs(connection, EVERYTHING, later) == (later, {})


def test_older_events_cost_the_search_for_changed_jobs_nothing_on_sqlite(tmp_path: Path) -> None:
    database = Database.open(f"sqlite:///{tmp_path / 'trainmaster.db'}")

    def steps() -> int:
        counted = itertools.count()
        with database.read() as connection:
            driver = connection.connection.driver_connection
            assert isinstance(driver, sqlite3.Connection)
            last = events.last_id(connection, EVERYTHING)
            driver.set_progress_handler(lambda: next(counted) < 0, 1)
            assert events.changed_jobs(connection, EVERYTHING, last) == (last, {})
            driver.set_progress_handler(None, 1)
        return next(counted)

    submit(database, new_job("job-0"))
    among_few = steps()
    for number in range(1, 30):
        submit(database, new_job(f"job-{number}"))
    assert 0 < steps() <= among_few
    database.close()


def test_reader_of_the_feed_sees_every_event_once_while_others_write(database: Database) -> None:
    writers, changes = 4, 40
    for number in range(writers):
        submit(database, new_job(f"job-{number}"))

    def write(number: int) -> None:
        for _ in range(changes):
            apply(database, change_of(stored(database, f"job-{number}")))

    seen: list[tuple[str, int]] = []
    cursor = 0
    with ThreadPoolExecutor(writers) as pool:
        running = [pool.submit(write, number) for number in range(writers)]
        finished = False
        while not finished:
            finished = all(future.done() for future in running)
            with database.read() as connection:
                found = events.feed(connection, EVERYTHING, cursor, 1000)
            seen += [(event.job_id, event.seq) for _, event in found]
            cursor = found[-1][0] if found else cursor
        for future in running:
            future.result()
    assert len(seen) == len(set(seen)) == writers * (changes + 1)
    for number in range(writers):
        assert [seq for job_id, seq in seen if job_id == f"job-{number}"] == list(range(1, changes + 2))

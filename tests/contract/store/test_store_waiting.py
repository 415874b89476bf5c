"""What waits, in the order of the scheduler, read in pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection
from store_records import ACME, EVERYTHING, apply, end_of, new_job, node_of, placement_of, report, stored, submit

from trainmaster.server.core.errors import NotFoundError, SpecError
from trainmaster.server.core.job import Job, JobProgress
from trainmaster.server.core.resources import Needs, Share
from trainmaster.server.core.states import JobStatus
from trainmaster.server.store import queues
from trainmaster.server.store.database import Database

T = TypeVar("T")


def ask(database: Database, question: Callable[[Connection], T]) -> T:
    with database.read() as connection:
        return question(connection)


def names(jobs: Any) -> list[str]:
    return [job.job_id for job in jobs]


def in_queue(database: Database, count: int, queue: str = "default", **fields: Any) -> list[Job]:
    """Jobs that were queued one after the other."""
    made = [new_job(f"{queue}-{index}", queue=queue, queued_at=1000.0 + index, **fields) for index in range(count)]
    return [submit(database, job) for job in made]


def position(database: Database, job: Job) -> int | None:
    """A job's position, counted by the database and among the jobs that were read already."""

    def both(connection: Connection) -> tuple[int | None, int | None]:
        everything = queues.first(connection, EVERYTHING, 100)
        counted = queues.position(connection, EVERYTHING, job)
        return counted, queues.position_among([other for other in everything if other.queue == job.queue], job)

    counted, found = ask(database, both)
    assert counted == found
    return counted


def test_order_is_by_priority_and_age_and_first_come_those_with_room(database: Database) -> None:
    first, second, third = in_queue(database, 3)
    urgent = submit(database, new_job("urgent", queued_at=1500.0, priority=6))
    made_room = submit(database, new_job("made-room", queued_at=1600.0, room_at=1700.0))
    order = [made_room, urgent, first, second, third]
    assert names(ask(database, lambda connection: queues.first(connection, EVERYTHING, 10))) == names(order)
    assert [position(database, job) for job in order] == [1, 2, 3, 4, 5]
    page = ask(
        database,
        lambda connection: queues.page(connection, EVERYTHING, "default", page_size=10, page_token=None),
    )
    assert names(page.jobs) == names(order)


def test_position_counts_the_jobs_of_all_accounts_in_one_queue(database: Database) -> None:
    in_queue(database, 2, account_id="other")
    in_queue(database, 3, queue="night")
    mine = submit(database, new_job("mine", queued_at=2000.0))
    assert ask(database, lambda connection: queues.position(connection, ACME, mine)) == 3
    with pytest.raises(NotFoundError):
        ask(database, lambda connection: queues.position(connection, ACME, stored(database, "default-0")))


def test_job_that_does_not_wait_has_no_position(database: Database) -> None:
    assert position(database, submit(database, new_job(status=JobStatus.PAUSED))) is None


def test_pages_are_whole_and_keep_their_positions(database: Database) -> None:
    in_queue(database, 5)
    submit(database, new_job("made-room", queued_at=9000.0, room_at=1.0))
    seen: list[tuple[int, str]] = []
    token = None
    while True:
        page = ask(
            database,
            lambda connection, token=token: queues.page(  # type: ignore[misc]
                connection, EVERYTHING, "default", page_size=2, page_token=token
            ),
        )
        seen += list(enumerate(names(page.jobs), page.first_position))
        token = page.next_page_token
        if token is None:
            break
    assert seen == list(enumerate(["made-room", *(f"default-{index}" for index in range(5))], 1))


def test_foreign_token_is_refused(database: Database) -> None:
    with pytest.raises(SpecError, match="page_token"):
        ask(
            database,
            lambda connection: queues.page(connection, EVERYTHING, "default", page_size=2, page_token="nope"),
        )


def test_ahead_gives_the_first_of_those_before_a_job(database: Database) -> None:
    jobs = in_queue(database, 4)
    in_queue(database, 1, queue="night")
    assert names(ask(database, lambda connection: queues.ahead(connection, EVERYTHING, jobs[3], 2))) == [
        "default-0",
        "default-1",
    ]


def test_job_comes_with_what_the_scheduler_reads(database: Database) -> None:
    report(database, node_of("n1"))
    job = submit(
        database,
        new_job(
            needs=Needs(gpus_per_node=2, gpu_type="H100"),
            queue="night",
            preemptible=True,
            max_runtime_s=60.0,
            handle="h",
            progress=JobProgress(step=1, eta_s=5.0, step_at=7.0, metrics={"loss": 1.0}),
            queued_at=1000.0,
        ),
    )
    placed = apply(database, placement_of(job, Share(node_id="n1", gpus=(0, 1))))
    (found,) = ask(database, lambda connection: queues.holding(connection, EVERYTHING))
    for name in ("needs", "queue", "preemptible", "max_runtime_s", "handle", "queued_at", "order_key", "status"):
        assert getattr(found, name) == getattr(placed, name)
    assert (found.progress.eta_s, found.progress.step_at) == (5.0, 7.0)
    assert (found.live.shares, found.live.created_at) == (placed.live.shares, placed.live.created_at)
    with pytest.raises(NotFoundError):
        ask(database, lambda connection: queues.holding(connection, ACME))


def test_counts_follow_the_jobs(database: Database) -> None:
    report(database, node_of("n1"))
    first, _ = in_queue(database, 2, queue="night")
    submit(database, new_job("parked", queue="night", status=JobStatus.PAUSED))
    submit(database, new_job("elsewhere", queued_at=5.0))
    placed = apply(database, placement_of(first, Share(node_id="n1", gpus=(0, 1))))
    counted = ask(database, lambda connection: queues.counts(connection, EVERYTHING))
    night = counted["night"]
    assert (night.depth, night.running, night.paused, night.gpus_held) == (1, 1, 1, 2)
    assert night.oldest_queued_at == 1001.0
    assert ask(database, lambda connection: queues.counts(connection, EVERYTHING, "night")) == {"night": night}
    assert ask(database, lambda connection: queues.by_status(connection, EVERYTHING)) == {
        JobStatus.QUEUED: 2,
        JobStatus.SCHEDULING: 1,
        JobStatus.PAUSED: 1,
    }
    apply(database, end_of(placed))
    assert ask(database, lambda connection: queues.counts(connection, EVERYTHING, "night"))["night"].gpus_held == 0

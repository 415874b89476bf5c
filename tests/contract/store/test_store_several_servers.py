"""Servers that write at the same moment get the same answers as one server would give them one after another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any, TypeVar

import pytest
import sqlalchemy as sa
from store_records import (
    ACME,
    EVERYTHING,
    apply,
    change_of,
    checkpoint_of,
    new_job,
    node_of,
    stored,
    submission_of,
    submit,
)

from patience import PATIENCE_S
from trainmaster.server.core.errors import ConflictError, HandleTakenError, NotFoundError, NotLeaderError
from trainmaster.server.core.resources import JobQueue
from trainmaster.server.store import accounts, checkpoints, events, job_inputs, jobs, leases, nodes, queues
from trainmaster.server.store.accounts import IdempotencyRecord
from trainmaster.server.store.database import Database

T = TypeVar("T")
ROUNDS = 8
BLOB = "a" * 64


class Servers:
    """Three servers on one database."""

    def __init__(self, url: str) -> None:
        self.databases = [Database.open(url, lock_timeout_s=PATIENCE_S) for _ in range(3)]
        self._pool = ThreadPoolExecutor(3)

    def at_once(self, closure: Callable[[sa.Connection, int], T]) -> list[T | ConflictError | NotFoundError]:
        """Have every server write at the same moment: what each got back, or was refused with."""
        barrier = threading.Barrier(3)

        def write(number: int) -> T | ConflictError | NotFoundError:
            barrier.wait(PATIENCE_S)
            try:
                return self.databases[number].write_now(lambda connection: closure(connection, number))
            except (ConflictError, NotFoundError) as refusal:
                return refusal

        return list(self._pool.map(write, range(3)))

    def close(self) -> None:
        self._pool.shutdown()
        for database in self.databases:
            database.close()


@pytest.fixture
def servers(database_url: str) -> Iterator[Servers]:
    with closing(Servers(database_url)) as servers:
        yield servers


def test_one_idempotency_key_makes_one_job(servers: Servers, database: Database) -> None:
    for turn in range(ROUNDS):

        def closure(connection: sa.Connection, number: int, turn: int = turn) -> str:
            earlier = accounts.find_request(connection, ACME, f"key-{turn}", "f")
            if earlier is not None:
                return earlier.job_id
            job = new_job(f"job-{turn}-{number}")
            jobs.insert(connection, ACME, submission_of(job))
            record = IdempotencyRecord(key=f"key-{turn}", fingerprint="f", job_id=job.job_id, created_at=1.0)
            accounts.record_request(connection, ACME, record)
            return job.job_id

        answers = servers.at_once(closure)
        assert len(set(answers)) == 1
    with database.read() as connection:
        assert len(jobs.unfinished(connection, EVERYTHING)) == ROUNDS


def test_one_handle_goes_to_one_job(servers: Servers) -> None:
    for turn in range(ROUNDS):

        def closure(connection: sa.Connection, number: int, turn: int = turn) -> str:
            job = new_job(f"job-{turn}-{number}", handle=f"tuner-{turn}")
            jobs.insert(connection, ACME, submission_of(job))
            return job.job_id

        kinds = [type(answer) for answer in servers.at_once(closure)]
        assert sorted(kinds, key=str) == sorted([str, HandleTakenError, HandleTakenError], key=str)


def test_changes_that_are_decided_in_their_transaction_are_all_made(servers: Servers, database: Database) -> None:
    submit(database, new_job())

    def closure(connection: sa.Connection, number: int) -> bool:
        return jobs.apply(connection, EVERYTHING, change_of(jobs.get(connection, EVERYTHING, "job-1")))

    for _ in range(ROUNDS):
        assert servers.at_once(closure) == [True, True, True]
    with database.read() as connection:
        seen = [event.seq for event in events.page(connection, ACME, "job-1", limit=1000)]
    assert seen == list(range(1, 3 * ROUNDS + 2))


def test_of_changes_of_one_version_one_is_made(servers: Servers, database: Database) -> None:
    job = submit(database, new_job())
    for _ in range(ROUNDS):
        change = change_of(job)
        won = servers.at_once(lambda connection, number, change=change: jobs.apply(connection, EVERYTHING, change))
        assert sorted(won, key=bool) == [False, False, True]
        job = change.job


UPSERTS: dict[str, Callable[[sa.Connection, int], Any]] = {
    "account": lambda connection, number: accounts.ensure(connection, EVERYTHING, "new", 1.0 + number),
    "activity": lambda connection, number: jobs.record_use(connection, EVERYTHING, "job-1", 1.0 + number),
    "blob": lambda connection, number: job_inputs.put_blob(connection, ACME, BLOB, 1, 1.0 + number),
    "queue": lambda connection, number: queues.put(
        connection, EVERYTHING, JobQueue(name="night", weight=number + 1), 1.0
    ),
    "node": lambda connection, number: nodes.put(connection, EVERYTHING, [node_of("n1", slots=number + 1)]),
    "checkpoint": lambda connection, number: checkpoints.register(
        connection, EVERYTHING, new_job(), [checkpoint_of(new_job(), "c-1", 1)]
    ),
}


@pytest.mark.parametrize("name", UPSERTS)
def test_what_all_make_at_once_is_there_once(servers: Servers, database: Database, name: str) -> None:
    submit(database, new_job())
    assert servers.at_once(UPSERTS[name]) == [None, None, None]
    if name == "activity":
        with database.read() as connection:
            assert jobs.last_use(connection, ACME, "job-1") == 3.0


def test_blob_is_either_used_or_collected(servers: Servers, database: Database) -> None:
    for turn in range(ROUNDS):
        job = submit(database, new_job(f"job-{turn}"))
        database.write_now(lambda connection: job_inputs.put_blob(connection, ACME, BLOB, 1, 1.0))
        with database.read() as connection:
            (blob,) = job_inputs.unused_blobs(connection, EVERYTHING, 2.0)

        def closure(connection: sa.Connection, number: int, job: Any = job, blob: Any = blob) -> bool | None:
            if number == 0:
                return job_inputs.use_blobs(connection, ACME, job, [BLOB], 5.0)
            return job_inputs.delete_blob(connection, EVERYTHING, blob, 2.0)

        used, *deleted = servers.at_once(closure)
        assert (used is None) is (deleted == [False, False])
        with database.read() as connection:
            assert (job_inputs.get_blob(connection, ACME, BLOB) is not None) is (used is None)
        apply(database, change_of(job, deleted_at=3.0))
        database.write_now(lambda connection: connection.execute(sa.text("UPDATE blobs SET last_used_at = 1")))


def test_reader_of_the_feed_misses_nothing_that_any_server_commits(servers: Servers, database: Database) -> None:
    changes = 40
    for number in range(6):
        submit(database, new_job(f"job-{number}"))

    def write(number: int) -> None:
        server = servers.databases[number % 3]
        for _ in range(changes):
            apply(server, change_of(stored(server, f"job-{number}")))

    seen: list[tuple[str, int]] = []
    cursor = 0
    with ThreadPoolExecutor(6) as pool:
        running: list[Future[None]] = [pool.submit(write, number) for number in range(6)]
        finished = False
        while not finished:
            finished = all(future.done() for future in running)
            with database.read() as connection:
                page = events.feed(connection, EVERYTHING, cursor, 7)
            if page:
                cursor, finished = page[-1][0], False
                seen += [(event.job_id, event.seq) for _, event in page]
        for future in running:
            future.result()
    assert sorted(seen) == [(f"job-{number}", seq) for number in range(6) for seq in range(1, changes + 2)]


def test_follower_of_the_cluster_notices_every_change_of_any_server(servers: Servers, database: Database) -> None:
    weights: list[float] = []
    stop = threading.Event()

    def follow() -> None:
        last = 0
        while True:
            done = stop.is_set()
            with database.read() as connection:
                newest = events.last_cluster_id(connection, EVERYTHING)
                if newest != last:
                    last = newest
                    weights[:] = [queue.weight for queue in queues.all(connection, EVERYTHING)]
            if done:
                return

    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(follow)
        for turn in range(ROUNDS):
            servers.at_once(
                lambda connection, number, turn=turn: queues.put(
                    connection, EVERYTHING, JobQueue(name=f"queue-{number}", weight=turn + 2.0), 1.0
                )
            )
        stop.set()
        following.result(PATIENCE_S)
    assert weights == [1.0, *[ROUNDS + 1.0] * 3]


def test_nobody_takes_over_in_the_middle_of_a_leaders_transaction(servers: Servers, database: Database) -> None:
    first, second, _ = servers.databases
    lease = first.write_now(lambda connection: leases.acquire(connection, EVERYTHING, "one", "u", 100.0, 5.0))
    assert lease is not None
    entered, go_on = threading.Event(), threading.Event()

    def lead(connection: sa.Connection) -> None:
        leases.check(connection, EVERYTHING, lease.epoch)
        entered.set()
        assert go_on.wait(PATIENCE_S)
        queues.put(connection, EVERYTHING, JobQueue(name="led by one"), 1.0)

    leading = first.write(lead)
    assert entered.wait(PATIENCE_S)

    def take_over(connection: sa.Connection) -> tuple[leases.Lease | None, bool]:
        taken = leases.acquire(connection, EVERYTHING, "two", "u", 200.0, 5.0)
        return taken, queues.exists(connection, EVERYTHING, "led by one")

    taking = second.write(take_over)
    assert not taking.done()
    go_on.set()
    leading.result(PATIENCE_S)
    taken, saw_the_leaders_write = taking.result(PATIENCE_S)
    assert taken is not None
    assert taken.epoch == 2
    assert saw_the_leaders_write
    with pytest.raises(NotLeaderError):
        first.write_now(lambda connection: leases.check(connection, EVERYTHING, lease.epoch))


def test_one_clock_is_read_by_all(servers: Servers) -> None:
    shown = [
        float(database.write_now(lambda connection: leases.now(connection, EVERYTHING)))
        for database in servers.databases
    ]
    assert shown == sorted(shown)
    assert shown[0] > 1_700_000_000


def test_write_of_another_server_changes_the_data_version(servers: Servers) -> None:
    first, second, _ = servers.databases
    for number in range(ROUNDS):
        before = first.data_version()
        second.write_now(lambda connection, number=number: accounts.ensure(connection, EVERYTHING, f"a{number}", 1.0))
        assert first.data_version() != before

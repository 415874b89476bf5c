from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from store_records import (
    EVERYTHING,
    apply,
    change_of,
    end_of,
    new_job,
    node_of,
    placement_of,
    report,
    stored,
    submit,
)

from trainmaster.server.core.errors import DoubleBookedError
from trainmaster.server.core.job import Attempt
from trainmaster.server.core.resources import Gpu, Share
from trainmaster.server.core.states import JobStatus
from trainmaster.server.store import attempts, events, jobs, schema
from trainmaster.server.store.database import Database

TWO_GPUS = Share(node_id="n1", gpus=(0, 1), cpu_cores=4, ram_mb=1000, storage_mb=10)
OTHER_NODE = Share(node_id="n2", gpus=(0, 1))


@pytest.fixture(autouse=True)
def machines(database: Database) -> None:
    report(database, *(node_of(node_id) for node_id in ("n1", "n2", "n3")))


def held(database: Database) -> dict[tuple[str, int, int], Share]:
    with database.read() as connection:
        return {(a.job_id, a.attempt, a.member): a.share for a in attempts.all_allocations(connection, EVERYTHING)}


def test_new_attempt_holds_its_shares_until_it_ends(database: Database) -> None:
    job = apply(database, placement_of(submit(database, new_job()), TWO_GPUS, OTHER_NODE))
    assert held(database) == {("job-1", 1, 0): TWO_GPUS, ("job-1", 1, 1): OTHER_NODE}
    job = apply(database, change_of(job, attempt=job.live.evolve(claimed=frozenset({0}))))
    assert held(database) == {("job-1", 1, 0): TWO_GPUS, ("job-1", 1, 1): OTHER_NODE}
    apply(database, end_of(job))
    assert held(database) == {}


def test_gpu_that_is_held_cannot_be_taken_again(database: Database) -> None:
    apply(database, placement_of(submit(database, new_job("job-1")), TWO_GPUS))
    second = submit(database, new_job("job-2"))
    greedy = placement_of(second, Share(node_id="n3", gpus=(0,)), Share(node_id="n1", gpus=(1, 2)))
    with pytest.raises(DoubleBookedError):
        database.write_now(lambda connection: jobs.apply(connection, EVERYTHING, greedy))
    assert held(database) == {("job-1", 1, 0): TWO_GPUS}
    assert stored(database, "job-2") == second
    with database.read() as connection:
        assert attempts.of_job(connection, EVERYTHING, "job-2") == []
        assert len(events.page(connection, EVERYTHING, "job-2")) == 1


def test_gang_cannot_take_one_gpu_twice(database: Database) -> None:
    job = submit(database, new_job())
    with pytest.raises(DoubleBookedError):
        apply(database, placement_of(job, Share(node_id="n1", gpus=(0,)), Share(node_id="n1", gpus=(0,))))
    assert held(database) == {}


def test_shares_without_gpus_may_lie_on_one_node(database: Database) -> None:
    share = Share(node_id="n1", cpu_cores=1)
    apply(database, placement_of(submit(database, new_job("job-1")), share, share))
    apply(database, placement_of(submit(database, new_job("job-2")), share))
    assert len(held(database)) == 3


def test_released_gpu_can_be_taken_in_the_same_group(database: Database) -> None:
    first = apply(database, placement_of(submit(database, new_job("job-1")), TWO_GPUS))
    second = submit(database, new_job("job-2"))
    ending = database.write(lambda connection: jobs.apply(connection, EVERYTHING, end_of(first)))
    placing = database.write(lambda connection: jobs.apply(connection, EVERYTHING, placement_of(second, TWO_GPUS)))
    assert ending.result()
    assert placing.result()
    assert held(database) == {("job-2", 1, 0): TWO_GPUS}


def test_stale_end_releases_nothing(database: Database) -> None:
    job = apply(database, placement_of(submit(database, new_job()), TWO_GPUS))
    late = end_of(job)
    queued = apply(database, end_of(job, status=JobStatus.QUEUED))
    apply(database, placement_of(queued, TWO_GPUS))
    assert not database.write_now(lambda connection: jobs.apply(connection, EVERYTHING, late))
    assert held(database) == {("job-1", 2, 0): TWO_GPUS}


def test_one_change_may_end_an_attempt_and_begin_the_next_on_the_same_gpus(database: Database) -> None:
    job = apply(database, placement_of(submit(database, new_job()), TWO_GPUS))
    following = Attempt(number=2, token="t2", backend="local", shares=(TWO_GPUS,), created_at=1005.0)
    apply(database, change_of(job, ended=job.live, attempt=following, attempt_count=2))
    assert held(database) == {("job-1", 2, 0): TWO_GPUS}


def test_attempt_that_ends_in_the_change_that_made_it_holds_nothing(database: Database) -> None:
    job = submit(database, new_job())
    refused = placement_of(job, TWO_GPUS).job.live.evolve(ended_at=1003.0)
    apply(database, change_of(job, status=JobStatus.FAILED, attempt_count=1, ended=refused))
    assert held(database) == {}
    with database.read() as connection:
        assert attempts.of_job(connection, EVERYTHING, "job-1") == [refused]


@pytest.mark.parametrize(
    ("share", "most"),
    [
        (Share(node_id="n1"), 4),
        (Share(node_id="n1", cpu_cores=3), 2),
        (Share(node_id="n1", ram_mb=4000), 2),
        (Share(node_id="n1", storage_mb=401), 1),
    ],
)
def test_node_gives_no_more_than_it_has(database: Database, share: Share, most: int) -> None:
    waiting = [submit(database, new_job(f"job-{number}")) for number in range(most + 1)]
    placed = [apply(database, placement_of(job, share)) for job in waiting[:most]]
    with pytest.raises(DoubleBookedError, match="n1 has"):
        apply(database, placement_of(waiting[-1], share))
    assert len(held(database)) == most
    assert stored(database, waiting[-1].job_id) == waiting[-1]
    apply(database, end_of(placed[0]))
    apply(database, placement_of(waiting[-1], share))
    assert len(held(database)) == most


def test_gang_cannot_take_more_than_a_node_has_either(database: Database) -> None:
    job = submit(database, new_job())
    share = Share(node_id="n1", cpu_cores=5)
    with pytest.raises(DoubleBookedError, match="CPU cores"):
        apply(database, placement_of(job, share, share))
    assert held(database) == {}


def test_node_that_shrank_under_what_it_holds_gives_what_is_not_short(database: Database) -> None:
    apply(database, placement_of(submit(database, new_job("job-1")), Share(node_id="n1", storage_mb=800, cpu_cores=2)))
    report(database, node_of("n1", storage_mb=100))
    second = submit(database, new_job("job-2"))
    with pytest.raises(DoubleBookedError, match="storage"):
        apply(database, placement_of(second, Share(node_id="n1", storage_mb=1)))
    apply(database, placement_of(second, Share(node_id="n1", cpu_cores=2)))
    assert len(held(database)) == 2


@pytest.mark.parametrize(
    ("share", "why"),
    [
        (Share(node_id="nowhere"), "no node nowhere"),
        (Share(node_id="n1", gpus=(7,)), "no GPU 7"),
        (Share(node_id="n2", gpus=(0, 1)), "no GPU 1"),
    ],
)
def test_what_no_node_has_cannot_be_taken(database: Database, share: Share, why: str) -> None:
    broken = Gpu(index=1, device="1", type="H100", memory_mb=80_000, healthy=False)
    report(database, node_of("n2", gpus=(Gpu(index=0, device="0", type="H100", memory_mb=80_000), broken)))
    job = submit(database, new_job())
    with pytest.raises(DoubleBookedError, match=why):
        apply(database, placement_of(job, share))
    assert held(database) == {}


def test_what_was_taken_is_given_back_once(database: Database) -> None:
    job = apply(database, placement_of(submit(database, new_job()), TWO_GPUS))
    database.write_now(lambda connection: attempts.release(connection, EVERYTHING, job, job.live))
    with pytest.raises(DoubleBookedError, match="holds 0 with 0"):
        apply(database, end_of(job))
    assert stored(database, "job-1") == job


def test_attempt_that_lacks_a_gpu_of_its_own_cannot_end_unnoticed(database: Database) -> None:
    job = apply(database, placement_of(submit(database, new_job()), TWO_GPUS))
    database.write_now(
        lambda connection: connection.execute(
            sa.delete(schema.allocated_gpus).where(schema.allocated_gpus.c.gpu_index == 1)
        )
    )
    with pytest.raises(DoubleBookedError, match="2 GPUs"):
        apply(database, end_of(job))


def test_servers_that_place_at_once_never_give_more_than_a_node_has(database_url: str, database: Database) -> None:
    share = Share(node_id="n1", cpu_cores=2, ram_mb=1)
    waiting = [submit(database, new_job(f"job-{number}")) for number in range(12)]
    servers = [Database.open(database_url, lock_timeout_s=60.0) for _ in range(3)]

    def place(number: int) -> bool:
        try:
            apply(servers[number % 3], placement_of(waiting[number], share))
        except DoubleBookedError:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        placed = list(pool.map(place, range(12)))
    for server in servers:
        server.close()
    assert placed.count(True) == len(held(database)) == 4

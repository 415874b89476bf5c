from __future__ import annotations

import pytest
from store_records import EVERYTHING, apply, change_of, end_of, new_job, placement_of, stored, submit

from trainmaster.core.errors import DoubleBookedError
from trainmaster.core.job import Attempt
from trainmaster.core.resources import Share
from trainmaster.core.states import JobStatus
from trainmaster.store import allocations, attempts, events, jobs
from trainmaster.store.database import Database

TWO_GPUS = Share(node_id="n1", gpus=(0, 1), cpu_cores=4, ram_mb=1000, storage_mb=10)
OTHER_NODE = Share(node_id="n2", gpus=(0, 1))


def held(database: Database) -> dict[tuple[str, int, int], Share]:
    with database.read() as connection:
        return {(a.job_id, a.attempt, a.member): a.share for a in allocations.all(connection, EVERYTHING)}


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

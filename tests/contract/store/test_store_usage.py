"""Usage, added up by hand and by the store."""

from __future__ import annotations

from typing import Any

import pytest
from store_records import ACME, EVERYTHING, OTHER, apply, end_of, new_job, node_of, placement_of, report, submit

from trainmaster.server.core.job import Job
from trainmaster.server.core.resources import Gpu, Share
from trainmaster.server.core.states import JobStatus
from trainmaster.server.store import usage
from trainmaster.server.store.database import Database

DAY = 86_400.0
T = 100 * DAY
"""A midnight, in UTC."""
GPUS = tuple(Gpu(index=index, device=str(index), type="H100", memory_mb=80_000) for index in range(8))


def run(
    database: Database, job_id: str, *, begin: float, end: float | None, gpus: int, cores: int, **fields: Any
) -> Job:
    """A job that began, and ended unless it still runs."""
    job = submit(database, new_job(job_id, **fields))
    report(database, node_of(f"node-{job_id}", gpus=GPUS))
    share = Share(node_id=f"node-{job_id}", gpus=tuple(range(gpus)), cpu_cores=cores)
    job = apply(database, placement_of(job, share))
    job = job.evolve(version=job.version + 1, status=JobStatus.TRAINING, attempt=job.live.evolve(started_at=begin))
    change = placement_of(job)
    job = apply(database, type(change)(job=job))
    if end is not None:
        finished = end_of(job)
        assert finished.ended is not None
        job = apply(
            database, type(change)(job=finished.job, events=finished.events, ended=finished.ended.evolve(ended_at=end))
        )
    return job


@pytest.fixture
def used(database: Database) -> Database:
    run(database, "job-1", begin=T, end=T + 100, gpus=2, cores=4, queue="a", labels={"team": "x"})
    run(database, "job-2", begin=T + 50, end=T + 150, gpus=0, cores=1, queue="b", labels={"team": "y"})
    run(database, "job-3", begin=T + 100, end=None, gpus=1, cores=2, queue="a")
    run(database, "job-4", begin=T, end=T + 10, gpus=8, cores=0, queue="a", account_id="other", labels={"team": "x"})
    return database


def added_up(database: Database, group: str, *, scope: Any = ACME, since: float = T, until: float = T + 200) -> Any:
    with database.read() as connection:
        rows = usage.by_group(connection, scope, group, since=since, until=until, now=T + 160, limit=100)
        total = usage.total(connection, scope, since=since, until=until, now=T + 160)
    assert total.gpu_seconds == pytest.approx(sum(row.gpu_seconds for row in rows))
    assert total.wall_seconds == pytest.approx(sum(row.wall_seconds for row in rows))
    return {row.key: (row.jobs, row.attempts, row.gpu_seconds, row.cpu_seconds, row.wall_seconds) for row in rows}


def test_usage_by_queue_adds_up_what_ended_and_what_runs(used: Database) -> None:
    # job-1: 100 s of 2 GPUs and 4 cores; job-3: 60 s so far of 1 GPU and 2 cores. job-2: 100 s of 1 core.
    assert added_up(used, "queue") == {"a": (2, 2, 260.0, 520.0, 160.0), "b": (1, 1, 0.0, 100.0, 100.0)}


def test_usage_is_clipped_to_the_interval(used: Database) -> None:
    assert added_up(used, "job", since=T + 80, until=T + 120) == {
        "job-1": (1, 1, 40.0, 80.0, 20.0),
        "job-3": (1, 1, 20.0, 40.0, 20.0),
        "job-2": (1, 1, 0.0, 40.0, 40.0),
    }
    assert added_up(used, "job", since=T + 5000, until=T + 6000) == {}
    assert added_up(used, "job", since=0, until=T) == {}


def test_account_sees_its_own_usage_and_everything_sees_all(used: Database) -> None:
    assert added_up(used, "account", scope=OTHER) == {"other": (1, 1, 80.0, 0.0, 10.0)}
    assert set(added_up(used, "account", scope=EVERYTHING)) == {"acme", "other"}


def test_running_job_of_another_account_with_the_same_id_does_not_count(used: Database) -> None:
    run(used, "job-3", begin=T + 100, end=None, gpus=0, cores=1, account_id="other")
    assert added_up(used, "job")["job-3"] == (1, 1, 60.0, 120.0, 60.0)
    assert added_up(used, "job", scope=OTHER)["job-3"] == (1, 1, 0.0, 60.0, 60.0)


def test_usage_by_label_and_by_attempt(used: Database) -> None:
    by_team = added_up(used, "label:team", scope=EVERYTHING)
    assert by_team["x"] == (2, 2, 280.0, 400.0, 110.0)
    assert by_team[""] == (1, 1, 60.0, 120.0, 60.0)  # job-3 has no team
    assert "job-2.1" in added_up(used, "attempt")


def test_usage_by_day_parts_an_attempt_at_midnight(database: Database) -> None:
    run(database, "job-1", begin=T - 100, end=T + DAY + 50, gpus=1, cores=1)
    rows = added_up(database, "day", since=0, until=T + 10 * DAY)
    assert list(rows.items()) == [
        ("1970-04-10", (1, 1, 100.0, 100.0, 100.0)),
        ("1970-04-11", (1, 1, DAY, DAY, DAY)),
        ("1970-04-12", (1, 1, 50.0, 50.0, 50.0)),
    ]


def test_usage_by_something_else_is_refused(used: Database) -> None:
    with used.read() as connection, pytest.raises(ValueError, match="cannot be grouped"):
        usage.by_group(connection, ACME, "colour", since=0, until=1, now=1, limit=1)

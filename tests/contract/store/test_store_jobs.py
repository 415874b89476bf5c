from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import pytest
import sqlalchemy as sa
from store_records import (
    ACME,
    EVERYTHING,
    OTHER,
    apply,
    change_of,
    checkpoint_of,
    end_of,
    event_of,
    new_job,
    node_of,
    placement_of,
    report,
    stored,
    submission_of,
    submit,
)

from trainmaster.protocol.launch import Lifetime
from trainmaster.protocol.reasons import Reason, StopCause
from trainmaster.server.core.errors import HandleTakenError, JobNotFoundError
from trainmaster.server.core.job import Attempt, Change, JobProgress
from trainmaster.server.core.resources import Needs, Share
from trainmaster.server.core.states import Desired, JobStatus
from trainmaster.server.store import attempts, checkpoints, events, job_list, jobs, schema
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

FULL = new_job(
    "job-full",
    handle="tuner",
    labels={"team": "support", "dotted.key": ""},
    created_by="key-1",
    parent_job_id="job-0",
    root_job_id="job-0",
    lifetime=Lifetime.SERVICE,
    queue="night",
    priority=9,
    needs=Needs(node_count=2, gpus_per_node=4, gpu_type="H100", ram_mb=2**33, capabilities=("a",), affinity=("b",)),
    max_retries=3,
    preemptible=True,
    max_runtime_s=3600.5,
    inactivity_timeout_s=60.0,
    best_metric="loss",
    best_is_greater=True,
    desired=Desired.PAUSE,
    reason=Reason.OUT_OF_MEMORY,
    message="it was too big — 大きい",
    can_save=True,
    retries_used=1,
    preemptions_used=2,
    queued_at=1000.25,
    not_before=1005.0,
    started_at=1001.0,
    finished_at=1002.0,
    paused_at=1003.0,
    runtime_s=7.5,
    gpu_s=60.0,
    stalled_at=1004.0,
    last_save_s=1.5,
    progress=JobProgress(step=0, total_steps=10, epoch=0.5, metrics={"loss": 2.0}, step_at=1001.5),
    latest_checkpoint_id="c-2",
    best_checkpoint_id="c-1",
    best_metric_value=0.25,
    resume_checkpoint_id="c-1",
    endpoint="127.0.0.1:8080",
    last_activity_at=1006.0,
    purge=True,
    attempt_count=4,
)
ATTEMPT = Attempt(
    number=5,
    token="secret",
    backend="local",
    shares=(Share(node_id="n1", gpus=(0, 3), cpu_cores=2, ram_mb=10, storage_mb=20), Share(node_id="n2")),
    created_at=1001.0,
    resume_checkpoint_id="c-1",
    claimed=frozenset({0, 1}),
    started=frozenset({1}),
    exits={0: {"reason": "SUCCEEDED", "exit_code": 0}, 11: {}},
    offsets={"nodes/0/worker.jsonl": 2**40},
    stop=StopCause.PREEMPT,
    stop_save=True,
    stop_grace_s=45.0,
    stop_at=1007.0,
    stack_dump=True,
    started_at=1002.0,
    ended_at=None,
    reason=Reason.STALLED,
    message="nothing moved",
    evidence={"last_lines": ["a", "b"], "frame": None},
)


@pytest.fixture(autouse=True)
def machines(database: Database) -> None:
    report(database, node_of("n1"), node_of("n2"))


def test_job_with_every_field_set_comes_back_as_it_was(database: Database) -> None:
    submit(database, FULL)
    assert stored(database, "job-full") == FULL


def test_job_with_defaults_only_comes_back_as_it_was(database: Database) -> None:
    job = submit(database, new_job())
    assert stored(database, job.job_id) == job


def test_attempt_with_every_field_set_comes_back_with_its_job(database: Database) -> None:
    job = apply(database, change_of(submit(database, FULL), attempt=ATTEMPT, attempt_count=5))
    assert stored(database, "job-full") == job
    with database.read() as connection:
        assert attempts.get(connection, ACME, "job-full.5") == ATTEMPT


def test_labels_of_the_greatest_size_are_stored(database: Database) -> None:
    values = random.Random(1)
    labels = {
        f"{number:063}": "".join(chr(values.randrange(0x10000, 0x11000)) for _ in range(256)) for number in range(64)
    }
    job = submit(database, new_job(labels=labels))
    assert stored(database, "job-1") == job


def test_mappings_that_are_no_dict_are_stored_too(database: Database) -> None:
    spec = {"workload": MappingProxyType({"kind": "command"})}
    submit(database, new_job(spec=MappingProxyType(spec)))
    assert stored(database, "job-1").spec == spec


def test_unknown_json_keys_are_ignored(database: Database) -> None:
    job = apply(database, change_of(submit(database, FULL), attempt=ATTEMPT, attempt_count=5))

    def add_keys(connection: sa.Connection) -> None:
        row = connection.execute(sa.select(schema.jobs.c.needs, schema.jobs.c.progress)).one()
        connection.execute(
            sa.update(schema.jobs).values(
                needs=json.dumps({**json.loads(row.needs), "cooling": "water"}),
                progress=json.dumps({**json.loads(row.progress), "mood": "good"}),
            )
        )
        shares = json.loads(connection.execute(sa.select(schema.attempts.c.shares)).scalar_one())
        connection.execute(sa.update(schema.attempts).values(shares=json.dumps([{**s, "fpga": 1} for s in shares])))

    database.write_now(add_keys)
    assert stored(database, "job-full") == job


def test_apply_writes_job_attempt_events_and_checkpoints_together(database: Database) -> None:
    job = submit(database, new_job())
    job = apply(database, placement_of(job, Share(node_id="n1")))
    job = apply(
        database,
        change_of(
            job, status=JobStatus.TRAINING, checkpoints=(checkpoint_of(job, "c-1", 1), checkpoint_of(job, "c-2", 2))
        ),
    )
    ended = job.live.evolve(ended_at=1003.0, reason=Reason.SUCCEEDED)
    job = apply(database, change_of(job, status=JobStatus.COMPLETED, attempt=None, ended=ended))
    with database.read() as connection:
        assert jobs.get(connection, ACME, job.job_id) == job
        assert attempts.of_job(connection, ACME, job.job_id) == [ended]
        assert [event.seq for event in events.page(connection, ACME, job.job_id)] == [1, 2, 3, 4]
        assert [c.checkpoint_id for c in checkpoints.of_job(connection, ACME, job.job_id)] == ["c-1", "c-2"]


def test_stale_change_is_refused_and_writes_nothing(database: Database) -> None:
    job = submit(database, new_job(labels={"team": "a"}))
    current = apply(database, change_of(job, message="first"))
    stale = change_of(
        job, message="second", labels={"team": "b"}, checkpoints=(checkpoint_of(job, "c-1", 1),), attempt=ATTEMPT
    )
    assert not database.write_now(lambda connection: jobs.apply(connection, ACME, stale))
    with database.read() as connection:
        assert jobs.get(connection, ACME, job.job_id) == current
        assert len(events.page(connection, ACME, job.job_id)) == 2
        assert checkpoints.of_job(connection, ACME, job.job_id) == []
        assert attempts.of_job(connection, ACME, job.job_id) == []
        assert job_list.page(connection, ACME, job_list.JobQuery(labels={"team": ("b",)})).jobs == ()


def test_change_of_a_job_that_is_not_there_is_refused(database: Database) -> None:
    assert not database.write_now(lambda connection: jobs.apply(connection, ACME, change_of(new_job())))


def test_one_of_many_changes_to_one_version_wins(database: Database) -> None:
    job = submit(database, new_job())

    def race(number: int) -> bool:
        return database.write_now(
            lambda connection: jobs.apply(connection, ACME, change_of(job, message=f"writer {number}"))
        )

    with ThreadPoolExecutor(16) as pool:
        outcomes = list(pool.map(race, range(16)))
    assert outcomes.count(True) == 1
    assert stored(database, job.job_id).message == f"writer {outcomes.index(True)}"
    assert stored(database, job.job_id).version == 2


def test_checkpoint_that_is_known_is_left_alone(database: Database) -> None:
    job = submit(database, new_job())
    first = checkpoint_of(job, "c-1", 1)
    job = apply(database, change_of(job, checkpoints=(first,)))
    apply(database, change_of(job, checkpoints=(checkpoint_of(job, "c-1", 99), checkpoint_of(job, "c-2", 2))))
    with database.read() as connection:
        assert checkpoints.get(connection, ACME, "c-1") == first
        assert [c.step for c in checkpoints.of_job(connection, ACME, job.job_id)] == [1, 2]


def test_forgotten_checkpoints_are_gone(database: Database) -> None:
    job = submit(database, new_job())
    apply(database, change_of(job, checkpoints=(checkpoint_of(job, "c-1", 1),)))
    database.write_now(lambda connection: checkpoints.forget(connection, ACME, job))
    with database.read() as connection:
        assert checkpoints.of_job(connection, ACME, job.job_id) == []


def test_event_number_that_is_taken_fails_the_whole_change(database: Database) -> None:
    job = submit(database, new_job())
    clash = Change(job=job.evolve(version=2, message="lost"), events=(event_of(job, 1),))
    with pytest.raises(Exception, match=r"(?i)unique constraint"):
        database.write_now(lambda connection: jobs.apply(connection, ACME, clash))
    assert stored(database, job.job_id) == job


def test_changed_labels_replace_the_old_ones(database: Database) -> None:
    job = submit(database, new_job(labels={"team": "a", "stage": "one"}))
    apply(database, change_of(job, labels={"team": "b"}))
    with database.read() as connection:
        assert jobs.get(connection, ACME, job.job_id).labels == {"team": "b"}
        for labels, found in (({"team": ("b",)}, 1), ({"team": ("a",)}, 0), ({"stage": ("one",)}, 0)):
            assert len(job_list.page(connection, ACME, job_list.JobQuery(labels=labels)).jobs) == found


def test_handle_of_another_job_is_refused(database: Database) -> None:
    submit(database, new_job("job-1", handle="tuner"))
    with pytest.raises(HandleTakenError):
        submit(database, new_job("job-2", handle="tuner"))
    with database.read() as connection, pytest.raises(JobNotFoundError):
        jobs.get(connection, ACME, "job-2")


def test_handle_is_free_in_another_account_and_after_deletion(database: Database) -> None:
    job = submit(database, new_job("job-1", handle="tuner"))
    submit(database, new_job("job-2", handle="tuner", account_id="other"))
    apply(database, change_of(job, deleted_at=1010.0))
    submit(database, new_job("job-3", handle="tuner"))
    with database.read() as connection:
        assert jobs.get(connection, ACME, "tuner").job_id == "job-3"
        assert jobs.get(connection, OTHER, "tuner").job_id == "job-2"


def test_job_id_comes_before_a_handle_of_the_same_name(database: Database) -> None:
    submit(database, new_job("job-1"))
    submit(database, new_job("job-2", handle="job-1"))
    submit(database, new_job("job-3", account_id="other", handle="job-2"))
    with database.read() as connection:
        assert jobs.get(connection, ACME, "job-1").job_id == "job-1"
        assert jobs.get(connection, OTHER, "job-2").job_id == "job-3"


def test_deleted_job_is_found_only_when_asked_for(database: Database) -> None:
    job = submit(database, new_job(handle="tuner"))
    job = apply(database, change_of(job, status=JobStatus.CANCELLED, deleted_at=1010.0))
    with database.read() as connection:
        for key in ("job-1", "tuner"):
            with pytest.raises(JobNotFoundError):
                jobs.get(connection, ACME, key)
        assert jobs.get(connection, ACME, "job-1", deleted=True) == job
        assert jobs.get(connection, ACME, "tuner", deleted=True) == job
        with pytest.raises(JobNotFoundError):
            jobs.get(connection, OTHER, "tuner", deleted=True)
    living = submit(database, new_job("job-2", handle="tuner"))
    with database.read() as connection:
        assert jobs.get(connection, ACME, "tuner", deleted=True) == living
        assert jobs.get(connection, ACME, "job-1", deleted=True) == job
    last = apply(database, change_of(living, status=JobStatus.CANCELLED, deleted_at=1020.0))
    with database.read() as connection:
        assert jobs.get(connection, ACME, "tuner", deleted=True) == last


def test_tombstones_are_those_that_nobody_purged_the_last_first(database: Database) -> None:
    for number, handle in ((1, "tuner"), (2, "tuner"), (3, None), (4, "other")):
        job = submit(database, new_job(f"job-{number}", handle=handle))
        apply(database, change_of(job, deleted_at=1000.0, purge=number == 4))
    submit(database, new_job("job-5", handle="tuner"))
    abroad = submit(database, new_job("job-6", account_id="other", handle="tuner"))
    apply(database, change_of(abroad, deleted_at=1000.0))

    def found(scope: Scope, **query: Any) -> list[str]:
        with database.read() as connection:
            return [job.job_id for job in jobs.tombstones(connection, scope, **{"limit": 9, **query})]

    assert found(ACME) == ["job-3", "job-2", "job-1"]
    assert found(ACME, limit=2) == ["job-3", "job-2"]
    assert found(ACME, after=(1000.0, "job-2")) == ["job-1"]
    assert found(ACME, name="tuner") == ["job-2", "job-1"]
    assert found(ACME, name="job-1") == ["job-1"]
    assert found(ACME, name="job_1") == found(ACME, name="%") == []
    assert found(OTHER) == ["job-6"]


def test_load_finds_any_number_of_jobs_and_skips_those_that_are_not_there(database: Database) -> None:
    def fill(connection: sa.Connection) -> None:
        for number in range(700):
            jobs.insert(connection, ACME, submission_of(new_job(f"job-{number}")))

    database.write_now(fill)
    with database.read() as connection:
        found = jobs.load(connection, ACME, [f"job-{number}" for number in range(1000)])
    assert {job.job_id for job in found} == {f"job-{number}" for number in range(700)}


def test_unfinished_jobs_are_those_in_no_terminal_state(database: Database) -> None:
    for status in JobStatus:
        submit(database, new_job(status, status=status))
    submit(database, new_job("to-stop-and-delete", status=JobStatus.TRAINING, desired=Desired.DELETE))
    submit(database, new_job("deleted", status=JobStatus.FAILED, desired=Desired.DELETE, deleted_at=1.0))
    with database.read() as connection:
        found = sorted(job.job_id for job in jobs.unfinished(connection, EVERYTHING))
    ended = {JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.PREEMPTED}
    assert found == sorted([*(set(JobStatus) - ended), "to-stop-and-delete"])


def test_unfinished_job_comes_with_its_current_attempt(database: Database) -> None:
    job = apply(database, placement_of(submit(database, new_job()), Share(node_id="n1")))
    job = apply(database, end_of(job, status=JobStatus.QUEUED))
    job = apply(database, placement_of(job, Share(node_id="n2")))
    with database.read() as connection:
        assert jobs.unfinished(connection, EVERYTHING) == [job]


def test_handle_leads_to_its_job_or_to_the_last_that_had_it(database: Database) -> None:
    def found(scope: Scope = ACME) -> str:
        with database.read() as connection:
            return jobs.by_handle(connection, scope, "mine").job_id

    with pytest.raises(JobNotFoundError):
        found()
    for number in (1, 2):
        job = submit(database, new_job(f"job-{number}", handle="mine"))
        assert found() == job.job_id
        apply(database, change_of(job, deleted_at=100.0 + number))
        assert found() == job.job_id
    with pytest.raises(JobNotFoundError):
        found(OTHER)

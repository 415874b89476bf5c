"""Checkpoints beyond a job's limit: out of sight in the transaction that registers one more, and then off the disk."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from trainmaster.protocol.launch import Lifetime
from trainmaster.server.coordinator.checkpoints import left_beside, prune
from trainmaster.server.coordinator.retention import Collector
from trainmaster.server.core.commands import new_job_id, submit
from trainmaster.server.core.job import Change, CheckpointRecord, Job
from trainmaster.server.core.retention import RetentionPolicy
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.core.spec.submit import compile_job
from trainmaster.server.storage import ARTIFACTS, BLOBS, RUNS, Location, Roots
from trainmaster.server.store import checkpoints, events, jobs
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

NOW = 2_000_000_000.0
SCOPE = Scope("default")


class Place:
    """A store and roots, with a job that saves."""

    def __init__(self, directory: Path) -> None:
        self.database = Database.open(f"sqlite:///{directory / 'tm.db'}")
        self.roots = Roots({name: directory / name for name in (RUNS, ARTIFACTS, BLOBS)})
        self.collector = Collector(self.database, self.roots, RetentionPolicy())

    def job(self, kind: str = "command", **checkpoint: Any) -> Job:
        target = {"argv": ["x"]} if kind == "command" else {"target": "m:C"}
        document = {
            "name": "j",
            "workload": {"kind": kind, **target},
            "output_config": {"checkpoint": checkpoint},
        }
        made = submit(
            compile_job(parse_submit(document)),
            account_id="default",
            job_id=new_job_id(),
            created_by="t",
            now=NOW,
            default_backend="local",
        )
        self.database.write_now(lambda connection: jobs.insert(connection, SCOPE, made))
        return made.job

    def save(self, job: Job, step: int, **fields: Any) -> Job:
        """Register a checkpoint, as the coordinator does."""
        path = f"{job.job_id}/checkpoints/{step}"
        made: dict[str, Any] = {
            "checkpoint_id": f"{job.job_id}-{step}",
            "job_id": job.job_id,
            "attempt": 1,
            "step": step,
            "created_at": NOW + step,
            "root": ARTIFACTS,
            "path": path,
            **fields,
        }
        if made["root"] == ARTIFACTS:
            directory = self.roots.path(ARTIFACTS, made["path"])
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "state").write_text("x")

        def work(connection: Connection) -> Job:
            now = jobs.get(connection, SCOPE, job.job_id)
            checkpoint = CheckpointRecord(**made)
            saved = now.evolve(version=now.version + 1, latest_checkpoint_id=checkpoint.checkpoint_id)
            assert jobs.apply(connection, SCOPE, Change(job=saved, checkpoints=(checkpoint,)))
            return prune(connection, saved)

        return self.database.write_now(work)

    def steps(self, job: Job) -> list[int]:
        with self.database.read() as connection:
            return [each.step for each in checkpoints.of_job(connection, SCOPE, job.job_id)]

    def on_disk(self, job: Job) -> list[str]:
        directory = self.roots.path(ARTIFACTS, f"{job.job_id}/checkpoints")
        return sorted(os.listdir(directory), key=int)

    def write(self, work: Any) -> Any:
        return self.database.write_now(work)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.database.close()


def test_oldest_checkpoints_go_when_there_are_more_than_the_limit(place: Place) -> None:
    job = place.job(save_total_limit=2)
    for step in (1, 2, 3, 4):
        job = place.save(job, step)
    assert place.steps(job) == [3, 4]
    assert job.latest_checkpoint_id == f"{job.job_id}-4"
    with place.database.read() as connection:
        told = [e.message for e in events.page(connection, SCOPE, job.job_id) if e.type == "checkpoint_deleted"]
    assert len(told) == 2
    assert told[0].endswith("at step 1 was deleted: save_total_limit is 2")
    assert place.on_disk(job) == ["1", "2", "3", "4"]
    place.collector.sweep()
    assert place.on_disk(job) == ["3", "4"]


def test_pinned_checkpoint_stays_beside_the_limit(place: Place) -> None:
    job = place.save(place.job(save_total_limit=1), 1)
    place.write(lambda connection: checkpoints.change(connection, SCOPE, job, f"{job.job_id}-1", pinned=True))
    for step in (2, 3):
        job = place.save(job, step)
    assert place.steps(job) == [1, 3]


def test_checkpoint_that_another_live_job_goes_on_from_stays(place: Place) -> None:
    job = place.save(place.job(save_total_limit=1), 1)
    follower = place.job()
    place.write(
        lambda connection: jobs.apply(
            connection,
            SCOPE,
            Change(job=follower.evolve(version=follower.version + 1, resume_checkpoint_id=f"{job.job_id}-1")),
        )
    )
    for step in (2, 3):
        job = place.save(job, step)
    assert place.steps(job) == [1, 3]


def test_checkpoint_on_an_object_store_is_forgotten_and_its_files_are_left_alone(place: Place) -> None:
    job = place.job(save_total_limit=1)
    for step in (1, 2):
        job = place.save(job, step, root="uri", path=f"s3://bucket/{step}")
    assert place.steps(job) == [2]
    place.collector.sweep()
    with place.database.read() as connection:
        assert checkpoints.hidden(connection, Scope.everything()) == []


def test_files_behind_a_link_are_not_removed(place: Place, tmp_path: Path) -> None:
    job = place.job(save_total_limit=1)
    foreign = tmp_path / "foreign"
    (foreign / "1").mkdir(parents=True)
    for step in (1, 2):
        job = place.save(job, step)
    own = place.roots.path(ARTIFACTS, f"{job.job_id}/checkpoints")
    own.rename(tmp_path / "moved")
    own.symlink_to(foreign)
    place.collector.sweep()
    assert (foreign / "1").is_dir()
    with place.database.read() as connection:
        assert checkpoints.hidden(connection, Scope.everything()) == []


def test_move_takes_a_directory_and_nothing_behind_a_link(tmp_path: Path) -> None:
    roots = Roots({ARTIFACTS: tmp_path})
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert roots.move(Location(root=ARTIFACTS, path="a/b"), ".going-1")
    assert (tmp_path / ".going-1").is_dir()
    assert not (tmp_path / "a" / "b").exists()
    assert not roots.move(Location(root=ARTIFACTS, path="a/b"), ".going-2")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "c").mkdir()
    (tmp_path / "file").touch()
    for path in ("link/c", "file/c"):
        assert not roots.move(Location(root=ARTIFACTS, path=path), ".going-3")
    assert (tmp_path / "a" / "c").is_dir()


def test_checkpoints_of_a_class_go_with_the_job_that_registered_them(place: Place) -> None:
    home = "classes/default/general/default/j"
    job = place.job("job_class", save_total_limit=1)
    for step in (1, 2):
        job = place.save(job, step, path=f"{home}/{step}")
    place.collector.sweep()
    assert os.listdir(place.roots.path(ARTIFACTS, home)) == ["2"]
    place.collector.purge_checkpoints(job.job_id)
    assert os.listdir(place.roots.path(ARTIFACTS, home)) == []


def test_checkpoint_of_a_class_that_a_later_run_registered_too_stays(place: Place) -> None:
    home = "classes/default/general/default/j"
    job = place.job("job_class", save_total_limit=1)
    job = place.save(job, 1, path=f"{home}/1")
    place.save(place.job("job_class"), 5, path=f"{home}/1", root="artifacts", checkpoint_id="again")
    place.collector.purge_checkpoints(job.job_id)
    assert os.listdir(place.roots.path(ARTIFACTS, home)) == ["1"]


def test_purging_leaves_what_a_live_job_goes_on_from(place: Place) -> None:
    home = "classes/default/general/default/j"
    job = place.save(place.job("job_class"), 1, path=f"{home}/1")
    follower = place.job()
    place.write(
        lambda connection: jobs.apply(
            connection,
            SCOPE,
            Change(job=follower.evolve(version=follower.version + 1, resume_checkpoint_id=f"{job.job_id}-1")),
        )
    )
    place.collector.purge_checkpoints(job.job_id)
    assert os.listdir(place.roots.path(ARTIFACTS, home)) == ["1"]


def save_many(place: Place, job: Job, count: int, **fields: Any) -> None:
    """Register checkpoints without files, as a job that reports them in a flood."""

    def work(connection: Connection) -> None:
        now = jobs.get(connection, SCOPE, job.job_id)
        made = tuple(
            CheckpointRecord(
                checkpoint_id=f"{job.job_id}-{step}",
                job_id=job.job_id,
                attempt=1,
                step=step,
                created_at=NOW + step,
                root=ARTIFACTS,
                path=f"{job.job_id}/checkpoints/{step}",
                **fields,
            )
            for step in range(count)
        )
        saved = now.evolve(version=now.version + 1, latest_checkpoint_id=made[-1].checkpoint_id)
        assert jobs.apply(connection, SCOPE, Change(job=saved, checkpoints=made))

    place.write(work)


def hidden_count(place: Place) -> int:
    with place.database.read() as connection:
        return len(checkpoints.hidden(connection, Scope.everything(), limit=100_000))


def test_flood_of_expired_checkpoints_goes_in_parts(place: Place) -> None:
    job = place.job(save_total_limit=1000)
    save_many(place, job, 2500, expires_at=NOW)
    gone = []
    for _ in range(3):
        assert hidden_count(place) == sum(gone)
        gone.append(len(list(place.collector.expire(NOW + 1))))
    assert gone == [1000, 1000, 500]
    with place.database.read() as connection:
        assert jobs.get(connection, SCOPE, job.job_id).latest_checkpoint_id is None


def test_pinned_checkpoints_do_not_hold_up_others_that_expire(place: Place) -> None:
    job = place.job(save_total_limit=1000)
    save_many(place, job, 1001, expires_at=NOW)
    other = place.save(place.job(), 1, expires_at=NOW + 1)

    def pin(connection: Connection) -> None:
        for step in range(1001):
            checkpoints.change(connection, SCOPE, job, f"{job.job_id}-{step}", pinned=True)

    place.write(pin)
    assert [gone.name for gone in place.collector.expire(NOW + 2)] == [f"{other.job_id}-1"]


@pytest.mark.long  # it measures, as the next ones count
def test_removing_a_checkpoint_reads_none_of_the_thousands_that_the_job_has_besides(place: Place) -> None:
    job = place.job(save_total_limit=1000)
    save_many(place, job, 5000)
    doomed = [f"{job.job_id}-{step}" for step in range(200)]
    place.write(lambda connection: checkpoints.hide(connection, SCOPE, job, doomed))
    began = time.process_time()
    place.collector.sweep()
    took_s = time.process_time() - began
    assert hidden_count(place) == 0
    # All of the others for each one take 10 s and more.
    assert took_s < 5.0


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of the checkpoints that were read."""
    steps: list[int] = []
    real = checkpoints.RECORDS.from_row

    def counted(row: Any) -> CheckpointRecord:
        checkpoint = real(row)
        steps.append(checkpoint.step)
        return checkpoint

    monkeypatch.setattr(checkpoints.RECORDS, "from_row", counted)
    return steps


def test_registering_reads_only_the_checkpoints_that_go(place: Place, read: list[int]) -> None:
    job = place.job(save_total_limit=1000)
    save_many(place, job, 999)
    job = place.save(job, 999)
    assert read == []  # below the limit
    for step in (1000, 1001):
        job = place.save(job, step)
    assert read == [0, 1]
    assert place.steps(job) == list(range(2, 1002))


def test_job_that_keeps_all_has_none_of_its_checkpoints_read(place: Place, read: list[int]) -> None:
    job = place.job(save_total_limit=1000)
    place.write(
        lambda connection: jobs.apply(
            connection, SCOPE, Change(job=job.evolve(version=job.version + 1, lifetime=Lifetime.SERVICE))
        )
    )
    save_many(place, job, 1500)
    place.save(job, 1500)
    assert read == []


def test_checkpoint_is_deleted_without_reading_the_thousands_besides(place: Place, read: list[int]) -> None:
    job = place.job(save_total_limit=1000)
    save_many(place, job, 1000)
    with place.database.read() as connection:
        job = jobs.get(connection, SCOPE, job.job_id)
        newest = checkpoints.of_job(connection, SCOPE, job.job_id)[-1]
        read.clear()
        (left,) = left_beside(connection, job, [newest])
        assert left.step == 998
        assert len(read) == 2
        assert len(left_beside(connection, job.evolve(best_checkpoint_id=newest.checkpoint_id), [newest])) == 999


def kept(place: Place, limit: int, pinned: tuple[int, ...] = (), **pointers: int) -> list[int]:
    """Which of the steps 1, 2 and 3 stay: the latest is 3, and `pointers` say which is the best, and so on."""
    job = place.job(save_total_limit=limit)
    save_many(place, job, 4)
    ids = {f"{name}_checkpoint_id": f"{job.job_id}-{step}" for name, step in {"latest": 3, **pointers}.items()}

    def work(connection: Connection) -> None:
        checkpoints.hide(connection, SCOPE, job, [f"{job.job_id}-0"])
        for step in pinned:
            checkpoints.change(connection, SCOPE, job, f"{job.job_id}-{step}", pinned=True)
        now = jobs.get(connection, SCOPE, job.job_id)
        changed = now.evolve(version=now.version + 1, **ids)
        assert jobs.apply(connection, SCOPE, Change(job=changed))
        prune(connection, changed)

    place.write(work)
    return place.steps(job)


def test_best_pinned_and_resumed_checkpoints_do_not_count_towards_the_limit(place: Place) -> None:
    assert kept(place, 3) == [1, 2, 3]
    assert kept(place, 1) == [3]
    assert kept(place, 1, best=2) == [2, 3]
    assert kept(place, 2, best=2) == [1, 2, 3]
    assert kept(place, 1, (1,)) == [1, 3]
    assert kept(place, 1, resume=1) == [1, 3]


def test_latest_checkpoint_counts_even_if_it_is_the_best_pinned_or_in_use(place: Place) -> None:
    assert kept(place, 1, best=3) == [3]
    assert kept(place, 2, best=3) == [2, 3]
    assert kept(place, 1, resume=3) == [3]
    assert kept(place, 1, (3,)) == [3]


def test_latest_checkpoint_stays_whatever_its_age(place: Place) -> None:
    assert kept(place, 1, latest=1) == [1, 3]


def test_files_that_are_part_of_another_checkpoint_stay(place: Place) -> None:
    job = place.job(save_total_limit=100)
    home = f"{job.job_id}/checkpoints"
    for number, path in enumerate((f"{home}/a_b", f"{home}/a_b/c", f"{home}/axb", f"{home}/a_bc")):
        place.save(job, number, path=path)
    for number, left in ((0, ["a_b", "a_bc", "axb"]), (2, ["a_b", "a_bc"]), (1, ["a_b", "a_bc"])):
        gone = [f"{job.job_id}-{number}"]
        place.write(lambda connection, gone=gone: checkpoints.hide(connection, SCOPE, job, gone))
        place.collector.sweep()
        assert sorted(os.listdir(place.roots.path(ARTIFACTS, home))) == left
    assert os.listdir(place.roots.path(ARTIFACTS, f"{home}/a_b")) == ["state"]

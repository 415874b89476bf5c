"""Collecting what has outlived its job, on a real store and real files."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from deep_tree import deep_tree
from trainmaster.protocol.trainer_requests import ModelMode
from trainmaster.server.coordinator.retention import FAILED, ORPHAN_AGE_S, Collected, Collector
from trainmaster.server.core import observations
from trainmaster.server.core.commands import new_job_id, submit
from trainmaster.server.core.job import Change, CheckpointRecord, Job
from trainmaster.server.core.reports import AttemptObservation, Liveness, NodeObservation
from trainmaster.server.core.resources import Node, Share
from trainmaster.server.core.retention import RetentionPolicy
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.core.spec.submit import compile_job
from trainmaster.server.core.states import JobStatus
from trainmaster.server.doors.tinker import records as tinker
from trainmaster.server.doors.tinker.records import TinkerRun, TinkerSampler, TinkerSession
from trainmaster.server.doors.tinker.sessions import collect_sessions
from trainmaster.server.storage import ARTIFACTS, BLOBS, RUNS, Location, Roots
from trainmaster.server.store import accounts, checkpoints, events, jobs, nodes
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

NOW = 2_000_000_000.0
LATER = NOW + 1000.0
EVERYTHING = Scope.everything()


class Place:
    """A database and roots, with jobs that run and end as the core has them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.database = Database.open(f"sqlite:///{directory / 'tm.db'}")
        self.roots = Roots({name: directory / name for name in (RUNS, ARTIFACTS, BLOBS)})
        node = Node(node_id="n", backend="local", hostname="h", cpu_cores=64, ram_mb=1, storage_mb=1, slots=64)
        self.database.write_now(lambda connection: nodes.put(connection, EVERYTHING, [node]))

    def collect(self, dry_run: bool = False, now: float = LATER, **keep: float) -> list[Collected]:
        return list(self.collector(**keep).collect(now, dry_run=dry_run))

    def collector(self, **keep: float) -> Collector:
        return Collector(
            self.database, self.roots, RetentionPolicy(**keep), spool=self.directory / "spool", also=(collect_sessions,)
        )

    def start(self, **fields: Any) -> Job:
        """A job that runs, with a run directory."""
        document = {"name": "j", "workload": {"kind": "command", "argv": ["x"]}, "resource_config": {"gpu_count": 0}}
        made = submit(
            compile_job(parse_submit(document)),
            account_id="default",
            job_id=new_job_id(),
            created_by="t",
            now=NOW,
            default_backend="local",
        )
        job = made.job.evolve(**fields)
        self.database.write_now(lambda c: jobs.insert(c, EVERYTHING, Change(job=job, events=made.events)))
        job = self.apply(observations.admit(job, now=NOW))
        job = self.apply(observations.place(job, now=NOW, shares=[Share(node_id="n")], token=job.job_id))
        logs = self.roots.path(RUNS, f"{job.job_id}/1/nodes/0/logs")
        logs.mkdir(parents=True)
        (logs / "main.0.out").write_text("x" * 10_000)
        return self.see(job, {"type": "claimed"}, {"type": "started"})

    def save(self, job: Job, *names: str) -> Job:
        for step, name in enumerate(names):
            path = self.roots.path(ARTIFACTS, f"{job.job_id}/checkpoints/{name}")
            path.mkdir(parents=True)
            (path / "weights").write_text("w" * 5000)
            record = {"type": "checkpoint", "checkpoint_id": f"{job.job_id}-{name}", "step": step, "size_bytes": 5000}
            job = self.see(
                job, {**record, "root": ARTIFACTS, "path": f"{job.job_id}/checkpoints/{name}", "t": NOW + step}
            )
        return job

    def end(self, job: Job) -> Job:
        return self.see(job, exit={"reason": "SUCCEEDED", "message": "", "ended_at": NOW})

    def see(self, job: Job, *records: dict[str, Any], **more: Any) -> Job:
        seen = NodeObservation(liveness=Liveness.ALIVE, records=records, **more)
        return self.apply(observations.observe(job, AttemptObservation(attempt=1, nodes=[seen]), now=NOW + 10))

    def apply(self, change: Change | None) -> Job:
        assert change is not None
        assert self.database.write_now(lambda connection: jobs.apply(connection, EVERYTHING, change))
        return change.job

    def saved(self, job: Job) -> list[str]:
        with self.database.read() as connection:
            found: list[CheckpointRecord] = checkpoints.of_job(connection, EVERYTHING, job.job_id)
        return [checkpoint.checkpoint_id.rpartition("-")[2] for checkpoint in found]

    def files(self, job: Job) -> list[str]:
        directory = self.roots.path(ARTIFACTS, f"{job.job_id}/checkpoints")
        return sorted(os.listdir(directory)) if directory.exists() else []

    def runs(self, job: Job) -> Path:
        return self.roots.path(RUNS, job.job_id)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.database.close()


def told(found: list[Collected]) -> list[tuple[str, str]]:
    return [(each.what, each.name) for each in found]


def test_nothing_of_a_user_goes_unless_a_setting_says_so(place: Place) -> None:
    job = place.end(place.save(place.start(), "a", "b"))
    assert place.collect(now=NOW + 1e9) == []
    assert place.runs(job).exists()
    assert place.saved(job) == ["a", "b"]


def test_run_directory_of_a_job_that_ended_goes_and_of_one_that_runs_stays(place: Place) -> None:
    ended, running = place.end(place.start()), place.start()
    assert told(place.collect(runs_s=500, dry_run=True)) == [("run directory", ended.job_id)]
    assert place.runs(ended).exists()
    (gone,) = place.collect(runs_s=500)
    assert gone.size_bytes >= 10_000
    assert not place.runs(ended).exists()
    assert place.runs(running).exists()
    assert place.collect(runs_s=500) == []
    with place.database.read() as connection:
        assert events.feed(connection, EVERYTHING, 0, 1000)[-1][1].type == "runs_removed"
    place.collector().sweep()
    assert os.listdir(place.roots.path(RUNS, "")) == [running.job_id]


def test_what_cannot_be_removed_is_told_of_once(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(location: Location) -> None:
        raise PermissionError(13, "Permission denied", location.path)

    place.end(place.start())
    place.collect(runs_s=500)
    monkeypatch.setattr(place.roots, "remove", refuse)  # files of others, where the server is not root
    collector = place.collector()
    for _ in range(2):
        collector.sweep()
    (record,) = [record for record in caplog.records if "cannot be removed" in record.message]
    assert "Permission denied" in record.message


def test_deep_directory_is_measured_and_collected(place: Place) -> None:
    job = place.end(place.start())
    with deep_tree(place.runs(job) / "1" / "work"):
        for dry_run in (True, False):
            [gone] = place.collect(dry_run, runs_s=500)
            assert (gone.what, gone.name) == ("run directory", job.job_id)
            assert gone.size_bytes >= 10_000
        place.collector().sweep()
    assert not place.runs(job).exists()


def test_job_that_cannot_be_collected_is_reported_and_the_others_go(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, fine = sorted((place.end(place.start()) for _ in range(2)), key=lambda job: job.job_id)
    take = place.roots.move

    def refuse(location: Location, path: str) -> bool:
        if location.path == broken.job_id:
            raise OSError(5, "Input/output error")
        return take(location, path)

    monkeypatch.setattr(place.roots, "move", refuse)  # as on a disk that is broken there
    failed, gone = place.collect(runs_s=500)
    assert failed.what == FAILED
    assert broken.job_id in failed.name
    assert "Input/output error" in failed.name
    assert (gone.what, gone.name) == ("run directory", fine.job_id)


def test_resumed_service_keeps_its_run_directory(place: Place) -> None:
    job = place.end(place.start())
    stale = place.collector(runs_s=500)
    back = job.evolve(version=job.version + 1, status=JobStatus.QUEUED, finished_at=None)
    found = iter(stale.collect(LATER))
    place.apply(Change(job=back))
    assert list(found) == []
    assert place.runs(job).exists()


def test_old_checkpoints_go_but_for_the_latest_and_pinned_ones(place: Place) -> None:
    job = place.end(place.save(place.start(), "a", "b", "c"))
    place.database.write_now(lambda c: checkpoints.change(c, EVERYTHING, job, f"{job.job_id}-a", pinned=True))
    assert told(place.collect(checkpoints_s=500, dry_run=True)) == [("checkpoint", f"{job.job_id}-b")]
    assert place.saved(job) == ["a", "b", "c"]
    place.collect(checkpoints_s=500)
    assert place.saved(job) == ["a", "c"]
    assert place.files(job) == ["a", "b", "c"]  # hidden, and about to go
    place.collector().sweep()
    place.collector().sweep()
    assert place.files(job) == ["a", "c"]


def test_checkpoint_that_a_live_child_goes_on_from_stays(place: Place) -> None:
    job = place.end(place.save(place.start(), "a", "b"))
    child = place.start(resume_checkpoint_id=f"{job.job_id}-a", parent_job_id=job.job_id)
    assert place.collect(checkpoints_s=500) == []
    place.end(child)
    assert told(place.collect(checkpoints_s=500)) == [("checkpoint", f"{job.job_id}-a")]


def test_deleted_job_is_purged_after_a_while_unless_a_child_needs_it(place: Place) -> None:
    job = place.end(place.save(place.start(), "a"))
    child = place.start(resume_checkpoint_id=f"{job.job_id}-a", parent_job_id=job.job_id)
    with place.database.read() as connection:
        job = jobs.get(connection, EVERYTHING, job.job_id)
    place.apply(Change(job=job.evolve(version=job.version + 1, deleted_at=NOW)))
    assert place.collect(deleted_s=500) == []
    place.end(child)
    assert told(place.collect(deleted_s=500)) == [("deleted job", job.job_id)]
    with place.database.read() as connection:
        assert jobs.to_purge(connection, EVERYTHING) == [job.job_id]


def test_orphans_are_told_of_and_go_only_when_they_are_asked_for(place: Place) -> None:
    known = place.end(place.start())
    for root, name in ((RUNS, "job-unknown"), (ARTIFACTS, "job-unknown"), (RUNS, "job-young"), (RUNS, "not-ours")):
        path = place.roots.path(root, name)
        path.mkdir()
        old = LATER - (0 if name == "job-young" else ORPHAN_AGE_S + 10)
        os.utime(path, (old, old))
    collector = place.collector(runs_s=1e9)
    expected = [("orphan", "runs:job-unknown"), ("orphan", "artifacts:job-unknown")]
    assert told(list(collector.orphans(LATER, dry_run=True))) == expected
    assert place.collect(runs_s=1e9) == []
    assert told(list(collector.orphans(LATER))) == expected
    collector.sweep()
    assert sorted(os.listdir(place.roots.path(RUNS, ""))) == sorted([known.job_id, "job-young", "not-ours"])


def test_what_a_courier_left_goes_when_its_attempt_has_ended(place: Place) -> None:
    running, ended = place.start(), place.end(place.start())
    for job in (running, ended):
        path = place.directory / "spool" / f"{job.job_id}.1.0"
        path.mkdir(parents=True)
        os.utime(path, (NOW, NOW))
    assert told(place.collect(caches_s=500)) == [("cache", f"{ended.job_id}.1.0")]
    assert os.listdir(place.directory / "spool") == [f"{running.job_id}.1.0"]


def test_checkpoint_outside_its_jobs_directory_loses_its_record_and_keeps_its_files(place: Place) -> None:
    other = place.save(place.start(), "theirs")
    job = place.start()
    elsewhere = f"{other.job_id}/checkpoints/theirs"
    for step, name in enumerate(("a", "b")):
        record = {"type": "checkpoint", "checkpoint_id": name, "step": step, "root": ARTIFACTS, "t": NOW + step}
        job = place.see(job, {**record, "path": elsewhere})
    place.end(job)
    place.collect(checkpoints_s=500)
    place.collector().sweep()
    assert place.saved(job) == ["b"]
    assert place.files(other) == ["theirs"]


def test_several_may_collect_at_the_same_time(place: Place) -> None:
    ended = [place.end(place.save(place.start(), "a", "b")) for _ in range(8)]
    found: list[Collected] = []
    threads = [
        threading.Thread(target=lambda: found.extend(place.collect(runs_s=500, checkpoints_s=500))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    place.collector().sweep()
    assert sorted(told(found)) == sorted(
        [("run directory", job.job_id) for job in ended] + [("checkpoint", f"{job.job_id}-a") for job in ended]
    )
    assert os.listdir(place.roots.path(RUNS, "")) == []


def test_checkpoint_whose_time_is_over_goes_by_itself(place: Place) -> None:
    job = place.save(place.start(), "a", "b", "c")
    scope = Scope(job.account_id)
    for name, at in (("a", NOW + 5), ("b", NOW + 500)):
        checkpoint_id = f"{job.job_id}-{name}"
        place.database.write_now(
            lambda connection, name=checkpoint_id, at=at: checkpoints.change(
                connection, scope, job, name, expires_at=at
            )
        )
    assert list(place.collector().expire(NOW)) == []
    assert told(list(place.collector().expire(NOW + 50))) == [("checkpoint", f"{job.job_id}-a")]
    assert place.saved(job) == ["b", "c"]
    place.collector().sweep()
    assert place.files(job) == ["b", "c"]
    pinned = f"{job.job_id}-b"
    place.database.write_now(lambda connection: checkpoints.change(connection, scope, job, pinned, pinned=True))
    assert list(place.collector().expire(NOW + 5000)) == []


def test_records_of_tinker_sessions_go_after_a_while_but_not_those_of_saved_weights(place: Place) -> None:
    job = place.end(place.start())

    def fill(connection: Connection) -> None:
        accounts.ensure(connection, EVERYTHING, "default", NOW)
        for session_id in ("saves", "saves-nothing", "lives"):
            session = TinkerSession(session_id=session_id, account_id="default", created_at=NOW, heartbeat_at=NOW)
            tinker.open_session(connection, EVERYTHING, session)
            run = TinkerRun(
                model_id=f"{session_id}:train:0",
                account_id="default",
                session_id=session_id,
                base_model="m",
                mode=ModelMode.LORA,
                request={},
                created_at=NOW,
                used_at=NOW,
                job_id=job.job_id,
            )
            tinker.open_run(connection, EVERYTHING, run)
            if session_id != "lives":
                tinker.finish_session(connection, EVERYTHING, session_id, at=NOW, finish={})
        sampler = TinkerSampler(
            sampler_id="s", account_id="default", session_id="saves-nothing", base_model="m", created_at=NOW
        )
        tinker.add_sampler(connection, EVERYTHING, sampler)
        saved = CheckpointRecord(
            checkpoint_id="c",
            job_id=job.job_id,
            attempt=1,
            step=1,
            created_at=NOW,
            root=ARTIFACTS,
            path=f"{job.job_id}/checkpoints/c",
            kind="sampler",
            name="a",
            attributes={"model_id": "saves:train:0", "door": "tinker"},
        )
        checkpoints.register(connection, EVERYTHING, job, [saved])

    def left() -> list[str]:
        with place.database.read() as connection:
            return sorted(each.session_id for each in tinker.sessions(connection, EVERYTHING, limit=9))

    place.database.write_now(fill)
    expected = [("sampler", "s"), ("training run", "saves-nothing:train:0"), ("session", "saves-nothing")]
    assert place.collect(sessions_s=0.0) == place.collect(sessions_s=2000.0) == []
    assert [(each.what, each.name) for each in place.collect(dry_run=True, sessions_s=500.0)] == expected
    assert left() == ["lives", "saves", "saves-nothing"]
    assert [(each.what, each.name) for each in place.collect(sessions_s=500.0)] == expected
    assert left() == ["lives", "saves"]
    assert place.collect(sessions_s=500.0) == []

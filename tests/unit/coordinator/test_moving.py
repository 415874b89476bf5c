"""Moving the files of ended jobs, on a real store of records and an object store in memory."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore
from sqlalchemy import Connection

from trainmaster.jobs.objects import ObjectPlace, ObjectStoreError
from trainmaster.server.archive import Archive, ObjectStoreAwayError
from trainmaster.server.coordinator.moving import AGAIN_S, Mover
from trainmaster.server.coordinator.restoring import BLOB_HERE_S, DRAFTS
from trainmaster.server.coordinator.retention import ORPHAN_AGE_S, Collector
from trainmaster.server.coordinator.tombstones import tombstones
from trainmaster.server.core import commands, observations
from trainmaster.server.core.commands import new_job_id, submit
from trainmaster.server.core.job import Change, Job
from trainmaster.server.core.retention import RetentionPolicy
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.core.spec.submit import compile_job
from trainmaster.server.storage import ARTIFACTS, BLOBS, RUNS, Location, Roots, blob_path, streams_of
from trainmaster.server.store import accounts, job_inputs, jobs
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

NOW = 2_000_000_000.0
EVERYTHING = Scope.everything()
ACCOUNT = Scope("default")
ODD = ["a\nb.bin", "bell\x07", "d/" * 300 + "deep", "100% #?+ é"]
"""Names that stores refuse, or that are often mangled on the way."""


class Place:
    def __init__(self, directory: Path) -> None:
        self.now = NOW
        self.database = Database.open(f"sqlite:///{directory / 'tm.db'}")
        self.archive = Archive(ObjectPlace(store=MemoryStore(), bucket="b", key="root"))  # type: ignore[arg-type]
        self.roots = Roots({name: directory / name for name in (RUNS, ARTIFACTS, BLOBS)}, self.archive)
        self.mover = Mover(self.database, self.roots, self.archive, clock=lambda: self.now)
        self.database.write_now(lambda connection: accounts.ensure(connection, EVERYTHING, "default", NOW))

    def ended(self, job_id: str | None = None) -> Job:
        document = {"name": "j", "workload": {"kind": "command", "argv": ["x"]}, "resource_config": {"gpu_count": 0}}
        made = submit(
            compile_job(parse_submit(document)),
            account_id="default",
            job_id=job_id or new_job_id(),
            created_by="t",
            now=NOW - 100,
            default_backend="local",
        )
        self.database.write_now(lambda connection: jobs.insert(connection, EVERYTHING, made))
        job = self.apply(commands.cancel(self.apply(observations.admit(made.job, now=NOW - 90)), now=NOW - 80))
        self.write(job, "nodes/0/logs/main.0.out", root=RUNS, below="1")
        return job

    def write(self, job: Job, *names: str, root: str = ARTIFACTS, below: str = "output") -> None:
        for name in names:
            path = self.roots.path(root, f"{job.job_id}/{below}/{name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)

    def apply(self, change: Change | None) -> Job:
        assert change is not None
        assert self.database.write_now(lambda connection: jobs.apply(connection, EVERYTHING, change))
        return change.job

    def here(self, job: Job) -> bool:
        return any(self.roots.path(root, job.job_id).exists() for root in (RUNS, ARTIFACTS))

    def keys(self) -> list[str]:
        return [each["path"] for each in self.archive.place.listing("root")]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.database.close()


def test_files_with_names_that_stores_refuse_move_and_are_read(place: Place) -> None:
    job = place.ended()
    place.write(job, *ODD)
    place.mover.move()
    assert not place.here(job)
    unit = place.archive.unit(f"{ARTIFACTS}/{job.job_id}")
    assert unit is not None
    fresh = Archive(place.archive.place).unit(f"{ARTIFACTS}/{job.job_id}")
    assert fresh == unit
    assert {name: place.archive.read(file, 0, 10_000).decode() for name, file in unit.files.items()} == {
        f"output/{name}": name for name in ODD
    }
    streams = streams_of(place.roots, job.job_id, 1, ended=True)
    assert streams.read("nodes/0/logs/main.0.out", 0) == b"nodes/0/logs/main.0.out"


@pytest.mark.parametrize("error", [OSError("no"), ValueError("a mistake")])
def test_job_that_cannot_be_moved_stops_no_other_and_is_not_sent_again_at_once(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    bad, good = place.ended("job-0"), place.ended("job-1")
    tries: list[float] = []
    send = Archive.send

    def fails(self: Archive, path: str, *arguments: Any, **options: Any) -> Any:
        if bad.job_id in path:
            tries.append(place.now)
            raise error
        return send(self, path, *arguments, **options)

    monkeypatch.setattr(Archive, "send", fails)
    for _ in range(100):
        place.mover.move()
        place.now += 2.0
    assert not place.here(good)
    assert [later - earlier for earlier, later in itertools.pairwise(tries)] == [AGAIN_S, 20.0, 40.0, 80.0]
    assert sum(bad.job_id in record.getMessage() for record in caplog.records) == 1
    monkeypatch.undo()
    place.now += 200.0
    place.mover.move()
    assert not place.here(bad)


def test_what_the_store_does_not_take_leaves_the_next_round_to_others(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = place.ended("job-0"), place.ended("job-1")
    put = ObjectPlace.put_pieces

    def refuses(self: ObjectPlace, key: str, *arguments: Any) -> None:
        if bad.job_id in key:
            raise ObjectStoreError("EntityTooLarge")
        put(self, key, *arguments)

    monkeypatch.setattr(ObjectPlace, "put_pieces", refuses)
    monkeypatch.setattr("trainmaster.server.archive.AWAY_S", 0.0)
    place.mover.move()
    assert place.here(good)
    place.mover.move()
    assert (place.here(bad), place.here(good)) == (True, False)


def test_file_that_becomes_shorter_does_not_pass_for_a_store_that_is_away(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place.ended()
    monkeypatch.setattr(os, "pread", lambda *_: b"")
    with caplog.at_level(logging.WARNING):
        place.mover.move()
    assert "became shorter" in caplog.text
    assert place.archive.unit("runs/none") is None  # and not ObjectStoreAwayError


@pytest.mark.parametrize("breaks", [False, True])
def test_nothing_stays_on_the_store_of_a_job_that_is_purged_while_it_is_sent(
    place: Place, monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    job = place.ended()
    place.write(job, "result")
    send = Archive.send

    def purged_meanwhile(self: Archive, path: str, *arguments: Any, **options: Any) -> Any:
        sent = send(self, path, *arguments, **options)
        if path.endswith("result"):
            place.apply(commands.delete(job, now=place.now, purge=True))
            if breaks:
                raise OSError("no")
        return sent

    monkeypatch.setattr(Archive, "send", purged_meanwhile)
    place.mover.move()
    assert place.keys() == []


def test_uploaded_file_that_a_launch_needs_meanwhile_stays(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    sha256 = "a" * 64
    path = place.roots.path(BLOBS, blob_path("default", sha256))
    path.parent.mkdir(parents=True)
    path.write_text("a")

    def known(connection: Connection) -> None:
        job_inputs.put_blob(connection, ACCOUNT, sha256, 1, NOW)

    place.database.write_now(known)
    os.utime(path, (NOW, NOW))
    place.now = NOW + BLOB_HERE_S + 1
    send = Archive.send

    def launched_meanwhile(self: Archive, *arguments: Any, **options: Any) -> Any:
        os.utime(path, (place.now, place.now))
        return send(self, *arguments, **options)

    monkeypatch.setattr(Archive, "send", launched_meanwhile)
    place.mover.move()
    assert path.exists()
    place.now += BLOB_HERE_S + 1
    place.mover.move()
    assert not path.exists()
    assert place.archive.size_at(f"{BLOBS}/{blob_path('default', sha256)}") == 1


def test_removed_unit_is_not_remembered_by_who_read_it_at_the_same_moment(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = place.ended()
    place.mover.move()
    path = f"{RUNS}/{job.job_id}/1"
    listing = ObjectPlace.listing

    def read_meanwhile(self: ObjectPlace, key: str) -> Any:
        found = listing(self, key)
        assert place.archive.unit(path) is not None
        return found

    monkeypatch.setattr(ObjectPlace, "listing", read_meanwhile)
    place.archive.remove(f"{RUNS}/{job.job_id}")
    assert place.archive.unit(path) is None


def test_store_is_asked_once_which_deleted_jobs_have_files_there(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    moved, *others = [place.ended() for _ in range(20)]
    place.mover.move()
    for job in (moved, *others):
        place.apply(commands.delete(job, now=place.now))
    for job in others:
        place.roots.forget(Location(root=RUNS, path=job.job_id))
    asked: list[str] = []
    for name in ("listing", "directories"):
        method = getattr(ObjectPlace, name)

        def counted(self: ObjectPlace, key: str, method: Any = method) -> Any:
            asked.append(key)
            return method(self, key)

        monkeypatch.setattr(ObjectPlace, name, counted)
    found, following = tombstones(place.database, place.roots, ACCOUNT, page_size=50)
    assert ([each.job.job_id for each in found], following) == ([moved.job_id], None)
    assert found[0].size_bytes > 0
    assert len(asked) == 3


def test_what_a_killed_server_had_begun_to_bring_back_goes_after_a_day(place: Place) -> None:
    draft = place.roots.path(ARTIFACTS, f"{DRAFTS}/abc/part")
    draft.mkdir(parents=True)
    (draft / "weights").write_text("w")
    collector = Collector(place.database, place.roots, RetentionPolicy())
    changed = draft.parent.stat().st_mtime
    assert list(collector.collect(changed + ORPHAN_AGE_S - 1)) == []
    assert [each.what for each in collector.collect(changed + ORPHAN_AGE_S + 1, dry_run=True)] == ["cache"]
    assert draft.exists()
    assert len(list(collector.collect(changed + ORPHAN_AGE_S + 1))) == 1
    assert not draft.parent.exists()


def test_store_that_is_away_ends_a_round(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs_here = [place.ended(), place.ended()]

    def away(*_: Any, **__: Any) -> Any:
        raise ObjectStoreAwayError("away")

    with monkeypatch.context() as patch:
        patch.setattr(Archive, "send", away)
        place.mover.move()
    assert all(map(place.here, jobs_here))
    place.now += AGAIN_S
    place.mover.move()
    assert not any(map(place.here, jobs_here))

"""What the leader tidies up: unused blobs and the files of purged jobs."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from obstore.store import MemoryStore
from sqlalchemy import Connection

from trainmaster.backends import capabilities_of
from trainmaster.jobs.objects import ObjectPlace, ObjectStoreError
from trainmaster.server.archive import Archive
from trainmaster.server.coordinator.admission import Admission
from trainmaster.server.coordinator.commands import Commands
from trainmaster.server.coordinator.launch import JobSecrets
from trainmaster.server.coordinator.maintenance import COLLECT_EVERY_S, Maintenance
from trainmaster.server.coordinator.retention import Collector
from trainmaster.server.core.retention import RetentionPolicy
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.settings.encryption import Sealer
from trainmaster.server.storage import ARTIFACTS, BLOBS, RUNS, Location, Roots, blob_path
from trainmaster.server.store import accounts, job_inputs
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

NOW = 1_000_000.0
KEEP_S = 3600.0
ACCOUNT = Scope(account_id="default")


class Place:
    """A database and roots, with a clock that the test sets."""

    def __init__(self, directory: Path) -> None:
        self.now = NOW
        self.database = Database.open(f"sqlite:///{directory / 'tm.db'}")
        self.roots = Roots({name: directory / name for name in (RUNS, ARTIFACTS, BLOBS)})
        collector = Collector(self.database, self.roots, RetentionPolicy(blobs_s=KEEP_S))
        self.maintenance = Maintenance(
            self.database, self.roots, leads=lambda: True, collector=collector, clock=lambda: self.now
        )
        self.commands = Commands(
            self.database,
            admission=Admission(backends={"local": capabilities_of("local")}, default_backend="local"),
            vault=JobSecrets(Sealer(bytes(32))),
            hint=lambda _: None,
            clock=lambda: self.now,
        )

    def upload_files(self, digit: str) -> Path:
        sha256 = digit * 64
        path = self.roots.path(BLOBS, blob_path("default", sha256))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(digit)

        def work(connection: Connection) -> None:
            accounts.ensure(connection, Scope.everything(), "default", self.now)
            job_inputs.put_blob(connection, ACCOUNT, sha256, 1, self.now)

        self.database.write_now(work)
        return path

    def submit(self, *digits: str) -> str:
        files = [{"path": digit, "sha256": digit * 64} for digit in digits]
        request = parse_submit(
            {"name": "j", "workload": {"kind": "command", "argv": ["x"], "files": files}, "resource_config": {}}
        )
        return self.commands.submit(ACCOUNT, request, created_by="t").result().job.job_id


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.database.close()


def test_blob_that_no_job_uses_is_removed_after_a_while(place: Place) -> None:
    used, unused = place.upload_files("a"), place.upload_files("b")
    job_id = place.submit("a")
    place.maintenance.do()
    assert unused.exists()
    place.now += KEEP_S + 1
    place.maintenance.do()
    assert used.exists()
    assert not unused.exists()
    place.commands.delete(ACCOUNT, job_id).result()
    place.now += KEEP_S + 1
    place.maintenance.do()
    assert not used.exists()


def test_files_of_a_purged_job_are_removed_and_those_of_a_deleted_one_stay(place: Place) -> None:
    purged, deleted = place.submit(), place.submit()
    for job_id in (purged, deleted):
        place.roots.path(ARTIFACTS, f"{job_id}/checkpoints/c").mkdir(parents=True)
    place.commands.delete(ACCOUNT, purged, purge=True).result()
    place.commands.delete(ACCOUNT, deleted).result()
    place.maintenance.do()
    assert not place.roots.path(ARTIFACTS, purged).exists()
    assert place.roots.path(ARTIFACTS, deleted).exists()
    place.commands.delete(ACCOUNT, deleted, purge=True).result()
    place.maintenance.do()
    assert not place.roots.path(ARTIFACTS, deleted).exists()


def test_files_that_cannot_be_removed_do_not_keep_those_of_others(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, other = place.submit(), place.submit()
    for job_id in (stuck, other):
        place.roots.path(RUNS, job_id).mkdir()
        place.commands.delete(ACCOUNT, job_id, purge=True).result()

    def remove(self: Roots, location: Location, remove: Callable[[Roots, Location], None] = Roots.remove) -> None:
        if location.path == stuck:
            raise OSError(errno.EBUSY, "busy")
        remove(self, location)

    monkeypatch.setattr(Roots, "remove", remove)
    place.maintenance.do()
    assert place.roots.path(RUNS, stuck).exists()
    assert not place.roots.path(RUNS, other).exists()
    monkeypatch.undo()
    place.maintenance.do()
    assert not place.roots.path(RUNS, stuck).exists()


def test_server_that_starts_collects_nothing_before_its_settings_can_be_looked_at(place: Place) -> None:
    unused = place.upload_files("a")
    place.now += KEEP_S + 1
    place.maintenance.stop()
    place.maintenance.start()
    place.now += COLLECT_EVERY_S - 1
    place.maintenance.do()
    assert unused.exists()
    place.now += 1
    place.maintenance.do()
    assert not unused.exists()


def test_store_that_is_away_delays_the_collection_alone(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.roots.archive = Archive(ObjectPlace(store=MemoryStore(), bucket="b", key="root"))  # type: ignore[arg-type]
    maintenance = place.maintenance
    maintenance.collector = Collector(place.database, place.roots, RetentionPolicy(runs_s=1.0, blobs_s=KEEP_S))
    swept: list[float] = []
    monkeypatch.setattr(maintenance.collector, "sweep", lambda: swept.append(place.now))
    unused = place.upload_files("a")
    place.now += KEEP_S + 1

    def away(*_: object) -> list[str]:
        raise ObjectStoreError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(ObjectPlace, "directories", away)
        maintenance.do()
    assert (unused.exists(), len(swept)) == (True, 1)
    monkeypatch.setattr("trainmaster.server.archive.AWAY_S", 0.0)
    maintenance.do()  # in the next round already
    assert (unused.exists(), len(swept)) == (False, 2)


def test_memory_that_was_freed_between_blocks_in_use_is_given_back() -> None:
    """In a process of its own: what else this one holds would lie in between."""
    code = """
import re
from trainmaster.server.coordinator.maintenance import give_back_memory

def held_mb():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

blocks = [bytes(2000) + b"x" for _ in range(50_000)]
last = bytes(2000) + b"x"
del blocks
before = held_mb()
give_back_memory()
print(before - held_mb())
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert float(said) > 50

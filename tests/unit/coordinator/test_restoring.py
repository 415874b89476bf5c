"""Bringing files back for a launch, from an object store in memory."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from obstore.store import MemoryStore

from patience import PATIENCE_S
from trainmaster.backends.base import LaunchError, NotYetError
from trainmaster.jobs.objects import ObjectPlace, ObjectStoreError
from trainmaster.protocol.reasons import Reason
from trainmaster.server.archive import Archive
from trainmaster.server.coordinator.restoring import BLOB_HERE_S, KEPT, Restores, bring_blob, is_kept_here
from trainmaster.server.core.training.sources import LeftByJob
from trainmaster.server.storage import ARTIFACTS, BLOBS, RUNS, Roots, blob_path
from trainmaster.server.store import accounts
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

CONTENT = b"content" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Place:
    def __init__(self, directory: Path) -> None:
        self.database = Database.open(f"sqlite:///{directory / 'tm.db'}")
        self.archive = Archive(ObjectPlace(store=MemoryStore(), bucket="b", key="root"))  # type: ignore[arg-type]
        self.roots = Roots({name: directory / name for name in (RUNS, ARTIFACTS, BLOBS)}, self.archive)
        self.restores = Restores(self.database, self.roots)
        self.database.write_now(lambda connection: accounts.ensure(connection, Scope.everything(), "default", 0.0))
        self.job: Any = SimpleNamespace(
            job_id="job-1",
            account_id="default",
            live=SimpleNamespace(number=1, resume_checkpoint_id=None),
            spec={"workload": {"kind": "command", "argv": ["x"], "files": [{"path": "f", "sha256": SHA256}]}},
            spec_version=1,
        )
        self.request: Any = SimpleNamespace(resume_from=None)

    @property
    def here(self) -> Path:
        return self.roots.path(BLOBS, blob_path("default", SHA256))

    def store(self, content: bytes) -> None:
        self.archive.place.put(f"root/{BLOBS}/{blob_path('default', SHA256)}", content)

    def require(self) -> None:
        """As a launch does that waits for what is on its way."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < deadline
            try:
                self.restores.require(self.job, self.request)
            except NotYetError as error:
                if "cannot" in str(error):
                    raise
                wait([error.until], PATIENCE_S)
            else:
                return


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr("trainmaster.server.coordinator.restoring._named_results", lambda _: iter(()))
    made = Place(tmp_path)
    yield made
    made.restores.close()
    made.database.close()


def test_file_comes_back_once(place: Place) -> None:
    place.store(CONTENT)
    place.require()
    assert place.here.read_bytes() == CONTENT
    assert os.listdir(place.here.parent) == [SHA256]


@pytest.mark.parametrize("content", [b"other" * 1400, CONTENT[:-1], CONTENT + b"x"])
def test_damaged_file_refuses_the_launch(place: Place, content: bytes) -> None:
    place.store(content)
    with pytest.raises(LaunchError, match=f"{SHA256}.*not what was stored") as refused:
        place.require()
    assert refused.value.reason is Reason.LAUNCH_REFUSED
    assert not place.here.exists()


def test_file_that_goes_while_it_is_read_refuses_the_launch(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.store(CONTENT)

    def gone(*_: Any) -> bytes:
        raise FileNotFoundError("there is no such object")

    monkeypatch.setattr(ObjectPlace, "read", gone)
    with pytest.raises(LaunchError, match="no such object"):
        place.require()


def test_store_that_is_away_is_waited_for(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.store(CONTENT)

    def away(*_: Any) -> bytes:
        raise ObjectStoreError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(ObjectPlace, "read", away)
        with pytest.raises(NotYetError, match="no answer"):
            place.require()
    monkeypatch.setattr("trainmaster.server.archive.AWAY_S", 0.0)
    place.require()
    assert place.here.exists()


def test_results_that_a_launch_names_are_not_moved_before_it_reads_them(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a job that has just ended, and for as long as the launch waits in the queue of a cluster."""
    named = LeftByJob(job_id="job-2", path="output/model")
    monkeypatch.setattr("trainmaster.server.coordinator.restoring._named_results", lambda _: iter((named,)))
    place.store(CONTENT)
    place.roots.path(ARTIFACTS, "job-2/output/model").mkdir(parents=True)
    place.require()
    mark = place.roots.path(ARTIFACTS, f"job-2/{KEPT}")
    assert is_kept_here(place.roots, "job-2", time.time())
    os.utime(mark, (0.0, 0.0))
    place.require()
    assert is_kept_here(place.roots, "job-2", time.time())


def test_file_that_is_asked_for_stays_for_a_while(place: Place) -> None:
    place.store(CONTENT)
    assert bring_blob(place.roots, "default", SHA256)
    os.utime(place.here, (0.0, 0.0))
    assert bring_blob(place.roots, "default", SHA256)
    assert place.here.stat().st_mtime > time.time() - BLOB_HERE_S

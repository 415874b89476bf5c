"""What only object stores have: files of saves that never were, answers that get lost, locks that expire."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from root_saves import FILES, everything, overwrite, save

from patience import PATIENCE_S
from seaweed_server import SeaweedServer
from trainmaster.jobs import lock as locking
from trainmaster.jobs import object_root, objects
from trainmaster.jobs.lock import LockedError, LockLostError
from trainmaster.jobs.object_root import ObjectRoot
from trainmaster.jobs.objects import AccessRefusedError, ObjectStoreError
from trainmaster.jobs.staging import local_copy


@pytest.fixture
def root(s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectRoot:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return ObjectRoot(s3_root)


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_files_of_saves_that_cannot_be_committed_any_more_go(root: ObjectRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    save(root, "a/1", {"weights": b"1"})
    dead = ["a/1/.data-job-1.1-00000000/f", "a/2/.data-job-1.2-00000000/dir/f", "a/3/.data-job-1.1-00000000/f"]
    others = ["a/2/.data-job-2.1-00000000/f", "a/4/.data-job-1.3-00000000/f", "a/4/unknown", "b/1/.data-job-1.1-00/f"]
    for path in (*dead, *others):
        overwrite(root, path, b"half")
    assert root.committed() == ["a/1"]

    save(root, "a/5", {"weights": b"5"}, attempt=3)
    left = everything(root)
    assert set(left).isdisjoint(dead)
    assert set(others) < set(left)
    root.verify("a/1")

    monkeypatch.setattr(object_root, "ABANDONED_S", -3600.0)
    save(root, "a/6", {"weights": b"6"}, attempt=3)
    assert [path for path in everything(root) if path.startswith(("a/2", "a/4"))] == ["a/4/unknown"]
    assert root.committed() == ["a/1", "a/5", "a/6"]
    for path in root.committed():
        root.verify(path)


def test_commit_whose_answer_got_lost_is_a_commit(root: ObjectRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    put_if = objects.put_if
    monkeypatch.setattr(objects, "put_if", lambda *args, **options: put_if(*args, **options) and None)
    made = save(root, "a/1")
    assert root.verify("a/1") == made


def test_upload_that_fails_leaves_nothing(root: ObjectRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    send = objects._send

    def fail_in_the_end(place: Any, path: Path, *rest: Any) -> None:
        send(place, path, *rest)
        if path.name == "state.json":
            raise ObjectStoreError("out of order")

    monkeypatch.setattr(objects, "_send", fail_in_the_end)
    with pytest.raises(ObjectStoreError, match="out of order"):
        save(root, "a/1")
    assert everything(root) == []
    monkeypatch.setattr(objects, "_send", send)
    save(root, "a/1")


@pytest.mark.parametrize("arrives", [True, False])
def test_commit_of_which_nobody_knows_whether_it_arrived_is_whole_or_not_there(
    root: ObjectRoot, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    put_if = objects.put_if

    def fail(*args: Any, **options: Any) -> str | None:
        if arrives:
            put_if(*args, **options)
        raise ObjectStoreError("timed out")

    monkeypatch.setattr(objects, "put_if", fail)
    with pytest.raises(ObjectStoreError, match="timed out"):
        save(root, "a/1")
    assert root.committed() == (["a/1"] if arrives else [])
    for rel_path in root.committed():
        root.verify(rel_path)


def test_bucket_may_be_a_root(seaweed: SeaweedServer, s3_root: str) -> None:
    root = ObjectRoot(f"s3://{uuid.uuid4().hex}")
    overwrite(root, "notes", b"this server makes a bucket with its first object")
    made = save(root, "checkpoint-1")
    save(root, "checkpoint-2", attempt=2)
    root.point("", "latest", "checkpoint-2")
    assert root.committed() == ["checkpoint-1", "checkpoint-2"]
    assert root.verify("checkpoint-1") == made
    assert root.locate("checkpoint-1") == f"{root.uri}/checkpoint-1"
    root.remove("checkpoint-1")
    assert root.committed() == ["checkpoint-2"]


def test_nothing_stays_on_this_machine(root: ObjectRoot, tmp_path: Path) -> None:
    save(root, "a/1")
    with root.fetch("a/1") as directory:
        assert directory.is_relative_to(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_copy_is_brought_once_for_all_who_want_it(root: ObjectRoot) -> None:
    made = save(root, "a/1")
    came: list[int] = []
    everybody = threading.Barrier(3, timeout=PATIENCE_S)

    def read() -> bytes:
        with root.fetch("a/1", on_bytes=came.append) as directory:
            everybody.wait()
            return (directory / "state.json").read_bytes()

    with ThreadPoolExecutor(max_workers=3) as pool:
        assert list(pool.map(lambda _: read(), range(3))) == [FILES["state.json"]] * 3
    assert sum(came) == made.size_bytes
    with root.fetch("a/1", on_bytes=came.append), root.fetch("a/1", on_bytes=came.append):
        assert sum(came) == 2 * made.size_bytes


def test_nobody_waits_for_a_reader_of_a_copy(tmp_path: Path) -> None:
    """However the locks of those who found it empty at the same time follow each other."""

    def read(everybody: threading.Barrier) -> None:
        with local_copy(tmp_path, "name", lambda directory: (directory / "file").touch()) as directory:
            everybody.wait()
            assert (directory / "file").exists()

    with ThreadPoolExecutor(max_workers=3) as pool:
        for _ in range(300):
            everybody = threading.Barrier(3, timeout=PATIENCE_S)
            list(pool.map(read, [everybody] * 3))


def test_lock_that_expired_is_taken_and_its_holder_learns_it(root: ObjectRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "RENEWED_EVERY_S", 0.05)
    with root.lock("a", "slow") as held:
        held.require()
        gone = {"owner": "dead", "nonce": "", "renewals": 1, "expires_at": time.time() - 60}
        overwrite(root, "a/.lock", json.dumps(gone).encode())
        with root.lock("a", "other") as taken:
            taken.require()
            wait_for(lambda: lost(held))
            with pytest.raises(LockedError, match="other"), root.lock("a", "third"):
                pass
    with root.lock("a", "third"):
        pass


def test_lock_that_may_just_be_another_clock_is_not_taken(root: ObjectRoot) -> None:
    late = {"owner": "elsewhere", "nonce": "", "renewals": 1, "expires_at": time.time() - 5}
    overwrite(root, "a/.lock", json.dumps(late).encode())
    with pytest.raises(LockedError, match="elsewhere"), root.lock("a", "me"):
        pass


def test_lock_is_renewed_while_it_is_held(root: ObjectRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "RENEWED_EVERY_S", 0.02)
    place = objects.open_place(root.uri)
    with root.lock("a", "me") as held:
        wait_for(lambda: json.loads(objects.get(place, place.below("a/.lock"))[0])["renewals"] >= 3)
        held.require()


def lost(lock: locking.Lock) -> bool:
    try:
        lock.require()
    except LockLostError:
        return True
    return False


def test_store_that_refuses_says_so_in_a_line(root: ObjectRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    refused = ObjectRoot(root.uri)
    for ask in (refused.committed, lambda: refused.manifest("a"), lambda: refused.point("a", "latest", "b")):
        with pytest.raises(AccessRefusedError, match="SignatureDoesNotMatch") as caught:
            ask()
        assert "\n" not in str(caught.value)
        assert root.uri in str(caught.value)


def test_store_without_its_package_says_what_to_install(root: ObjectRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ImportError, match=r"pip install 'trainmaster\[s3\]'"):
        ObjectRoot(root.uri)


@pytest.mark.parametrize("uri", ["s3://", "s3:///key", "gs://bucket/key", "/path"])
def test_uri_of_nothing_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="s3://bucket/key"):
        objects.open_place(uri)


def brought(uri: str, target: Path, on_bytes: Callable[[int], None] | None = None) -> dict[str, bytes]:
    """All objects below a URI, by their names below it."""
    place = objects.open_place(uri)
    for meta in objects.listing(place, place.key):
        name = meta["path"].removeprefix(f"{place.key}/")
        objects.receive(place, meta["path"], target / name, on_bytes=on_bytes)
    return {
        path.relative_to(target).as_posix(): path.read_bytes() for path in sorted(target.rglob("*")) if path.is_file()
    }


def test_files_go_there_and_come_back(s3_root: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    files = {"a b/ü+%20#.bin": os.urandom(20 << 20), "empty": b"", "deep/er/x.txt": b"x"}
    for name, data in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    place = objects.open_place(f"{s3_root}/tree/")
    objects.send_all(place, {source / name: place.below(name) for name in files})
    objects.put(place, f"{place.key}-other", b"beside it")
    came: list[int] = []
    assert brought(f"{s3_root}/tree", tmp_path / "target", came.append) == files
    assert sum(came) == sum(map(len, files.values()))
    assert len(came) > 2, "a large file is told of in pieces"


def test_what_is_not_there_can_be_neither_brought_nor_taken(s3_root: str, tmp_path: Path) -> None:
    place = objects.open_place(s3_root)
    with pytest.raises(FileNotFoundError, match="nothing-here"):
        objects.receive(place, place.below("nothing-here"), tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        objects.send_all(place, {tmp_path / "missing": place.below("x")})
    assert not (tmp_path / "x").exists()
    assert objects.head(place, place.below("x")) is None

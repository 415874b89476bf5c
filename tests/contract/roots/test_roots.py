"""What every root promises, over a directory and over a real S3 server."""

from __future__ import annotations

import errno
import hashlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from root_saves import FILES, everything, fill, manifest, overwrite, save

from patience import PATIENCE_S
from trainmaster.jobs import CorruptCheckpointError, NotOwnerError, verify
from trainmaster.jobs.checkpoint import DRAFT_PREFIX, ManifestFile
from trainmaster.jobs.lock import LockedError
from trainmaster.jobs.parts import DeliveredParts
from trainmaster.jobs.roots import Root, commit_beside, open_checkpoint, open_root


def contents(directory: Path) -> dict[str, bytes]:
    paths = [path for path in directory.rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def test_committed_checkpoint_is_listed_described_and_read(root: Root) -> None:
    made = save(root, "project/group/name/10", step=10)
    assert root.committed() == ["project/group/name/10"]
    found = root.manifest("project/group/name/10")
    assert found == made
    assert (found.step, found.kind, found.framework) == (10, "test", "numpy")
    digests = {file.path: (file.size, file.sha256) for file in found.files}
    assert digests == {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in FILES.items()}
    assert found.size_bytes == sum(map(len, FILES.values()))
    with root.fetch("project/group/name/10") as directory:
        assert contents(directory) == FILES
    assert root.read("project/group/name/10", "state.json") == FILES["state.json"]
    assert root.verify("project/group/name/10") == made


def test_fetched_checkpoint_verifies_by_itself(root: Root) -> None:
    save(root, "a", step=3)
    with root.fetch("a") as directory:
        assert verify(directory).step == 3


def test_root_of_nothing_is_empty(root: Root) -> None:
    assert root.committed() == []
    assert root.committed("a/b") == []
    assert root.manifest("a") is None
    assert root.pointer("a", "latest") is None
    root.remove("a")
    for ask in (root.verify, lambda path: root.read(path, "x")):
        with pytest.raises(FileNotFoundError):
            ask("a")
    with pytest.raises(FileNotFoundError), root.fetch("a"):
        pass


def test_listing_is_oldest_first_and_only_below(root: Root) -> None:
    for step, place in enumerate(("a/x/9", "a/x/10", "b/1", "a/y/8")):
        save(root, place, step=step)
    assert root.committed() == ["a/x/9", "a/x/10", "b/1", "a/y/8"]
    assert root.committed("a") == ["a/x/9", "a/x/10", "a/y/8"]
    assert root.committed("a/x") == ["a/x/9", "a/x/10"]
    assert root.committed("a/") == root.committed("a")


def test_root_opened_at_a_deeper_place_shows_the_same(root: Root, root_uri: str) -> None:
    made = save(root, "a/x/9")
    below = open_root(f"{root_uri}/a")
    assert below.committed() == ["x/9"]
    again, rel_path = open_checkpoint(root.locate("a/x/9"))
    assert (again.manifest(rel_path), rel_path) == (made, "9")
    assert again.uri == f"{root_uri}/a/x"


def test_draft_that_is_not_committed_leaves_nothing(root: Root) -> None:
    with root.draft("a/1", job_id="j", attempt=1) as draft:
        fill(draft)
        assert root.committed() == []

    def fail() -> None:
        with root.draft("a/1", job_id="j", attempt=1) as draft:
            fill(draft)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (root.committed(), everything(root), draft.exists()) == ([], [], False)


def test_commit_where_something_is_committed_is_refused_and_may_go_elsewhere(root: Root) -> None:
    first = save(root, "a/1", {"f": b"first"})
    with root.draft("a/1", job_id="job-1", attempt=1) as draft:
        fill(draft, {"f": b"second"})
        with pytest.raises(FileExistsError):
            root.commit(draft, "a/1", manifest(2), check_owner=lambda: None)
        root.commit(draft, "a/2", manifest(2), check_owner=lambda: None)
    assert root.manifest("a/1") == first
    assert (root.read("a/1", "f"), root.read("a/2", "f")) == (b"first", b"second")


def test_checkpoint_below_a_checkpoint_is_refused(root: Root) -> None:
    save(root, "a/1")
    with pytest.raises(FileExistsError), root.draft("a/1/deeper/2", job_id="j", attempt=1):
        pass


def test_stale_attempt_cannot_commit(root: Root) -> None:
    save(root, "a/1")
    before = everything(root)
    owner = "this attempt"

    def check_owner() -> None:
        if owner != "this attempt":
            raise NotOwnerError("no longer")

    with root.draft("a/2", job_id="job-1", attempt=1) as draft:
        fill(draft)
        owner = "another"
        with pytest.raises(NotOwnerError):
            root.commit(draft, "a/2", manifest(2), check_owner=check_owner)
    assert root.committed() == ["a/1"]
    assert everything(root) == before


def test_owner_is_asked_when_all_but_the_commit_is_done(root: Root) -> None:
    seen: list[list[str]] = []
    save(root, "a/1", check_owner=lambda: seen.append(root.committed()))
    assert seen == [[]]


def test_of_two_concurrent_commits_exactly_one_wins_whole(root: Root) -> None:
    both_ready = threading.Barrier(2, timeout=PATIENCE_S)

    def attempt(number: int) -> str:
        content = {name: str(number).encode() * 1000 for name in ("a", "b", "c", "d")}
        try:
            save(root, "x/1", content, step=number, attempt=1, check_owner=lambda: both_ready.wait() and None)
        except FileExistsError:
            return "lost"
        return "won"

    with ThreadPoolExecutor(max_workers=2) as pool:
        outcomes = list(pool.map(attempt, (1, 2)))
    assert sorted(outcomes) == ["lost", "won"]
    winner = root.verify("x/1")
    with root.fetch("x/1") as directory:
        assert set(contents(directory).values()) == {str(winner.step).encode() * 1000}
    assert winner.step == outcomes.index("won") + 1
    assert len(everything(root)) == 5


@pytest.mark.parametrize("name", [*(name for name, data in FILES.items() if data), "manifest.json"])
def test_flipped_bit_in_any_file_is_caught(root: Root, name: str) -> None:
    save(root, "a/1")
    (place,) = [path for path in everything(root) if path.endswith(name)]
    data = bytearray(FILES[name] if name in FILES else json.dumps({"files": 1}).encode())
    data[len(data) // 2] ^= 1
    overwrite(root, place, bytes(data))
    with pytest.raises(CorruptCheckpointError) as verified:
        root.verify("a/1")
    with pytest.raises(CorruptCheckpointError) as fetched, root.fetch("a/1"):
        pass
    assert name in str(verified.value)
    assert name in str(fetched.value)
    assert root.committed() == ["a/1"], "it is listed, so that it can be found to be corrupt"
    if name == "state.json":
        with pytest.raises(CorruptCheckpointError):
            root.read("a/1", name)


@pytest.mark.parametrize("change", ["shorter", "longer", "missing"])
def test_file_of_another_length_is_caught(root: Root, change: str) -> None:
    save(root, "a/1")
    (place,) = [path for path in everything(root) if path.endswith("weights/1.bin")]
    overwrite(root, place, {"shorter": b"v" * 9, "longer": b"v" * 11, "missing": None}[change])
    with pytest.raises(CorruptCheckpointError, match=r"weights/1\.bin"):
        root.verify("a/1")
    with pytest.raises(CorruptCheckpointError, match=r"weights/1\.bin"), root.fetch("a/1"):
        pass


def test_manifest_that_leads_out_of_the_checkpoint_is_corrupt(root: Root) -> None:
    made = save(root, "a/1")
    (place,) = [path for path in everything(root) if path.endswith("manifest.json")]
    files = (replace(made.files[0], path="../../outside"),)
    overwrite(root, place, replace(made, files=files).to_bytes())
    with pytest.raises(CorruptCheckpointError, match="outside"), root.fetch("a/1"):
        pass


def test_manifest_of_another_version_is_read_tolerantly(root: Root) -> None:
    made = save(root, "a/1")
    (place,) = [path for path in everything(root) if path.endswith("manifest.json")]
    document = json.loads(made.to_bytes())
    for name in ("kind", "framework"):
        del document[name]
    overwrite(root, place, json.dumps({**document, "from_the_future": 1}).encode())
    assert root.verify("a/1") == replace(made, kind="", framework="")


def test_known_digests_are_believed_and_only_them(root: Root) -> None:
    made = save(root, "a/1", {"a": b"1", "b": b"2"}, known_digests={"a": "f" * 64})
    assert {file.path: file.sha256 for file in made.files} == {"a": "f" * 64, "b": hashlib.sha256(b"2").hexdigest()}
    with pytest.raises(CorruptCheckpointError):
        root.verify("a/1")


def test_draft_of_what_is_no_plain_file_is_refused(root: Root) -> None:
    with root.draft("a/1", job_id="j", attempt=1) as draft:
        (draft / "link").symlink_to("/etc/hostname")
        with pytest.raises(ValueError, match="link"):
            root.commit(draft, "a/1", manifest(), check_owner=lambda: None)
    assert everything(root) == []


def test_draft_without_room_is_refused_before_anything_is_written(root: Root) -> None:
    with (
        pytest.raises(OSError, match=r"No space left .* are missing") as caught,
        root.draft("a/1", job_id="j", attempt=1, expected_bytes=1 << 60),
    ):
        pass
    assert caught.value.errno == errno.ENOSPC
    assert everything(root) == []


def test_removed_checkpoint_is_gone_with_all_its_files(root: Root) -> None:
    save(root, "a/1")
    kept = save(root, "a/10", step=10)
    root.remove("a/1")
    assert root.committed() == ["a/10"]
    assert not [path for path in everything(root) if path.startswith("a/1/")]
    assert root.verify("a/10") == kept
    again = save(root, "a/1", {"f": b"again"})
    assert root.verify("a/1") == again


def test_pointer_is_what_was_said_last_and_no_checkpoint(root: Root) -> None:
    save(root, "a/latest")
    root.point("a", "latest", "1")
    root.point("a", "latest", "latest")
    root.point("", "best", "a/1")
    assert (root.pointer("a", "latest"), root.pointer("", "best"), root.pointer("a", "best")) == ("latest", "a/1", None)
    assert root.committed() == ["a/latest"]


@pytest.mark.parametrize("path", ["", "/a", "../a", "a/../b", "./.hidden", "a/.draft-1", "a\\b", "a/\n", "."])
def test_path_that_is_none_is_refused(root: Root, path: str) -> None:
    with pytest.raises(ValueError, match="path below a root"):
        root.manifest(path)
    with pytest.raises(ValueError, match="path below a root"), root.draft(path, job_id="j", attempt=1):
        pass


def test_names_of_many_kinds_come_back(root: Root) -> None:
    files = {"a b/ü+%20#?.bin": b"1", "-x": b"2", "dir/manifest.json": b"3", ".hidden/file": b"4"}
    save(root, "täst/a b+c", files)
    assert root.committed() == ["täst/a b+c"]
    with root.fetch("täst/a b+c") as directory:
        assert (directory / "a b" / "ü+%20#?.bin").read_bytes() == b"1"
        assert (directory / "dir" / "manifest.json").read_bytes() == b"3"
        assert (directory / ".hidden" / "file").read_bytes() == b"4"


def test_lock_is_one_holders_until_it_lets_go(root: Root) -> None:
    with root.lock("a/b", "job-1") as held:
        held.require()
        with pytest.raises(LockedError, match="job-1"), root.lock("a/b", "job-2"):
            pass
        with root.lock("a/c", "job-2"), root.lock("a", "job-3"):
            pass
    with root.lock("a/b", "job-2") as held:
        held.require()
    assert root.committed() == []


def test_lock_is_waited_for(root: Root) -> None:
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with root.lock("a", "first"):
            taken.set()
            done.wait(PATIENCE_S)

    with ThreadPoolExecutor(max_workers=2) as pool:
        holder = pool.submit(hold)
        assert taken.wait(PATIENCE_S)

        def wait() -> str:
            with root.lock("a", "second", wait_s=60):
                return "got it"

        waiter = pool.submit(wait)
        done.set()
        assert waiter.result(PATIENCE_S) == "got it"
        holder.result(PATIENCE_S)


def test_progress_counts_every_byte(root: Root) -> None:
    made = save(root, "a/1")
    for read in ("verify", "fetch"):
        came: list[int] = []
        if read == "verify":
            root.verify("a/1", on_bytes=came.append)
        else:
            with root.fetch("a/1", on_bytes=came.append):
                pass
        assert sum(came) == made.size_bytes


@pytest.mark.parametrize("taken", [False, True])
def test_parts_of_other_machines_are_committed_with_the_save_wherever_that_goes(root: Root, taken: bool) -> None:
    if root.is_directory:
        pytest.skip("all ranks write into the draft")
    if taken:
        save(root, "a/1", {"f": b"first"})
    with root.draft("a/1", job_id="job-1", attempt=1) as draft:
        fill(draft, {"of-rank-0": b"0"})
        delivery = root.delivery("a/1", draft.name.removeprefix(DRAFT_PREFIX))
        assert delivery is not None
        assert delivery.take(1) is None
        with delivery.draft(job_id="job-1", attempt=1) as part:
            fill(part, {"deep/of-rank-1": b"1" * 1000})
            delivery.send(1, part, {})
        told = delivery.take(1)
        assert told is not None
        assert delivery.take(1) is None
        parts = DeliveredParts(rel_path="a/1", files=tuple(ManifestFile(**file) for file in told["files"]))
        place, made = commit_beside(root, draft, "a/1", manifest(2), check_owner=lambda: None, parts=parts)
    assert place == ("a/1-attempt-1" if taken else "a/1")
    assert [file.path for file in made.files] == ["deep/of-rank-1", "of-rank-0"]
    assert root.verify(place) == made
    assert root.read(place, "deep/of-rank-1") == b"1" * 1000
    assert len(everything(root)) == (5 if taken else 3)

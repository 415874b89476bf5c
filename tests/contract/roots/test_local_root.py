"""What only directories have: drafts beside the checkpoints, the kernel's locks, a disk that fills up."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from root_saves import everything, fill, manifest, save

from trainmaster.jobs.lock import LockedError
from trainmaster.jobs.roots import LocalRoot

DRAFTING = """
import sys
from pathlib import Path
from trainmaster.jobs.roots import LocalRoot
root = LocalRoot(Path(sys.argv[1]))
with root.draft("a/1", job_id="job-1", attempt=1) as draft, root.lock("a", "the child"):
    (draft / "weights").write_bytes(b"half")
    print("ready", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def drafting(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is in the middle of a save, and holds a lock."""
    command = [sys.executable, "-c", DRAFTING, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def test_draft_that_somebody_writes_stays_and_that_of_the_dead_goes(tmp_path: Path) -> None:
    root = LocalRoot(tmp_path)
    with drafting(tmp_path) as process:
        save(root, "a/2", job_id="job-2", attempt=5)
        (draft,) = [path for path in everything(root) if ".draft-" in path]
        process.kill()
        process.wait()
        save(root, "a/3", job_id="job-2", attempt=5)
        assert draft not in everything(root)
    assert root.committed() == ["a/2", "a/3"]


def test_draft_of_an_older_attempt_goes_even_while_it_is_written(tmp_path: Path) -> None:
    root = LocalRoot(tmp_path)
    with drafting(tmp_path):
        save(root, "a/2", job_id="job-1", attempt=2)
        assert not [path for path in everything(root) if ".draft-" in path]


def test_two_drafts_of_one_process_leave_each_other_alone(tmp_path: Path) -> None:
    root = LocalRoot(tmp_path)
    with root.draft("a/1", job_id="j", attempt=1) as first, root.draft("a/2", job_id="j", attempt=1) as second:
        for step, draft in enumerate((first, second), 1):
            fill(draft)
            root.commit(draft, f"a/{step}", manifest(step), check_owner=lambda: None)
    assert root.committed() == ["a/1", "a/2"]


def test_half_removed_checkpoint_is_not_listed_and_goes_with_the_next_save(tmp_path: Path) -> None:
    root = LocalRoot(tmp_path)
    save(root, "a/1")
    os.rename(tmp_path / "a" / "1", tmp_path / "a" / ".removed-0123")
    assert root.committed() == []
    save(root, "a/2")
    assert os.listdir(tmp_path / "a") == ["2"]


def test_lock_of_the_dead_is_free(tmp_path: Path) -> None:
    root = LocalRoot(tmp_path)
    with drafting(tmp_path) as process:
        with pytest.raises(LockedError, match="the child"), root.lock("a", "me"):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        with root.lock("a", "me") as held:
            held.require()


def test_directory_that_is_no_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    root = LocalRoot(tmp_path)
    (tmp_path / "a" / "1").mkdir(parents=True)
    (tmp_path / "a" / "1" / "notes").write_text("mine")
    with pytest.raises(FileExistsError):
        save(root, "a/1")
    assert everything(root) == ["a/1/notes"]
    root.remove("a/1")
    assert everything(root) == ["a/1/notes"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("only root can mount a small disk")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_full_disk_leaves_nothing_listed_and_room_for_the_next(small_disk: Path) -> None:
    root = LocalRoot(small_disk)
    made = save(root, "a/1", {"weights": os.urandom(1 << 20)})
    with pytest.raises(OSError, match="No space left"):
        save(root, "a/2", {"weights": os.urandom(2 << 20), "more": os.urandom(2 << 20)})
    assert root.committed() == ["a/1"]
    assert root.verify("a/1") == made
    free = shutil.disk_usage(small_disk).free
    with (
        pytest.raises(OSError, match="nothing was written"),
        root.draft("a/2", job_id="j", attempt=1, expected_bytes=free + 1),
    ):
        pass
    save(root, "a/3", {"weights": os.urandom(2 << 20)})
    assert shutil.disk_usage(small_disk).free < 2 << 20
    assert root.committed() == ["a/1", "a/3"]

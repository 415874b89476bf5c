"""What is flushed, before it gets its name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainmaster.jobs.checkpoint import flush_path, flush_tree


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were flushed, each really."""
    paths: list[str] = []
    really = os.fsync

    def fsync(descriptor: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        really(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def test_file_or_directory_is_flushed_and_let_go(flushed: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    before = len(os.listdir("/proc/self/fd"))
    flush_path(tmp_path / "file")
    flush_path(tmp_path)
    assert flushed == [str(tmp_path / "file"), str(tmp_path)]
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(FileNotFoundError):
        flush_path(tmp_path / "absent")


@pytest.mark.timeout(10)
def test_tree_is_flushed_with_its_directories_and_without_what_links_lead_to(
    flushed: list[str], tmp_path: Path
) -> None:
    (tmp_path / "outside").write_bytes(b"x")
    tree = tmp_path / "tree"
    (tree / "deep" / "empty").mkdir(parents=True)
    (tree / "deep" / "file").write_bytes(b"x")
    (tree / "link").symlink_to(tmp_path / "outside")
    (tree / "nowhere").symlink_to("absent")
    os.mkfifo(tree / "pipe")  # nobody writes to it: to open it would wait for ever
    flush_tree(tree)
    assert sorted(flushed) == sorted(map(str, [tree, tree / "deep", tree / "deep" / "empty", tree / "deep" / "file"]))

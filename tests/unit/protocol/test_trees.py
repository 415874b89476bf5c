from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainmaster.protocol.account_files import directory_below, files_in_order, open_inside, remove_tree


def dig(directory: Path, depth: int) -> None:
    """Make directories in one another, each with a file, deeper than any path could say."""
    here = os.open(directory, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("deeper", dir_fd=here)
        inner = os.open("deeper", os.O_RDONLY, dir_fd=here)
        os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=inner))
        os.close(here)
        here = inner
    os.close(here)


@pytest.mark.parametrize("depth", [3, 1200])
def test_links_are_removed_and_not_followed(tmp_path: Path, depth: int) -> None:
    kept = tmp_path / "kept"
    (kept / "inside").mkdir(parents=True)
    (kept / "file").write_text("kept")
    doomed = tmp_path / "doomed"
    (doomed / "a" / "b").mkdir(parents=True)
    for directory in (doomed, doomed / "a", doomed / "a" / "b"):
        (directory / "directory").symlink_to(kept)
        (directory / "link").symlink_to(kept / "file")
    dig(doomed, depth)
    dig(doomed / "a", depth)
    remove_tree(doomed)
    assert not doomed.exists()
    assert (kept / "file").read_text() == "kept"
    assert (kept / "inside").is_dir()


def test_link_in_place_of_the_directory_goes_and_its_target_stays(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    remove_tree(tmp_path / "link")
    assert (tmp_path / "kept").is_dir()
    assert not (tmp_path / "link").is_symlink()


def test_list_ends_where_paths_become_too_long_to_open_anything(tmp_path: Path) -> None:
    dig(tmp_path, 1_200)
    try:
        with directory_below(tmp_path) as directory:
            found = {"/".join(names) for names in files_in_order(directory)}
            assert "deeper/" * 500 + "file" in found
            os.close(open_inside(directory, "deeper/" * 500 + "file"))
        # Each level costs as much as its path is long: without a bound, a deep tree costs the square of its depth.
        assert max(map(len, found)) < 4096 + len("file")
    finally:
        remove_tree(tmp_path / "deeper")  # pytest cannot

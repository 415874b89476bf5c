"""What the server does below directories that an account can write to, while the account changes them."""

from __future__ import annotations

import itertools
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from attacker import UID, attacking, give
from deep_tree import deep_tree
from patience import PATIENCE_S
from trainmaster.protocol import account_files
from trainmaster.protocol.account_files import (
    UnsafeFileError,
    User,
    UserDirectoryBuilder,
    directory_below,
    files_in_order,
    open_inside,
    trees,
)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has other users' directories")
USER = User(uid=UID, gid=UID)


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A directory of the server's that no account may reach; it has to stay as it is."""
    directory = tmp_path / "victim"
    directory.mkdir(mode=0o700)
    for name in ("f0", "secret"):
        (directory / name).write_text("secret")
    yield directory
    assert sorted(path.name for path in directory.iterdir()) == ["f0", "secret"]
    for path in (directory, *directory.iterdir()):
        assert path.lstat().st_uid == os.geteuid()


def listed(directory: Path, after: tuple[str, ...] = ()) -> list[str]:
    with directory_below(directory) as opened:
        return ["/".join(names) for names in files_in_order(opened, after)]


def content(directory: Path, name: str) -> bytes:
    with directory_below(directory) as opened, open(open_inside(opened, name), "rb") as file:
        return file.read()


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory: to remove thousands of directories takes seconds on some disks."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.mark.parametrize(("depth", "names"), [(1_500, ["file", "z"]), (5_000, ["z"])])  # deeper than a path can say
def test_a_deep_tree_is_listed_measured_and_removed(memory: Path, depth: int, names: list[str]) -> None:
    top = memory / "tree"
    top.mkdir()
    (top / "z").write_bytes(b"z" * 10_000)
    with deep_tree(top, depth):
        assert [name.rpartition("/")[2] for name in listed(top)] == names
        assert account_files.size_of(memory, "tree") >= 10_000
        account_files.remove(memory, "tree")
        assert not top.exists()


def test_a_list_of_many_files_goes_on_anywhere_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "_BATCH", 3)
    names = ["a", "a/b/c", "a/b/d", "a.txt", "b", "b/a", *(f"f{number}" for number in range(10)), "z/z"]
    for name in names:
        path = tmp_path / (name if "/" in name or name not in ("a", "b") else f"{name}/own")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    everything = listed(tmp_path)
    assert everything == ["/".join(parts) for parts in sorted(tuple(name.split("/")) for name in everything)]
    assert len(everything) == len(names)
    for index, name in enumerate(everything):
        assert listed(tmp_path, tuple(name.split("/"))) == everything[index + 1 :]
    assert listed(tmp_path, ("a", "gone")) == everything[everything.index("a/own") :]


def test_only_so_many_entries_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(6):
        (tmp_path / "tree" / str(number)).mkdir(parents=True)
        (tmp_path / "tree" / str(number) / "file").write_bytes(b"x" * 50_000)
    whole = account_files.size_of(tmp_path, "tree")
    monkeypatch.setattr(trees, "MOST_COUNTED", 8)
    assert whole >= 300_000
    assert account_files.size_of(tmp_path, "tree") < whole


def test_names_that_are_no_text_and_names_with_newlines_are_removed_and_only_text_is_listed(tmp_path: Path) -> None:
    top = tmp_path / "tree"
    top.mkdir()
    for name in (b"new\nline", b"\xff\xfe", b"dir\xff"):
        path = os.path.join(os.fsencode(top), name)
        os.mkdir(path) if name.startswith(b"dir") else os.close(os.open(path, os.O_CREAT))
    assert listed(top) == ["new\nline"]
    account_files.remove(tmp_path, "tree")
    assert not top.exists()


def test_specials_are_no_files_and_are_removed(tmp_path: Path) -> None:
    top = tmp_path / "t"
    top.mkdir()
    os.mkfifo(top / "pipe")
    (top / "loop").symlink_to("loop")
    (top / "device").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(top / "socket"))
    for name in ("pipe", "loop", "device", "socket"):
        with pytest.raises(FileNotFoundError):
            content(top, name)
        with pytest.raises(UnsafeFileError):
            UserDirectoryBuilder(user=None).link_tree(tmp_path, "t", f"of-{name}")
    account_files.remove(tmp_path, "t")
    assert not top.exists()


def test_a_directory_that_is_moved_while_it_is_read_ends_the_walk(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "tree" / "inner" / "deep").mkdir(parents=True)
    (tmp_path / "tree" / "inner" / "deep" / "file").touch()
    (tmp_path / "tree" / "later").touch()
    with directory_below(tmp_path / "tree") as opened:
        found = files_in_order(opened)
        assert next(found) == ("inner", "deep", "file")
        # Its parent is the victim now: going up by the usual name would lead there.
        (tmp_path / "tree" / "inner" / "deep").rename(victim / "deep")
        with pytest.raises(OSError, match="moved"):
            next(found)
    (victim / "deep" / "file").unlink()
    (victim / "deep").rmdir()


def test_a_large_file_without_content_takes_no_room_when_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(31, "Too many links")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "saved").mkdir()
    with open(tmp_path / "saved" / "sparse", "wb") as file:
        file.write(b"begin")
        file.truncate(1 << 40)
        file.seek(1 << 39)
        file.write(b"middle")
    assert UserDirectoryBuilder(user=None).link_tree(tmp_path, "saved", "copy") == 1 << 40
    copy = tmp_path / "copy" / "sparse"
    assert copy.stat().st_blocks * 512 < 1 << 20
    with open(copy, "rb") as file:
        assert file.read(5) == b"begin"
        file.seek(1 << 39)
        assert file.read(6) == b"middle"
    assert copy.stat().st_size == 1 << 40


@as_root
def test_hard_link_to_a_file_of_the_servers_is_not_the_accounts(tmp_path: Path, victim: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "own").write_text("own")
    give(saved)
    os.link(victim / "secret", saved / "linked")  # as anybody can where fs.protected_hardlinks is 0
    assert content(saved, "own") == b"own"
    with pytest.raises(FileNotFoundError):
        content(saved, "linked")
    with pytest.raises(UnsafeFileError, match="another user"):
        UserDirectoryBuilder(user=USER).link_tree(tmp_path, "saved", "copy")


@as_root
def test_linked_tree_gives_the_user_no_setuid_program_of_root(tmp_path: Path) -> None:
    """An account that has a uid now may have run as root of a container when it saved."""
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "program").write_text("program")
    (saved / "program").chmod(0o4755)
    UserDirectoryBuilder(user=USER).link_tree(tmp_path, "saved", "copy")
    status = (tmp_path / "copy" / "program").stat()
    assert (status.st_uid, status.st_mode & 0o7777) == (UID, 0o600)
    assert (tmp_path / "copy" / "program").read_text() == "program"


@as_root
def test_layout_belongs_to_the_user_and_directories_on_the_way_do_not(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("content")
    UserDirectoryBuilder(user=USER).lay_out(
        tmp_path, "ours/work", {"a/b/file": tmp_path / "blob", "c": tmp_path / "blob"}, link=False
    )
    work = tmp_path / "ours" / "work"
    assert {path.lstat().st_uid for path in (work, *work.rglob("*"))} == {UID}
    assert (work / "a" / "b" / "file").read_text() == "content"
    assert (tmp_path / "ours").stat().st_uid == 0
    assert (tmp_path / "blob").stat().st_uid == 0


@as_root
def test_removing_follows_no_link_that_is_swapped_in_meanwhile(tmp_path: Path, victim: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    give(home)

    def swap() -> None:
        for name in os.listdir("."):
            os.rename(f"{name}/inner", f"{name}/swapped")
            os.symlink(victim, f"{name}/inner")

    with attacking(home, swap):
        for number in range(40):
            tree = tmp_path / "new"
            for name in ("inner", "other"):
                (tree / name).mkdir(parents=True)
                for index in range(20):
                    (tree / name / f"f{index}").touch()
            give(tree)
            tree = tree.rename(home / str(number))
            for _ in range(1_000):
                try:
                    account_files.remove(home, str(number))
                    break
                except OSError:  # the attacker filled what was about to go; it ends when there is nothing to rename
                    continue
            assert not tree.exists()


@as_root
def test_what_is_served_lies_in_the_accounts_directory_while_links_are_swapped(tmp_path: Path, victim: Path) -> None:
    home = tmp_path / "home"
    (home / "real").mkdir(parents=True)
    (home / "real" / "secret").write_text("own")
    give(home)
    turns = itertools.cycle((str(victim), "real"))

    def swap() -> None:
        os.symlink(next(turns), "new")
        os.rename("new", "way")

    seen = set()
    with attacking(home, swap):
        deadline = time.monotonic() + PATIENCE_S
        for tries in itertools.count(1):
            try:
                seen.add(content(home, "way/secret"))
            except FileNotFoundError:
                seen.add(b"absent")
            # On a busy machine the links may stay as they are for thousands of tries.
            if (tries >= 3_000 and len(seen) > 1) or time.monotonic() > deadline:
                break
    assert seen == {b"own", b"absent"}


@as_root
def test_linked_tree_holds_plain_files_alone_while_the_source_is_swapped(tmp_path: Path, victim: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "f0").write_text("own")
    give(saved)

    def swap() -> None:
        os.symlink(victim / "secret", "link")
        os.rename("link", "f0")
        os.close(os.open("plain", os.O_CREAT | os.O_WRONLY, 0o600))
        os.rename("plain", "f0")

    made = 0
    with attacking(saved, swap):
        for number in range(300):
            try:
                UserDirectoryBuilder(user=USER).link_tree(tmp_path, "saved", f"drafts/{number}")
                made += 1
            except UnsafeFileError:
                continue
    assert made
    for path in (tmp_path / "drafts").rglob("f*"):
        assert not path.is_symlink()
        assert path.stat().st_uid == UID

"""What is opened below a directory that others fill: plain files, and nothing that leads elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainmaster.protocol.account_files import directory_below, open_below, open_inside, open_real, status_below
from trainmaster.protocol.documents import read_document
from trainmaster.protocol.run_directory import (
    MOST_DOCUMENT_BYTES,
    RunDirectory,
    endpoint_document,
    exit_document,
    gap_document,
    log_stream,
    worker_stream,
)

LOG = log_stream(0, "main", 0, "out")
SECRET = b'{"of": "another account"}\n'


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A run directory that a job filled, beside a file that is none of its business."""
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "elsewhere/logs").mkdir(parents=True)
    (tmp_path / "elsewhere/logs/main.0.out").write_bytes(SECRET)
    (tmp_path / "run/nodes/0/logs").mkdir(parents=True)
    (tmp_path / "run/claims").mkdir()
    return tmp_path / "run"


def content(top: Path, name: str) -> bytes:
    with open(open_below(top, name), "rb") as file:
        return file.read()


def test_a_plain_file_is_opened_however_deep_it_lies(top: Path) -> None:
    (top / LOG).write_bytes(b"said")
    assert content(top, LOG) == b"said"
    status = status_below(top, LOG)
    assert status is not None
    assert status.st_size == 4
    (top.parent / "way").symlink_to(top)
    assert content(top.parent / "way", LOG) == b"said"  # the way to the top is ours


@pytest.mark.parametrize("target", ["../../../../secret", "{secret}", "main.0.err", "/dev/zero", "/nowhere"])
def test_no_link_is_followed_to_a_file(top: Path, target: str) -> None:
    (top / "nodes/0/logs/main.0.err").write_bytes(b"its own")
    (top / LOG).symlink_to(target.format(secret=top.parent / "secret"))
    with pytest.raises(FileNotFoundError):
        open_below(top, LOG)
    assert status_below(top, LOG) is None


def test_no_link_is_followed_on_the_way(top: Path) -> None:
    (top / "nodes/0/logs").rmdir()
    (top / "nodes/0/logs").symlink_to("../../../elsewhere/logs")
    with pytest.raises(FileNotFoundError):
        open_below(top, LOG)
    with pytest.raises(FileNotFoundError), directory_below(top, "nodes/0/logs"):
        pass
    assert list(RunDirectory(top).streams()) == []


def test_a_pipe_a_socket_a_directory_and_a_device_are_not_there_and_hold_nobody_up(top: Path) -> None:
    names = [f"nodes/0/{name}" for name in ("pipe", "socket", "directory")]
    os.mkfifo(top / names[0])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(top / names[1]))
    (top / names[2]).mkdir()
    for name in names:
        for flags in (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY | os.O_CREAT):
            with pytest.raises(FileNotFoundError):
                open_below(top, name, flags)
    with pytest.raises(FileNotFoundError):
        open_below("/dev", "null")


@contextlib.contextmanager
def leased(path: Path) -> Iterator[None]:
    """Have another process hold a lease on a file, as its owner may, and never give it up."""
    program = """
import fcntl, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print(flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                pytest.skip("this file system has no leases")
            yield
        finally:
            process.kill()


@pytest.mark.timeout(30)  # the kernel waits 45 s for whoever holds a lease
def test_a_file_on_which_its_owner_has_a_lease_holds_nobody_up(top: Path) -> None:
    with leased(top / LOG):
        with pytest.raises(FileNotFoundError):
            open_below(top, LOG)
        with directory_below(top, "nodes/0/logs") as directory, pytest.raises(FileNotFoundError):
            open_inside(directory, "main.0.out")
        with pytest.raises(FileNotFoundError):
            open_real(top / LOG, [top])
    os.close(open_below(top, LOG))


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user")
def test_what_another_user_keeps_to_itself_is_not_there() -> None:
    with tempfile.TemporaryDirectory() as place:
        Path(place, "own").mkdir(mode=0o700)
        for name in ("exit.json", "own/exit.json"):
            Path(place, name).touch(mode=0o600)
        os.chmod(place, 0o755)
        os.seteuid(65534)
        try:
            assert [status_below(place, name) for name in ("exit.json", "own/exit.json")] == [None, None]
        finally:
            os.seteuid(0)
        assert status_below(place, "exit.json") is not None


def test_nothing_is_left_open(top: Path) -> None:
    (top / LOG).symlink_to("/dev/null")
    os.mkfifo(top / "nodes/0/pipe")
    before = len(os.listdir("/proc/self/fd"))
    for name in (LOG, "nodes/0/pipe", "nodes/0/logs", "nodes/9/x", worker_stream(0)):
        assert status_below(top, name) is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_run_directory_shows_nothing_that_lies_behind_links(top: Path) -> None:
    directory = RunDirectory(top)
    for name in (LOG, worker_stream(0), exit_document(0), endpoint_document(0), "claims/0.json", gap_document(LOG)):
        (top / name).symlink_to(top.parent / "secret")
    assert directory.read(LOG, 0) == directory.read(worker_stream(0), 0) == b""
    assert list(directory.streams()) == []
    assert directory.document(exit_document(0)) is directory.document(endpoint_document(0)) is None
    assert directory.gap(LOG) is None
    # Somebody has put it there, so the node is nobody else's to claim; who it was is not said.
    assert directory.claimant(0) == {}
    assert directory.claim(0, {"nonce": "mine"}) is False
    with pytest.raises(FileNotFoundError):
        directory.append(LOG, 0, b"x")
    assert (top.parent / "secret").read_bytes() == SECRET


def test_a_document_without_an_end_is_none(top: Path) -> None:
    with open(top / exit_document(0), "w") as file:
        file.write(json.dumps({"reason": "SUCCEEDED"}))
        file.truncate(MOST_DOCUMENT_BYTES + 1)
    assert RunDirectory(top).document(exit_document(0)) is None
    assert read_document(top / exit_document(0)) is None


def test_a_document_by_its_path_is_a_plain_file_too(top: Path) -> None:
    (top / "link").symlink_to(top.parent / "secret")
    os.mkfifo(top / "pipe")
    assert [read_document(top / name) for name in ("link", "pipe", "nodes", "none")] == [None] * 4
    (top.parent / "way").symlink_to(top.parent)
    assert read_document(top.parent / "way" / "secret") == {"of": "another account"}  # the way to it is ours


def test_claim_that_is_made_during_the_look_at_it_is_seen_whole(tmp_path: Path) -> None:
    class Overtaken(RunDirectory):
        """A worker claims the node right after the server has found no claim."""

        def document(self, name: str, most_bytes: int = MOST_DOCUMENT_BYTES) -> dict[str, Any] | None:
            found = super().document(name, most_bytes)
            if found is None:
                self.claim(0, {"nonce": "n"})
            return found

    (tmp_path / "claims").mkdir()
    assert Overtaken(tmp_path).claimant(0) == {"nonce": "n"}

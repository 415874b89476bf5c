"""Which fork server a server keeps, and which one it replaces."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from worker_attempts import PATIENCE_S, wait_for

import trainmaster
from trainmaster.backends.local import fork_client
from trainmaster.backends.local.fork_client import ForkServer
from trainmaster.protocol.processes import identity_of, is_alive, send_signal

# A fork server is meant to outlive whoever started it.
pytestmark = pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")

SOURCE = Path(trainmaster.__file__).parents[1]


def test_fork_server_of_the_same_python_is_kept(tmp_path: Path) -> None:
    fork_server = ForkServer(tmp_path / "forkserver")
    fork_server.ensure()
    try:
        told = fork_server.ask({"op": "hello"})
        assert (told["executable"], told["prefix"]) == (sys.executable, sys.prefix)
        fork_server.ensure()
        assert fork_server.ask({"op": "hello"}) == told
    finally:
        fork_server.ask({"op": "retire"})


def test_fork_server_of_the_same_python_by_another_name_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_server = ForkServer(tmp_path / "forkserver")
    fork_server.ensure()
    try:
        told = fork_server.ask({"op": "hello"})
        (tmp_path / "snake").symlink_to(sys.executable)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "snake"))
        fork_server.ensure()
        assert fork_server.ask({"op": "hello"}) == told
    finally:
        fork_server.ask({"op": "retire"})


def test_fork_server_of_another_environment_is_replaced(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", symlinks=True)
    directory = tmp_path / "forkserver"
    command = [tmp_path / "venv/bin/python", "-m", "trainmaster.worker", "fork-server", "--directory", directory]
    other = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(SOURCE)})
    wait_for((directory / "socket").exists, "the fork server of the other environment")
    fork_server = ForkServer(directory)
    assert fork_server.ask({"op": "hello"})["prefix"] == str(tmp_path / "venv")
    fork_server.ensure()
    try:
        assert other.wait(PATIENCE_S) == 0
        assert fork_server.ask({"op": "hello"})["prefix"] == sys.prefix
    finally:
        fork_server.ask({"op": "retire"})


def test_fork_server_that_hangs_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_client, "_HELLO_TIMEOUT_S", 1.0)
    fork_server = ForkServer(tmp_path / "forkserver")
    fork_server.ensure()
    stopped = fork_server.ask({"op": "hello"})["pid"]
    identity = identity_of(stopped)
    assert identity is not None
    send_signal(identity, signal.SIGSTOP)
    try:
        fork_server.ensure()
        assert fork_server.ask({"op": "hello"})["pid"] != stopped
        fork_server.ask({"op": "retire"})
    finally:
        still_there = is_alive(identity)
        if still_there:
            send_signal(identity, signal.SIGKILL)
    assert not still_there

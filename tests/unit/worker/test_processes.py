"""Signals reach the process that was seen, and never the next owner of its pid."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest

from patience import PATIENCE_S
from trainmaster.protocol.processes import identity_of, send_signal
from trainmaster.worker.processes import SeenProcess, descendants, seen, signal_all


@pytest.fixture(params=[True, False], ids=["pidfd", "without pidfd"], autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels before 5.3 have no descriptors of processes."""
    if not request.param:
        monkeypatch.delattr(os, "pidfd_open")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_signal_reaches_the_process_that_was_seen_and_not_another_with_its_pid(child: subprocess.Popen[bytes]) -> None:
    process = seen(child.pid)
    assert process is not None
    signal_all([SeenProcess(process.pid, process.start_time - 1)], signal.SIGKILL)
    signal_all([process], signal.SIGTERM)
    assert child.wait(PATIENCE_S) == -signal.SIGTERM, "the first signal was for another"


def test_signal_for_a_process_of_another_time_is_refused(child: subprocess.Popen[bytes]) -> None:
    identity = identity_of(child.pid)
    assert identity is not None
    with pytest.raises(ProcessLookupError, match=str(child.pid)):
        send_signal(replace(identity, start_time=identity.start_time - 1), signal.SIGKILL)
    send_signal(identity, signal.SIGTERM)
    assert child.wait(PATIENCE_S) == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        send_signal(identity, signal.SIGKILL)


def test_descendants_are_seen_with_their_start(child: subprocess.Popen[bytes]) -> None:
    assert seen(child.pid) in descendants(os.getpid())
    child.kill()
    child.wait(PATIENCE_S)
    assert child.pid not in [process.pid for process in descendants(os.getpid())]
    assert descendants(child.pid) == []

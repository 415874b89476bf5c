"""What the kernel has killed in a container, by the time that its first process has ended."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from patience import PATIENCE_S
from trainmaster.backends.container import container_process

MANY = 1024
"""Descriptors that `select` can take."""


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """As many are open as a server with many containers has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2 * MANY, hard) if hard > 0 else 2 * MANY), hard))
    with contextlib.ExitStack() as opened:
        for _ in range(MANY):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_kills_are_counted_at_the_end_of_the_first_process_however_many_are_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("oom 0\noom_kill 0\n")
    monkeypatch.setattr(container_process, "_counter", lambda _: counter)
    with subprocess.Popen(["sleep", "60"]) as process:
        kills = container_process.KernelKills(process.pid)
        kills.join(0.1)
        counter.write_text("oom 2\noom_kill 2\n")
        process.kill()
        kills.join(PATIENCE_S)
    assert kills.count == 2


@pytest.mark.parametrize(("reports", "lacked"), [(1, 0), (2, 1), (4, 3)])
def test_last_report_about_a_group_that_is_gone_is_about_its_removal(reports: int, lacked: int) -> None:
    reported = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        os.eventfd_write(reported, reports)
        assert container_process._lacks_of_removed(reported) == lacked
    finally:
        os.close(reported)


def test_kernel_is_asked_for_reports_where_it_makes_them(tmp_path: Path) -> None:
    counter = tmp_path / "memory.oom_control"
    counter.write_text("oom_kill 0\n")
    assert container_process._reports_of(tmp_path / "missing") is None
    reported = container_process._reports_of(counter)
    assert reported is not None
    assert (tmp_path / "cgroup.event_control").read_text().split()[0] == str(reported)
    os.close(reported)

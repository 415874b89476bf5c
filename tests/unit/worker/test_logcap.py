"""When a log is cut, and where."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from patience import PATIENCE_S
from trainmaster.protocol.run_directory import RunDirectory, log_stream
from trainmaster.worker.watch import LogCap

LOG = log_stream(0, "main", 0, "out")
CAP = 64 << 10
LINE = b"0123456789abcde\n"


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    (tmp_path / "nodes/0/logs").mkdir(parents=True)
    return RunDirectory(tmp_path)


def write(directory: RunDirectory, data: bytes) -> None:
    with (directory.path / LOG).open("ab") as file:
        file.write(data)


def test_log_is_left_alone_up_to_its_cap(directory: RunDirectory) -> None:
    cap = LogCap(directory, LOG, CAP)
    cap.poll()  # it does not exist yet
    write(directory, LINE * (CAP // len(LINE)))
    cap.poll()
    assert directory.gap(LOG) is None


def test_log_beyond_its_cap_is_cut_between_lines(directory: RunDirectory) -> None:
    cap = LogCap(directory, LOG, CAP)
    write(directory, b"odd\n" + LINE * (3 * CAP // len(LINE)) + b"the end\n")
    cap.poll()
    gap = directory.gap(LOG)
    assert gap is not None
    size = (directory.path / LOG).stat().st_size
    assert gap.start <= CAP // 2
    assert CAP // 2 - gap.start < len(LINE)
    assert size - gap.end <= CAP * 3 // 8
    assert directory.read(LOG, gap.start - 1, 1) == b"\n"
    assert directory.read(LOG, gap.end - 1 + 1, len(LINE)) == LINE
    assert cap.due is not None  # it grows fast


def test_every_further_cut_keeps_the_head_and_stays_below_the_cap(directory: RunDirectory) -> None:
    cap = LogCap(directory, LOG, CAP)
    starts = set()
    for _ in range(50):
        write(directory, LINE * 500)
        cap.poll()
        size, gap = (directory.path / LOG).stat().st_size, directory.gap(LOG)
        assert size - (gap.end - gap.start if gap else 0) <= CAP
        starts |= {gap.start} if gap else set()
    assert len(starts) == 1


def test_line_that_never_ends_is_cut_all_the_same(directory: RunDirectory) -> None:
    cap = LogCap(directory, LOG, CAP)
    write(directory, b"x" * 4 * CAP)
    cap.poll()
    gap = directory.gap(LOG)
    assert gap is not None
    assert gap.start == CAP // 2
    assert 4 * CAP - gap.end <= CAP * 3 // 8


def test_worker_that_starts_on_a_cut_log_goes_on_with_its_gap(directory: RunDirectory) -> None:
    write(directory, LINE * (3 * CAP // len(LINE)))
    LogCap(directory, LOG, CAP).poll()
    before = directory.gap(LOG)
    again = LogCap(directory, LOG, CAP)
    again.poll()
    assert directory.gap(LOG) == before


def test_rank_that_locks_its_log_does_not_hold_up_its_worker(directory: RunDirectory) -> None:
    cap = LogCap(directory, LOG, CAP)
    write(directory, LINE * (3 * CAP // len(LINE)))
    with (directory.path / LOG).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        looking = threading.Thread(target=cap.poll, daemon=True)
        looking.start()
        looking.join(PATIENCE_S)
        assert not looking.is_alive()
    assert directory.gap(LOG) is not None

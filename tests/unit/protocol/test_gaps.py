"""What is removed from the middle of a log, and what stays where it was."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from trainmaster.protocol import run_directory
from trainmaster.protocol.run_directory import Gap, RunDirectory, gap_document, log_stream

LOG = log_stream(0, "main", 0, "out")
MIB = 1 << 20


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    (tmp_path / "nodes/0/logs").mkdir(parents=True)
    return RunDirectory(tmp_path)


def held(directory: RunDirectory) -> int:
    """The room that the log takes on the disk."""
    os.sync()
    return os.stat(directory.path / LOG).st_blocks * 512


def test_removed_middle_frees_room_and_moves_nothing(directory: RunDirectory) -> None:
    directory.append(LOG, 0, b"h" * MIB + b"m" * 8 * MIB + b"t" * MIB)
    gap = directory.remove(LOG, Gap(start=MIB, end=9 * MIB, cap_bytes=2 * MIB))
    assert gap == directory.gap(LOG) == Gap(start=MIB, end=9 * MIB, cap_bytes=2 * MIB)
    assert held(directory) < 3 * MIB
    assert directory.read(LOG, MIB - 2, 2) == b"hh"
    assert directory.read(LOG, 9 * MIB, 2) == b"tt"
    assert directory.append(LOG, 10 * MIB, b"more") == 10 * MIB + 4


def test_gap_that_is_told_of_twice_or_late_only_ever_widens(directory: RunDirectory) -> None:
    directory.append(LOG, 0, b"x" * 1000)
    wide = Gap(start=100, end=800, cap_bytes=400)
    assert directory.remove(LOG, wide) == wide
    assert directory.remove(LOG, Gap(start=100, end=500, cap_bytes=400)) == wide
    assert directory.remove(LOG, wide) == wide


def test_replica_takes_over_a_gap_that_lies_beyond_its_end(directory: RunDirectory) -> None:
    directory.append(LOG, 0, b"head\n")
    directory.put_document(gap_document(LOG), Gap(start=5, end=900, cap_bytes=100).to_json())
    assert directory.append(LOG, 900, b"tail\n") == 905
    assert directory.gap(LOG) == Gap(start=5, end=900, cap_bytes=100)
    assert directory.read(LOG, 900) == b"tail\n"


def test_file_system_without_holes_keeps_the_head_and_what_comes_after_the_cut(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(run_directory, "_punch", refuse)
    directory.append(LOG, 0, b"head\n" + b"m" * MIB)
    rank = os.open(directory.path / LOG, os.O_WRONLY | os.O_APPEND)
    gap = directory.remove(LOG, Gap(start=5, end=MIB // 2, cap_bytes=100), being_written=True)
    os.write(rank, b"after\n")
    os.close(rank)
    assert gap.start == 5
    assert gap.end >= MIB + 5  # whatever a reader had come to
    assert held(directory) < MIB // 2
    assert directory.read(LOG, 0, 5) == b"head\n"
    assert directory.read(LOG, gap.end) == b"after\n"


@pytest.mark.parametrize(
    "document", [{}, {"start": 5, "end": 1, "cap_bytes": 0}, {"start": -1, "end": 1, "cap_bytes": 0}, {"start": "0"}]
)
def test_document_that_is_no_gap_is_refused(directory: RunDirectory, document: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="a gap has"):
        directory.put_document(gap_document(LOG), document)


def test_only_logs_have_gaps(directory: RunDirectory) -> None:
    assert directory.gap("nodes/0/worker.jsonl") is None
    with pytest.raises(ValueError, match="no such document"):
        directory.put_document("nodes/0/worker.jsonl.gap.json", {"start": 0, "end": 1, "cap_bytes": 0})

"""A few words between the processes that train together."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run_ranks

from trainmaster.jobs.process import ProcessError, SingleProcess, TorchProcess, current_process


def test_single_process_answers_itself() -> None:
    alone = current_process()
    alone.barrier("start")
    assert (alone.index, alone.count) == (0, 1)
    assert alone.broadcast({"a": (1, 2)}, "x") == {"a": [1, 2]}
    assert alone.gather(b"ab") == [b"ab"]
    assert alone.any(True)
    assert not alone.any(False)


def test_ranks_that_are_not_connected_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ProcessError, match=r"2 ranks.*init_process_group"):
        current_process()


def test_torch_ranks_hear_each_other(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        mine = current_process()
        assert current_process() is mine
        mine.barrier("start")
        said = mine.broadcast({"from": rank, "text": "ü" * 1000, "none": None}, "word")
        empty = mine.broadcast(None, "nothing")
        gathered = mine.gather(bytes([rank]) * (rank * 5))
        nobody = mine.gather(b"")
        return [
            (mine.index, mine.count),
            said,
            empty,
            [list(found) for found in gathered],
            [list(found) for found in nobody],
            mine.any(rank == 1),
            mine.any(False),
        ]

    first, second, third = run_ranks(3, work, tmp_path / "ranks")
    assert [first[0], second[0], third[0]] == [[0, 3], [1, 3], [2, 3]]
    assert first[1] == second[1] == third[1] == {"from": 0, "text": "ü" * 1000, "none": None}
    assert first[2] is None
    assert first[3] == [[], [1] * 5, [2] * 10]
    assert second[3] == []
    assert first[4] == [[], [], []]
    assert first[5] is second[5] is third[5] is True
    assert first[6] is second[6] is False


def test_torch_ranks_at_different_points_are_told(tmp_path: Path) -> None:
    def work(rank: int) -> str:
        mine = current_process()
        try:
            mine.broadcast(1, f"point {rank}")
        except ProcessError as error:
            return str(error)
        return ""

    assert run_ranks(2, work, tmp_path / "ranks") == ["", "rank 1 is at 'point 1', but rank 0 is at 'point 0'"]


def test_torch_barrier_names_the_rank_that_did_not_come(tmp_path: Path) -> None:
    left = tmp_path / "left"

    def work(rank: int) -> str:
        mine = TorchProcess(timeout_s=2.0)
        if rank == 1:
            while not left.exists():
                time.sleep(0.02)
            return ""
        try:
            mine.barrier("save")
        except ProcessError as error:
            return str(error)
        finally:
            left.touch()
        return ""

    said = run_ranks(2, work, tmp_path / "ranks")[0]
    assert "'save'" in said
    assert "1" in said.split("'save'")[1]


def test_group_of_one_rank_needs_no_words(tmp_path: Path) -> None:
    def work(rank: int) -> bool:
        return isinstance(current_process(), SingleProcess)

    assert run_ranks(1, work, tmp_path / "ranks") == [True]
